"""Recipes, schemes and small helpers that several test files share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import ottava
from ottava import recipe

# One of each kind, with short windows so that a test of a few steps sees values drop out.
RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
QUANTIZING = [name for name in RECIPES if name != "none"]
# Stochastic rounding draws random numbers, so two runs of the same thing are equal only with the same seed.
DETERMINISTIC = [name for name in RECIPES if name != "nvfp4"]

# Every scheme that a recipe can name, with each option once.
SCHEMES = [
    "e4m3:tensor",
    "e5m2:tensor",
    "e4m3:tensor:pow2",
    "e4m3:tensor:eps=0.5",
    "e4m3:1x128:pow2",
    "e5m2:1x128:pow2",
    "e4m3:1x128",
    "e4m3:128x128:pow2",
    "e5m2:128x128",
    "e4m3:1x32",
    "e5m2:1x32",
    "e2m1:1x16",
    "e2m1:16x16",
    "e2m1:1x16:rht",
    "e2m1:1x16:rht:stochastic",
]


def casting(name: str) -> ottava.autocast:
    """`autocast` of the recipe called `name`; disabled for "none"."""
    return ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name])


def relative(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius error of a against b."""
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal shape, dtype and bits; NaN equals NaN."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def all_same(a: Iterable[Tensor | None], b: Iterable[Tensor | None]) -> bool:
    """`same`, for each pair of two lists."""
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def gradients(module: torch.nn.Module) -> list[Tensor | None]:
    """The gradients of all parameters, in order."""
    return [parameter.grad for parameter in module.parameters()]


def delayed_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all delayed-scaling buffers in `module`."""
    return {
        name: buffer.clone() for name, buffer in module.named_buffers() if "delayed" in name and "previous" not in name
    }
