"""The factories of TransformerEngine's recipes: role of a tensor -> quantizer, as a `CustomRecipe` takes them."""

from __future__ import annotations

from typing import Any

from ottava.compat.quantizers import (
    FORMATS,
    DelayedScalingRequest,
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerRole,
)
from ottava.quant.scheme import Scheme
from ottava.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
]


def _weight(role: QuantizerRole | None) -> bool:
    return role is not None and role.tensor_type == "weight"


def _grad(role: QuantizerRole | None) -> bool:
    return role is not None and role.tensor_type == "grad_output"


def _of(recipe: Any, role: QuantizerRole | None) -> Scheme:
    return Scheme.of(recipe, "weight" if _weight(role) else "grad" if _grad(role) else "input")


def _dtype(scheme: Scheme) -> DType:
    return next(dtype for dtype, name in FORMATS.items() if name == scheme.element.name)


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Quantizes nothing."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """As `DelayedScaling()`."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """As `Float8CurrentScaling()`."""
    return Float8CurrentScalingQuantizer(_dtype(_of(Float8CurrentScaling(), role)))


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """As `Float8BlockScaling()`."""
    scheme = _of(Float8BlockScaling(), role)
    return Float8BlockQuantizer(_dtype(scheme), block_scaling_dim=1 if scheme.two_copies else 2)


def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    """As `MXFP8BlockScaling()`."""
    return MXFP8Quantizer(_dtype(_of(MXFP8BlockScaling(), role)))


def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    """As `NVFP4BlockScaling()`."""
    scheme = _of(NVFP4BlockScaling(), role)
    return NVFP4Quantizer(
        with_rht=scheme.hadamard,
        with_post_rht_amax=scheme.hadamard,
        with_2d_quantization=not scheme.two_copies,
        stochastic_rounding=scheme.stochastic,
    )
