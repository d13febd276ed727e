"""What modules and optimizers launch is compiled for a Hopper, to machine code, and fits into its processors. Nothing is run.

Where a GPU is, Triton compiles a kernel when it is first launched. Without one its compiler and NVIDIA's assembler, which its package
has, do the same for a device that they are told of. Shapes are small; variants of a kernel follow from types, recipes, edges and
addresses, and are those of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import ottava
from ottava.attention import PackedDocuments
from ottava.kernels import launch
from ottava.models import GPT, GPTConfig, Llama, LlamaConfig
from ottava.optimizers import FusedAdam
from pretended_cuda import pretended_cuda
from quant_cases import RECIPES, casting

HOPPER = GPUTarget("cuda", 90, 32)
driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0
    )
)
SHARED_BYTES = 227 * 1024
"""Of a processor, that one program may take."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """Variants by the name of their kernel, instead of launches."""
    found: dict[str, list[Any]] = {}

    def compile_only(
        self: launch.Launcher, grid: Any, warps: int, arguments: dict, fuse_multiply_add: bool = False, registers: int | None = None
    ) -> None:  # fmt: skip
        options = {} if registers is None else {"maxnreg": registers}
        values = [arguments[name] for name in self.names]
        variant = self.kernel.warmup(*values, grid=grid, num_warps=warps, enable_fp_fusion=fuse_multiply_add, **options)
        found.setdefault(self.kernel.__name__, []).append(variant)

    monkeypatch.setattr(launch.Launcher, "__call__", compile_only)
    with pretended_cuda():
        yield found


def check(found: dict[str, list[Any]], *kernels: str) -> None:
    assert set(kernels) <= set(found), sorted(found)
    for name, variants in found.items():
        for variant in variants:
            assert variant.metadata.shared <= SHARED_BYTES, (name, variant.metadata.shared)
            assert variant.asm["cubin"]


def step(model: torch.nn.Module, name: str, **options: Any) -> None:
    """One of training; the numbers are whatever lies in memory."""
    optimizer = FusedAdam(model.parameters(), **options)
    tokens = torch.randint(1000, (2, 129), generator=torch.Generator().manual_seed(0))
    with casting(name):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()


NAMES = ["delayed", "current", "block", "mxfp8"]


@pytest.mark.parametrize("name,stored", [("none", False), *itertools.product(NAMES, [False, True])])
def test_a_llamas_step(name: str, stored: bool, compiled: dict[str, list[Any]]) -> None:
    config = LlamaConfig(1000, 256, 512, layers=1, heads=4, kv_heads=2, max_length=128, pad_vocab_to=128)
    with ottava.quantized_model_init(enabled=stored, recipe=RECIPES[name]):
        model = Llama(config, device="cpu", params_dtype=torch.bfloat16)
    step(model, name, **({} if stored else {"master_weights": True}))
    check(compiled, "_stats_kernel", "_backward_kernel", "_fused_kernel", "_adam_kernel", "tile_kernel")


def test_a_gpts_step_with_small_states(compiled: dict[str, list[Any]]) -> None:
    model = GPT(GPTConfig(1000, 256, 512, layers=1, heads=2, max_length=128), device="cpu", params_dtype=torch.bfloat16)
    blocks = {"exp_avg_dtype": "float8_block128", "exp_avg_sq_dtype": "float8_block128", "store_param_remainders": True}
    step(model, "delayed", master_weights=True, **blocks)
    check(compiled, "_adam_kernel", "tile_kernel")


def test_packed_documents_experts_and_fp8_attention(compiled: dict[str, list[Any]]) -> None:
    q, k, v = (torch.randn(256, 1, n, 64, dtype=torch.bfloat16).requires_grad_() for n in (8, 2, 2))
    module = ottava.DotProductAttention(8, 64, 2, attn_mask_type="arbitrary")
    documents = PackedDocuments(torch.arange(256).div(100, rounding_mode="floor").expand(1, 256).contiguous(), "cuda")
    with ottava.attention.attention_backend("triton"):
        module(q, k, v, attention_mask=documents).sum().backward()
    experts = ottava.GroupedLinear(2, 256, 512, params_dtype=torch.bfloat16, device="cpu")
    for name in ("none", "current", "block"):
        with casting(name):
            experts(torch.randn(256, 256).bfloat16().requires_grad_(), [128, 128]).sum().backward()
    half = ottava.recipe.Float8CurrentScaling(fp8_dpa=True)
    causal = ottava.DotProductAttention(8, 64, 2, attn_mask_type="causal")
    with ottava.autocast(recipe=half), ottava.attention.attention_backend("fp8"), torch.no_grad():
        causal(q, k, v)
    check(compiled, "_forward_kernel", "_query_kernel", "_key_kernel", "_grouped_kernel", "_attention_fp8_kernel")
