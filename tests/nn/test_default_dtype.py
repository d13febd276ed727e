"""A model that is built while torch's default dtype is bfloat16, as loaders of bf16 checkpoints set it, computes as any other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import ottava
from ottava import recipe
from quant_cases import RECIPES, all_same, casting, gradients


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def attention(stored: recipe.Recipe | None) -> ottava.MultiheadAttention:
    """Separate q, k and v, as in TransformerEngine's Llama."""
    torch.manual_seed(0)
    with ottava.quantized_model_init(enabled=stored is not None, recipe=stored):
        return ottava.MultiheadAttention(
            64, 2, attention_dropout=0.0, fuse_qkv_params=False, input_layernorm=True, normalization="RMSNorm",
            params_dtype=torch.bfloat16, device="cpu",
        )  # fmt: skip


def trained(name: str, stored: bool, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Outputs, gradients, buffers and updated weights of two steps, with all of it under the default dtype `dtype`."""
    with default_dtype(dtype):
        block = attention(RECIPES[name] if stored else None)
        optimizer = ottava.optimizers.FusedAdam(
            [p for p in block.parameters() if p.requires_grad], lr=1e-2, master_weights=True,
            exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16, bias_correction=False,
        )  # fmt: skip
        seen: list[torch.Tensor | None] = []
        for i in range(2):
            optimizer.zero_grad()
            x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(i), dtype=torch.float32).bfloat16()
            torch.manual_seed(i)
            with casting(name):
                y = block(x)
            y.sum().backward()
            optimizer.step()
            seen += [y, *gradients(block)]
        masters = [optimizer.state[p]["master_param"] for p in block.parameters() if p in optimizer.state]
        return [*seen, *masters, *block.buffers()]


@pytest.mark.parametrize("stored", [False, True], ids=["masters", "fp8 storage"])
@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8", "nvfp4"])
def test_the_default_dtype_changes_no_bit(name: str, stored: bool) -> None:
    assert all_same(trained(name, stored, torch.float32), trained(name, stored, torch.bfloat16))


def test_scales_and_histories_are_float32_under_any_default_dtype() -> None:
    with default_dtype(torch.bfloat16):
        layer = ottava.Linear(32, 32, device="cpu")
        sink = ottava.DotProductAttention(4, 16, softmax_type="learnable", device="cpu").softmax_offset
    assert {b.dtype for b in layer.buffers()} == {torch.float32}
    assert sink is not None and sink.dtype is torch.float32


@pytest.mark.parametrize("scale", [torch.ones(1, dtype=torch.bfloat16), torch.ones(2)], ids=["bf16", "two"])
def test_a_scale_that_the_kernels_are_not_compiled_for_is_named(scale: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="A scale must be one float32 number, got"):
        torch.ops.ottava.quantize(torch.randn(16, 16), "e4m3:tensor", scale, None, True, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dropout_keeps_the_same_under_any_default_dtype(dtype: torch.dtype) -> None:
    """Numbers of 8 bits would keep too many or too few."""
    q = torch.randn(32, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    modules = ottava.DotProductAttention(4, 16, attention_dropout=0.3), ottava.nn.drop_path.DropPath(0.3)

    def run(default: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with default_dtype(default):
            return [modules[0](q, q, q), modules[1](q)]

    assert all_same(run(torch.float32), run(dtype))
