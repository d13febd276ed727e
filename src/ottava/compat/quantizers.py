"""TransformerEngine's quantizers: each says in which scheme it quantizes, for a `CustomRecipe`, and quantizes a tensor it is given.

A factory is asked with a role ("linear" input, weight, grad_output) and answers with a quantizer. Those of TransformerEngine's own
recipes are in `quantizer_factories`; a program's own factories compose them.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.cast import operand_amax
from ottava.quant.quantizer import quantize_by_scheme
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor
from ottava.recipe import DelayedScaling

__all__ = [
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "TE_DType",
    "TE_DType_To_Torch",
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


FORMATS = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2", DType.kFloat4E2M1: "e2m1"}


TE_DType = {
    torch.uint8: DType.kByte,
    torch.int16: DType.kInt16,
    torch.int32: DType.kInt32,
    torch.int64: DType.kInt64,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
TE_DType_To_Torch = {named: dtype for dtype, named in TE_DType.items()}


def _format(dtype: Any) -> str:
    if dtype not in FORMATS:
        known = ", ".join(f"DType.{dtype.name}" for dtype in FORMATS)
        raise ValueError(f"A quantizer makes FP8 or FP4: its dtype must be one of {known}, got {dtype!r}.")
    return FORMATS[dtype]


@dataclass(frozen=True)
class QuantizerRole:
    """Whose tensor is to be quantized; empty where it is not said."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class _Quantize(torch.autograd.Function):
    """Rounding has no derivative; the gradient passes as if there had been none."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: Quantizer, scheme: Scheme) -> QuantizedTensor:
        return quantize_by_scheme(tensor, scheme, *quantizer.scales(tensor), quantizer.rowwise, quantizer.columnwise)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class Quantizer:
    """How one tensor is quantized. Called with a tensor it gives a `QuantizedTensor`."""

    rowwise: bool = True
    columnwise: bool = True

    def __call__(self, tensor: Tensor) -> Any:
        return self.quantize(tensor)

    def quantize(self, tensor: Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None) -> Any:
        """`tensor` quantized, into `out` if there is one; dtype: that the result stands for."""
        if out is not None:
            return self.update_quantized(tensor, out)
        scheme = self.scheme()
        source = tensor if dtype is None else tensor.to(dtype)
        if scheme is None:
            return source
        made = _Quantize.apply(source, self, scheme)
        made._quantizer = self
        return made

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A tensor to quantize into (`update_quantized`); it has zeros."""
        if pin_memory:
            raise ValueError("make_empty(pin_memory=True): quantized tensors are not pinned here; leave it out.")
        return self.quantize(torch.zeros(tuple(shape), dtype=dtype, device=device)).requires_grad_(requires_grad)

    def update_quantized(self, src: Tensor, dst: QuantizedTensor, *, noop_flag: Tensor | None = None) -> Any:
        """Writes `src` into `dst`, which is of this quantizer's scheme; not at all if `noop_flag` is not 0."""
        scheme = self.scheme()
        if not isinstance(dst, QuantizedTensor) or scheme is None or not dst.scheme.same_bytes(scheme):
            found = dst.scheme if isinstance(dst, QuantizedTensor) else type(dst).__name__
            raise ValueError(f"{type(self).__name__} quantizes to {scheme}, and cannot write into {found}.")
        if noop_flag is None or not noop_flag.item():
            with torch.no_grad():
                dst.copy_(quantize_by_scheme(src, scheme, *self.scales(src)))
        return dst

    def scales(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(scale, amax) that `tensor` is quantized with, where they do not follow from it."""
        return self._scale(tensor), self._amax(tensor)

    def _scale(self, tensor: Tensor) -> Tensor | None:
        """What `tensor` is multiplied by; None: the scheme computes it."""
        return None

    def _amax(self, tensor: Tensor) -> Tensor | None:
        """What the scale is computed from; None: the scheme finds it."""
        return None

    def copy(self) -> Quantizer:
        """Another one with the same settings; tensors are shared."""
        return copy.copy(self)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Which copies it makes."""
        self.rowwise = self.rowwise if rowwise is None else rowwise
        self.columnwise = self.columnwise if columnwise is None else columnwise

    @property
    def rowwise_usage(self) -> bool:
        """Whether it makes the rowwise copy."""
        return self.rowwise

    @property
    def columnwise_usage(self) -> bool:
        """Whether it makes the columnwise copy."""
        return self.columnwise

    def scheme(self) -> Scheme | None:
        """None: it stays as it is."""
        raise ValueError(
            f"{type(self).__name__} is a quantizer of the program's own, which Ottava cannot call: a CustomRecipe's factory has to answer "
            "with TransformerEngine's quantizers."
        )


def _shared_amax(quantizer: Any, tensor: Tensor) -> Tensor | None:
    """The amax over all ranks of the quantizer's group, if it is to be shared."""
    if not quantizer.with_amax_reduction:
        return None
    amax = operand_amax(tensor.detach().reshape(-1, tensor.shape[-1]), quantizer.scheme())
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
    return amax


@dataclass
class IdentityQuantizer(Quantizer):
    """Leaves tensors in high precision."""

    rowwise: bool = True
    columnwise: bool = True
    dtype: torch.dtype | None = None

    def quantize(self, tensor: Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None) -> Any:
        """`tensor`, in the quantizer's dtype if it has one."""
        return super().quantize(tensor, out=out, dtype=dtype or self.dtype)

    def scheme(self) -> None:
        """It stays as it is."""


@dataclass(eq=False)
class Float8Quantizer(Quantizer):
    """One scale a tensor, which is given. `amax` grows to the largest magnitude of what is quantized."""

    scale: Tensor
    amax: Tensor
    fp8_dtype: Any
    _: KW_ONLY
    rowwise: bool = True
    columnwise: bool = True

    def _scale(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self.amax.clamp_(min=tensor.detach().abs().amax().to(self.amax))
        return self.scale.detach().to(tensor.device, torch.float32).reshape(1)

    def scheme(self) -> Scheme:
        """As that of `DelayedScaling`."""
        return Scheme(_format(self.fp8_dtype))


@dataclass
class Float8CurrentScalingQuantizer(Quantizer):
    """One scale a tensor, from its own amax, or from that of all ranks of `amax_reduction_group` (`with_amax_reduction`). `device` is not
    needed: it is the tensor's. In a `CustomRecipe` the modules know which ranks share a scale."""

    fp8_dtype: Any
    device: Any = None
    _: KW_ONLY
    rowwise: bool = True
    columnwise: bool = True
    with_amax_reduction: bool = False
    amax_reduction_group: Any = None
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def _amax(self, tensor: Tensor) -> Tensor | None:
        return _shared_amax(self, tensor)

    def scheme(self) -> Scheme:
        """One scale."""
        return Scheme(_format(self.fp8_dtype), None, self.force_pow_2_scales, self.amax_epsilon)


@dataclass
class Float8BlockQuantizer(Quantizer):
    """Blocks of 128 (`block_scaling_dim=1`) or 128x128 (2)."""

    fp8_dtype: Any
    _: KW_ONLY
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
    _: KW_ONLY
    rowwise: bool = True
    columnwise: bool = True
    with_2d_quantization: bool = False

    def scheme(self) -> Scheme:
        """1x32 blocks."""
        if self.with_2d_quantization:
            raise ValueError(
                "MXFP8Quantizer(with_2d_quantization=True): blocks are 1x32 here, not 32x32; leave it out."
            )
        return Scheme(_format(self.fp8_dtype), (1, 32))


@dataclass
class NVFP4Quantizer(Quantizer):
    """Blocks of 16, or 16x16, with E4M3 scales."""

    fp4_dtype: Any = DType.kFloat4E2M1
    rowwise: bool = True
    columnwise: bool = True
    with_amax_reduction: bool = False
    amax_reduction_group: Any = None
    with_rht: bool = False
    with_post_rht_amax: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: str = "MAE"
    with_random_sign_mask: bool = True

    def _amax(self, tensor: Tensor) -> Tensor | None:
        return _shared_amax(self, tensor)

    def scheme(self) -> Scheme:
        """1x16 or 16x16 blocks."""
        if self.row_scaled_nvfp4 or self.nvfp4_use_4over6:
            raise ValueError(
                "NVFP4Quantizer offers neither row_scaled_nvfp4 nor nvfp4_use_4over6: a tensor has one scale above those of its blocks, "
                "and blocks reach 6. Leave them out."
            )
        if self.with_post_rht_amax != self.with_rht or (self.with_rht and not self.with_random_sign_mask):
            raise ValueError(
                f"NVFP4Quantizer(with_rht={self.with_rht}, with_post_rht_amax={self.with_post_rht_amax}, with_random_sign_mask="
                f"{self.with_random_sign_mask}): the first two must be equal, and the last True where they are."
            )
        block = (16, 16) if self.with_2d_quantization else (1, 16)
        return Scheme("e2m1", block, hadamard=self.with_rht, stochastic=self.stochastic_rounding)


@dataclass(kw_only=True)
class HybridQuantizer(Quantizer):
    """One quantizer for the rowwise copy and one for the columnwise copy."""

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    columnwise_source: str = "original"

    def copy(self) -> HybridQuantizer:
        """Another one, of copies of its two."""
        parts = {n: getattr(self, n).copy() for n in ("rowwise_quantizer", "columnwise_quantizer")}
        return replace(self, **parts)

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
