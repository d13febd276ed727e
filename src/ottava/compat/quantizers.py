"""TransformerEngine's quantizers, as far as a `CustomRecipe` needs them: each says in which scheme it quantizes.

A factory is asked with a role ("linear" input, weight, grad_output) and answers with a quantizer. Those of TransformerEngine's own
recipes are here under their names; a program's own factories compose them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from ottava.quant.scheme import Scheme
from ottava.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

__all__ = [
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
]


class DType(enum.IntEnum):
    """Element types by TransformerEngine's names."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


_FORMATS = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2", DType.kFloat4E2M1: "e2m1"}


def _format(dtype: Any) -> str:
    if dtype not in _FORMATS:
        known = ", ".join(f"DType.{dtype.name}" for dtype in _FORMATS)
        raise ValueError(f"A quantizer makes FP8 or FP4: its dtype must be one of {known}, got {dtype!r}.")
    return _FORMATS[dtype]


@dataclass(frozen=True)
class QuantizerRole:
    """Whose tensor is to be quantized; empty where it is not said."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class Quantizer:
    """How one tensor is quantized."""

    def scheme(self) -> Scheme | None:
        """None: it stays as it is."""
        raise ValueError(
            f"{type(self).__name__} is a quantizer of the program's own, which Ottava cannot call: a CustomRecipe's factory has to answer "
            "with TransformerEngine's quantizers."
        )


@dataclass
class IdentityQuantizer(Quantizer):
    """Leaves tensors in high precision."""

    rowwise: bool = True
    columnwise: bool = True

    def scheme(self) -> None:
        """It stays as it is."""


@dataclass
class Float8CurrentScalingQuantizer(Quantizer):
    """One scale a tensor, from its own amax. `device` and the process group are not needed: they are the tensor's."""

    fp8_dtype: Any
    device: Any = None
    rowwise: bool = True
    columnwise: bool = True
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def scheme(self) -> Scheme:
        """One scale."""
        return Scheme(_format(self.fp8_dtype), None, self.force_pow_2_scales, self.amax_epsilon)


@dataclass
class Float8BlockQuantizer(Quantizer):
    """Blocks of 128 (`block_scaling_dim=1`) or 128x128 (2)."""

    fp8_dtype: Any
    rowwise: bool = True
    columnwise: bool = True
    amax_epsilon: float = 0.0
    force_pow_2_scales: bool = True
    block_scaling_dim: int = 2

    def scheme(self) -> Scheme:
        """Blocks along one dimension or square ones."""
        block = (1, 128) if self.block_scaling_dim == 1 else (128, 128)
        return Scheme(_format(self.fp8_dtype), block, self.force_pow_2_scales, self.amax_epsilon)


@dataclass
class MXFP8Quantizer(Quantizer):
    """Blocks of 32 with E8M0 scales."""

    fp8_dtype: Any
    rowwise: bool = True
    columnwise: bool = True

    def scheme(self) -> Scheme:
        """1x32 blocks."""
        return Scheme(_format(self.fp8_dtype), (1, 32))


@dataclass
class NVFP4Quantizer(Quantizer):
    """Blocks of 16, or 16x16, with E4M3 scales."""

    fp4_dtype: Any = DType.kFloat4E2M1
    rowwise: bool = True
    columnwise: bool = True
    with_rht: bool = False
    with_post_rht_amax: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    with_random_sign_mask: bool = True

    def scheme(self) -> Scheme:
        """1x16 or 16x16 blocks."""
        if self.with_post_rht_amax != self.with_rht or not self.with_random_sign_mask:
            raise ValueError(
                f"NVFP4Quantizer(with_rht={self.with_rht}, with_post_rht_amax={self.with_post_rht_amax}, with_random_sign_mask="
                f"{self.with_random_sign_mask}): the first two must be equal and the last True."
            )
        block = (16, 16) if self.with_2d_quantization else (1, 16)
        return Scheme("e2m1", block, hadamard=self.with_rht, stochastic=self.stochastic_rounding)


@dataclass(kw_only=True)
class HybridQuantizer(Quantizer):
    """One quantizer for the rowwise copy and one for the columnwise copy."""

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    columnwise_source: str = "original"

    def scheme(self) -> Scheme | None:
        """That of both directions."""
        rows, columns = self.rowwise_quantizer.scheme(), self.columnwise_quantizer.scheme()
        if self.columnwise_source != "original" or (rows is None) != (columns is None):
            raise ValueError(
                f"A HybridQuantizer of {rows or 'no'} rowwise and {columns or 'no'} columnwise quantization (columnwise_source="
                f"{self.columnwise_source!r}): Ottava quantizes both directions, from the original, or backward not at all "
                "(`IdentityQuantizer` columnwise for inputs and weights, and for gradients)."
            )
        return rows if rows is None or rows == columns else replace(rows, columns=columns)


class QuantizerRequest:
    """Base of what a factory answers where a quantizer keeps state."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Delayed scaling with these fields of `DelayedScaling`."""

    fp8_format: Any = DelayedScaling().fp8_format
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True


# ------------------------------------------------------------------------------------- the factories of TransformerEngine's recipes


def _weight(role: QuantizerRole | None) -> bool:
    return role is not None and role.tensor_type == "weight"


def _grad(role: QuantizerRole | None) -> bool:
    return role is not None and role.tensor_type == "grad_output"


def _of(recipe: Any, role: QuantizerRole | None) -> Scheme:
    return Scheme.of(recipe, "weight" if _weight(role) else "grad" if _grad(role) else "input")


def _dtype(scheme: Scheme) -> DType:
    return next(dtype for dtype, name in _FORMATS.items() if name == scheme.element.name)


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
