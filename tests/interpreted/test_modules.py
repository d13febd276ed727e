"""Modules by the path that a GPU takes, launch by launch, against the path of a CPU: the same bytes where the order of sums is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from gpu.test_modules import test_recorded_modules_within_their_bars as recorded_modules_within_their_bars
from ottava import recipe
from pretended_cuda import pretended_cuda
from quant_cases import RECIPES, relative

HYBRID = recipe.HybridScaling(recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling())
CHOSEN = {
    **RECIPES,
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "hybrid": HYBRID,
}
BF16: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
LLAMA = {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: ottava.Linear(128, 256, **BF16),
    "linear, odd": lambda: ottava.Linear(96, 32, bias=False, **BF16),
    "layernorm linear": lambda: ottava.LayerNormLinear(128, 256, **BF16),
    "mlp, gelu": lambda: ottava.LayerNormMLP(128, 256, **BF16),
    "mlp, swiglu": lambda: ottava.LayerNormMLP(
        128, 384, activation="swiglu", normalization="RMSNorm", bias=False, **BF16
    ),
    "gpt layer": lambda: ottava.TransformerLayer(128, 256, 2, hidden_dropout=0.0, attention_dropout=0.0, **BF16),
    "llama layer": lambda: ottava.TransformerLayer(
        128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, **LLAMA, **BF16
    ),
}


def trained(module: nn.Module, chosen: recipe.Recipe | None, steps: int = 2) -> dict[str, Tensor]:
    """Output, gradients and buffers of the last of some steps."""
    features = next(p.shape[1] for p in module.parameters() if p.dim() == 2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        shape = (32, 2, features)
        x, dy = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
        x.requires_grad_()
        module.zero_grad()
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.backward(dy[..., : y.shape[-1]] if y.shape[-1] <= features else dy.repeat(1, 1, 2)[..., : y.shape[-1]])
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **dict(module.named_buffers())}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("scheme", CHOSEN)
def test_the_path_of_a_gpu_gives_what_a_cpu_does(scheme: str, name: str) -> None:
    module = MODULES[name]()
    other = copy.deepcopy(module)
    expected = trained(module, CHOSEN[scheme])
    with pretended_cuda():
        found = trained(other, CHOSEN[scheme])
    # A rounding of bf16 that falls to the other side moves a few bytes of FP8: within the bars of modules in docs/numerics.md.
    bar = {"none": 1e-2, "nvfp4": 0.3}.get(scheme, 6e-2)
    assert sorted(found) == sorted(expected)
    for what, value in expected.items():
        if not what.endswith("key_bias") and value.norm() > 0:  # the true gradient of a key's bias is zero
            assert relative(found[what], value) < bar, (what, relative(found[what], value))


@pytest.mark.parametrize("name", ["linear", "lnlinear_ln", "lnmlp_swiglu"])
def test_recorded_modules(name: str) -> None:
    with pretended_cuda():
        recorded_modules_within_their_bars(name)
