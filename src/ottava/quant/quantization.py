"""`Quantization`: what a recipe means to those who multiply. The one place that turns a recipe's class into facts.

>>> from ottava import recipe
>>> from ottava.quant.quantization import Quantization
>>> quantization = Quantization.of(recipe.DelayedScaling())
>>> str(quantization.grad), quantization.delayed, quantization.feature_multiple
('e5m2:tensor:f32', True, 16)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ottava.quant.scheme import Scheme
from ottava.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, HybridScaling, Recipe


class AttentionScales(NamedTuple):
    """How the scales of queries, keys and values follow from their amax, each tensor's own: see `scaling.scale_from_amax`."""

    peak: float
    """What the largest magnitude becomes."""
    epsilon: float
    power_of_two: bool


@dataclass(frozen=True)
class Quantization:
    """The three schemes of a recipe, and how its products run."""

    recipe: Recipe
    input: Scheme
    weight: Scheme
    grad: Scheme
    gated_grad: Scheme
    """Of a gradient that a gated activation's backward makes: it is rounded to the activation dtype first (docs/numerics.md)."""
    delayed: bool
    """Scales are given, from earlier steps; amax is recorded."""
    shares_scales: bool
    """Ranks that hold parts of one tensor have the same scale for it."""
    split_fprop: bool
    split_dgrad: bool
    split_wgrad: bool
    backward: str
    """ "quantized", "high_precision" or "dequantized": see [Note: three ways back] in nn/core.py."""
    feature_multiple: int
    """What the feature dimensions of a quantized GEMM must be a multiple of."""
    attention: AttentionScales | None
    """Of attention in FP8, where the recipe asks for it (`fp8_dpa`, `fp8_mha`)."""

    @staticmethod
    def of(recipe: Recipe) -> Quantization:
        """The facts of `recipe`. Cheap for the recipe that was asked for last."""
        if torch.compiler.is_compiling():
            return _of(recipe)
        asked, known = _LAST.pair
        if asked is not recipe or known is None:
            known = _of(recipe)
            _LAST.pair = (recipe, known)
        return known

    @property
    def name(self) -> str:
        """What users call the recipe."""
        return type(self.recipe).__name__

    @property
    def precision(self) -> str:
        """In what a device that has it multiplies: "fp8" or "fp4"."""
        return f"fp{self.weight.element.bits}"

    def __str__(self) -> str:
        return f"{self.name}(input: {self.input.rounded}, weight: {self.weight.rounded}, grad: {self.grad.rounded})"


class _Last:
    """One pair, replaced as a whole: threads see either the old or the new one."""

    pair: tuple[Recipe | None, Quantization | None] = (None, None)


_LAST = _Last()


def _of(recipe: Any) -> Quantization:
    delayed = isinstance(recipe, DelayedScaling)
    forward, backward = (recipe.forward, recipe.backward) if isinstance(recipe, HybridScaling) else (recipe, recipe)
    split_fprop, split_dgrad, split_wgrad = not delayed, True, True
    if isinstance(forward, Float8CurrentScaling | Float8BlockScaling):
        split_fprop = forward.fp8_gemm_fprop.use_split_accumulator
    if isinstance(backward, Float8CurrentScaling | Float8BlockScaling):
        split_dgrad = backward.fp8_gemm_dgrad.use_split_accumulator
        split_wgrad = backward.fp8_gemm_wgrad.use_split_accumulator
    weight, grad = Scheme.of(recipe, "weight"), Scheme.of(recipe, "grad")
    return Quantization(
        recipe=recipe,
        input=Scheme.of(recipe, "input"),
        weight=weight,
        grad=grad,
        gated_grad=grad.rounded,
        delayed=delayed,
        shares_scales=recipe.reduce_amax if delayed else True,
        split_fprop=split_fprop,
        split_dgrad=split_dgrad,
        split_wgrad=split_wgrad,
        backward=recipe.backward_override or "quantized",
        feature_multiple=weight.feature_multiple,
        attention=_attention(recipe) if recipe.fp8_dpa or recipe.fp8_mha else None,
    )


def _attention(recipe: Any) -> AttentionScales:
    """Delayed scaling keeps no history of queries, keys and values: of it only the margin holds for them."""
    peak = Scheme.of(recipe, "input").element.max
    if isinstance(recipe, DelayedScaling):
        return AttentionScales(peak / 2**recipe.margin, 0.0, False)
    given = recipe.fp8_quant_fwd_inp
    return AttentionScales(peak, given.amax_epsilon, given.power_2_scale)
