"""The Triton kernel behind every quantizing op: a producer makes a float32 tile, a consumer turns it into bytes.

Producers: the tensor itself, a norm, an activation, an activation's backward; gated or not. Consumers: rowwise and columnwise
copies of any scheme, an amax, a sum over rows, or a plain rounded copy. One kernel, specialised at compile time, so each
combination reads its inputs once and writes its outputs once, and a new producer serves every recipe.

Speed of light on an H200 is 4.25 TB/s (measured copy); a cast with transpose of bf16 moves 4 bytes an element.

Compiled with `enable_fp_fusion=False`: a fused multiply-add would round differently from the torch reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels import activation as activations
from ottava.kernels.cast import Buffers, check_scale, reference_buffers
from ottava.kernels.launch import Launcher
from ottava.kernels.tile_kernel import tile_kernel
from ottava.quant.scheme import Scheme

# -------------------------------------------------------------------------------------------------------------- producers


@dataclass
class Producer:
    """What fills a tile. `columns` x rows is the grid's extent; `width` is the output's."""

    x: Tensor

    name = "identity"
    rounds = True
    """Whether the output is rounded to the activation dtype unless the scheme takes float32."""

    @property
    def columns(self) -> int:
        """Columns that the grid covers."""
        return self.x.shape[1]

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.columns

    def arguments(self) -> dict[str, Any]:
        """Kernel arguments that differ from the defaults."""
        return {}


class Identity(Producer):
    """The tensor itself."""

    rounds = False


@dataclass
class Norm(Producer):
    """A normalized tensor, from its statistics."""

    gamma: Tensor
    beta: Tensor | None
    mean: Tensor
    rstd: Tensor
    zero_centered: bool

    name = "norm"

    def arguments(self) -> dict[str, Any]:
        """See `Producer.arguments`."""
        return {
            "gamma_ptr": self.gamma,
            "beta_ptr": self.beta,
            "mean_ptr": self.mean,
            "rstd_ptr": self.rstd,
            "BETA": self.beta is not None,
            "CENTER": self.mean.numel() > 0,
            "ZERO_CENTERED": self.zero_centered,
        }


@dataclass
class Activation(Producer):
    """An activation of the tensor."""

    activation: activations.Activation

    name = "activation"

    @property
    def columns(self) -> int:
        """See `Producer.columns`."""
        return self.x.shape[1] // 2 if self.activation.gated else self.x.shape[1]

    def arguments(self) -> dict[str, Any]:
        """See `Producer.arguments`."""
        return {"ACT": self.activation.base, "GATED": self.activation.gated}


class ActivationBackward(Activation):
    """The gradient of an activation's input."""

    name = "activation_backward"

    def __init__(self, dy: Tensor, x: Tensor, activation: activations.Activation) -> None:
        super().__init__(x, activation)
        self.dy = _rows_contiguous(dy)

    @property
    def width(self) -> int:
        """See `Producer.width`."""
        return self.x.shape[1]

    def arguments(self) -> dict[str, Any]:
        """See `Producer.arguments`."""
        return {**super().arguments(), "dy_ptr": self.dy, "dy_stride": self.dy.stride(0)}


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# ------------------------------------------------------------------------------------------------------------------ launch

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("dy_ptr", "gamma_ptr", "beta_ptr", "mean_ptr", "rstd_ptr", "scale_ptr", "amax_in_ptr")),
    **dict.fromkeys(("row_ptr", "row_scale_ptr", "col_ptr", "col_scale_ptr", "amax_ptr", "sum_ptr", "values_ptr")),
    "dy_stride": 0, "col_stride": 0, "ACT": "none", "GATED": False, "BETA": False, "CENTER": False, "ZERO_CENTERED": False, "SCALE": "none",
    "E5M2": False, "FP8_MAX": 448.0, "EPSILON": 0.0, "POWER_OF_TWO": False, "INF_VALUE": 0.0, "ROWWISE": False, "COLUMNWISE": False,
    "AMAX": "none", "SUM": False, "ROUND": False,
}  # fmt: skip


def _launch(producer: Producer, tile: tuple[int, int], warps: int, **arguments: Any) -> None:
    x = producer.x
    m, k = x.shape[0], producer.columns
    if m == 0 or k == 0:
        return
    bm, bk = tile
    grid = (triton.cdiv(k, bk), triton.cdiv(m, bm))
    even = m % bm == 0 and k % bk == 0
    _KERNEL(
        grid,
        warps,
        {
            **_DEFAULTS,
            "x_ptr": x,
            "x_stride": x.stride(0),
            "M": m,
            "K": k,
            "PRODUCER": producer.name,
            "DTYPE": _TRITON_DTYPES[x.dtype],
            "EVEN": even,
            "BM": bm,
            "BK": bk,
            **producer.arguments(),
            **arguments,
        },
    )


_KERNEL = Launcher(tile_kernel)
# Tile and warps by kind, from benchmarks/kernels.py on an H200.
_TILES = {
    "tensor": ((64, 128), 4),
    "block1d": ((128, 128), 8),
    "block2d": ((128, 128), 8),
    "mx": ((64, 128), 4),
    "values": ((32, 128), 4),
}


