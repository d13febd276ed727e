"""What the tests of FusedAdam share: parameters, gradients, a training loop, layers that are stored in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava import recipe

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
RECIPES = [
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(),
]
SHAPES = [(), (3,), (17, 5), (4, 3, 2)]


def recipe_name(r: Any) -> str:
    return type(r).__name__


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, attribute: str = "grad", dtype: Any = None) -> None:
    """Gradients of very different sizes, the same for every call with the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator) * 10.0 ** (-2 * i)
        setattr(p, attribute, grad.to(p.device, dtype or p.dtype))


def train(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 20, **kwargs: Any) -> list[Tensor]:
    params = parameters(**kwargs)
    optimizer = make(params)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return [p.detach().clone() for p in params]


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance in float32 steps."""
    step = torch.nextafter(b.abs(), torch.tensor(float("inf"), device=b.device)) - b.abs()
    return int(((a.double() - b.double()).abs() / step.double()).max())


def quantized_linear(r: recipe.Recipe, preserve: bool = False, features: int = 64) -> ottava.Linear:
    with ottava.quantized_model_init(recipe=r, preserve_high_precision_init_val=preserve):
        return ottava.Linear(features, features, bias=False, params_dtype=torch.bfloat16, device="cpu")