def amax(producer: Producer) -> Tensor:
    """float32 [1]. Of the float32 values for activations, of the rounded ones otherwise (as the references do)."""
    out = producer.x.new_zeros(1, dtype=torch.float32)
    unrounded = producer.name in ("identity", "activation")
    producer.x = _rows_contiguous(producer.x)
    _launch(
        producer,
        (64, 128),
        4,
        KIND="none",
        AMAX="unrounded" if unrounded else "rounded",
        ROUND=not unrounded,
        amax_ptr=out,
    )
    return out


def store(producer: Producer, dtype: torch.dtype) -> Tensor:
    """The produced values in the activation dtype [M, width]."""
    producer.x = _rows_contiguous(producer.x)
    out = producer.x.new_empty(producer.x.shape[0], producer.width)
    tile, warps = _TILES["values"]
    _launch(producer, tile, warps, KIND="values", ROUND=False, values_ptr=out)
    return out if out.dtype == dtype else out.to(dtype)


def supports(producer: Producer, scheme: Scheme) -> bool:
    """Whether `quantize` can do it; the torch reference, on the same device, does the rest.

    Not NVFP4, which Hopper cannot multiply anyway; not a gated backward whose halves share a block; and not rows of bytes that do
    not start on a 16-byte boundary: Triton 3.6 misplaced bytes of such tiles for float32 inputs. No FP8 GEMM takes those.
    """
    gated_backward = producer.columns != producer.width
    return (
        scheme.kind != "nvfp4"
        and producer.columns % 16 == 0
        and not (gated_backward and scheme.block is not None and producer.columns % 128)
    )


def quantize(
    producer: Producer,
    scheme: Scheme,
    scale: Tensor | None,
    amax_in: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    sums: Tensor | None = None,
) -> Buffers:
    """The produced values, quantized; same bytes as the reference. `sums`: float32 [width], receives the sum over rows."""
    check_scale(scale)
    producer.x = x = _rows_contiguous(producer.x)
    m, width = x.shape[0], producer.width
    if m == 0 or width == 0:
        return reference_buffers(x.new_empty(m, width), scheme, scale, amax_in, rowwise, columnwise, x.dtype)
    kind = scheme.kind if scheme.kind != "block" else ("block1d" if scheme.block == (1, 128) else "block2d")
    (bm, bk), warps = _TILES[kind]
    row, row_scale, col, col_scale = _allocate(x, m, width, scheme, kind, rowwise, columnwise)
    delayed = scheme.per_tensor and scale is not None
    amax_out = x.new_zeros(1, dtype=torch.float32) if delayed else x.new_empty(0, dtype=torch.float32)
    if scheme.per_tensor and not delayed:
        amax_out = amax(producer) if amax_in is None else amax_in.clone()
    wants_sum = sums is not None and sums.numel() > 0
    partial = x.new_empty(triton.cdiv(m, bm), width, dtype=torch.float32) if wants_sum else None
    _launch(
        producer, (bm, bk), warps, KIND=kind, E5M2=scheme.format == "e5m2", FP8_MAX=scheme.element.max, EPSILON=scheme.epsilon,
        POWER_OF_TWO=scheme.power_of_two, INF_VALUE=torch.finfo(torch.float32 if kind == "tensor" else x.dtype).max,
        ROWWISE=rowwise, COLUMNWISE=columnwise, ROUND=producer.rounds and not scheme.from_float32,
        AMAX="rounded" if delayed else "none", SUM=wants_sum, SCALE=("given" if delayed else "amax") if scheme.per_tensor else "none",
        scale_ptr=scale if delayed else None, amax_in_ptr=None if delayed else amax_out, col_stride=m + m % 2,
        row_ptr=row, row_scale_ptr=row_scale, col_ptr=col, col_scale_ptr=col_scale, amax_ptr=amax_out, sum_ptr=partial,
    )  # fmt: skip
    if partial is not None:
        torch.sum(partial, dim=0, out=sums)
    if kind == "block1d":
        row_scale, col_scale = (s.t() if s.dim() == 2 else s for s in (row_scale, col_scale))
    if columnwise and m % 2:
        col = col[:, :m].contiguous()
    return Buffers(row, row_scale, col, col_scale, amax_out, x.new_empty(0, dtype=torch.float32))


def _allocate(
    x: Tensor, m: int, k: int, scheme: Scheme, kind: str, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output tensors. 1x128 scales are stored with the row index fastest, as the block GEMM reads them.

    The columnwise bytes get an even row length, since they are stored in pairs.
    """

    def one(rows: int, cols: int, stride: int, wanted: bool) -> tuple[Tensor, Tensor]:
        dtype = torch.uint8 if kind == "mx" else torch.float32
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=dtype)
        shape: tuple[int, ...] = (1,)
        if scheme.block is not None:
            shape = (triton.cdiv(rows, scheme.block[0]), triton.cdiv(cols, scheme.block[1]))
        return x.new_empty(rows, stride, dtype=torch.uint8), x.new_empty(
            shape[::-1] if kind == "block1d" else shape, dtype=dtype
        )

    return *one(m, k, k, rowwise), *one(k, m, m + m % 2, columnwise)
