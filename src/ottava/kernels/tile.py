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
from ottava.kernels.cast import Buffers, reference_buffers
from ottava.kernels.launch import Launcher
from ottava.quant.scheme import Scheme

# ------------------------------------------------------------------------------------------- elementary functions (twins)

# The numbers are those of `elementary.py` and `activation.py`, written out: Triton compares every global that a kernel uses at every
# launch, which took longer than the launch itself. tests/gpu compares the bytes.


@triton.jit
def _exp(x):
    x = tl.minimum(tl.maximum(x, -80.0), 80.0)  # turns NaN into a number; every caller multiplies by x again
    biased = x * 1.4426950408889634 + 12583039.0
    n = biased - 12583039.0
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    return p * (biased.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _positive_reciprocal(d):
    r = (0x7EF311C7 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    r = r * (2.0 - d * r)
    r = r * (2.0 - d * r)
    return r + r * (1.0 - d * r)


@triton.jit
def _sigmoid(x):
    return _positive_reciprocal(_exp(-x) + 1.0)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 * _positive_reciprocal(_exp(x * 2.0) + 1.0)


@triton.jit
def _relu(x):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def _activate(x, ACT: tl.constexpr):
    if ACT == "gelu":
        y = x * (0.5 + 0.5 * _tanh(x * (0.79788456 + 0.03567741 * (x * x))))
    elif ACT == "silu":
        y = x * _sigmoid(x)
    elif ACT == "qgelu":
        y = x * _sigmoid(1.702 * x)
    elif ACT == "relu":
        y = _relu(x)
    else:
        tl.static_assert(ACT == "srelu")
        r = _relu(x)
        y = r * r
    return y


@triton.jit
def _derivative(x, ACT: tl.constexpr):
    if ACT == "gelu":
        t = _tanh(x * (0.79788456 + 0.03567741 * (x * x)))
        y = (0.5 * x) * ((1.0 - t * t) * (0.79788456 + 0.1070322243 * (x * x))) + 0.5 * (1.0 + t)
    elif ACT == "silu":
        s = _sigmoid(x)
        y = (x * (s * (1.0 - s))) + s
    elif ACT == "qgelu":
        s = _sigmoid(1.702 * x)
        y = ((1.702 * x) * (s * (1.0 - s))) + s
    elif ACT == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACT == "srelu")
        y = 2.0 * _relu(x)
    return y


# -------------------------------------------------------------------------------------------------------------- consumers


@triton.jit
def _raise(amax_ptr, amax):
    """*amax_ptr = max(itself, amax). Most tiles do not raise it: a plain read saves the contended atomic."""
    if amax > tl.load(amax_ptr):
        tl.atomic_max(amax_ptr, amax)


@triton.jit
def _scale_of(amax, FP8_MAX: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr, INF_VALUE: tl.constexpr):
    """The twin of `scaling.scale_from_amax`."""
    if EPSILON > 0:
        amax = tl.where(amax < EPSILON, EPSILON, amax)
    usable = (amax > 0) & (amax < float("inf"))
    safe = tl.where(usable, amax, 1.0)
    scale = tl.div_rn(safe * 0.0 + FP8_MAX, safe)
    scale = tl.where(scale == float("inf"), INF_VALUE, scale)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, 1.0)


@triton.jit
def _reciprocal(x):
    return tl.div_rn(x * 0.0 + 1.0, x)


@triton.jit
def _e8m0_of(amax, FP8_MAX: tl.constexpr):
    """The twin of `scaling.e8m0_from_amax`."""
    ratio = amax * (1.0 / FP8_MAX)
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    up = (mantissa > 0) & ((exponent != 0) | (mantissa > 0x400000))
    exponent = tl.minimum(exponent + up.to(tl.int32), 254)
    return tl.where(ratio == 0.0, 0, exponent)


@triton.jit
def _power_of_two(exponent):
    """2^(127 - e) as float32, for a biased exponent e <= 254; exact when that is subnormal."""
    inverse = 254 - exponent
    bits = tl.where(inverse == 0, 0x00400000, inverse << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_bytes(v, E5M2: tl.constexpr):
    """float32 -> FP8 bytes. The instruction rounds to nearest even, saturates, and makes 0x7F of any NaN."""
    if E5M2:
        q = v.to(tl.float8e5)
    else:
        q = v.to(tl.float8e4nv)
    return q.to(tl.uint8, bitcast=True)


@triton.jit
def _pair_to_bytes(low, high, E5M2: tl.constexpr):
    """Two float32 tiles -> one of 16 bits: FP8 of `low` in the low byte, of `high` in the high byte."""
    if E5M2:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
    )


@triton.jit
def _store(pointers, values, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _store_columnwise(
    v, col_ptr, row0, col0, col_end, M, stride, E5M2: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Casts v [BM, BK] (already scaled) and stores its transpose at [col0, row0] of col_ptr, whose rows are `stride` (even) apart.

    Transposed as float32 and stored as pairs of bytes: Triton 3.6 miscompiles the transposition of 8-bit tiles on Hopper (a
    quarter of the bytes end up in other places), and the pair is what the cast instruction makes anyway.
    """
    low, high = tl.split(tl.reshape(tl.trans(v), [BK, BM // 2, 2]))
    c, p = tl.arange(0, BK), tl.arange(0, BM // 2)
    at = (col0.to(tl.int64) * stride + row0) // 2 + c[:, None] * (stride // 2) + p[None, :]
    mask = (col0 + c < col_end)[:, None] & (row0 + 2 * p < M)[None, :]
    _store(col_ptr.to(tl.pointer_type(tl.uint16)) + at, _pair_to_bytes(low, high, E5M2), mask, EVEN)


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    """float32."""
    if EVEN:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _consume(
    v, row0, col0, col_end, M, K, col_stride, scale,
    row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, plain_ptr,
    KIND: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    INF_VALUE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr, SUM: tl.constexpr,
    ROUND: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """v: float32 [BM, BK], the tile at (row0, col0) of the output [M, K]; zero outside of it. Reductions ignore NaN.

    col_end: where this tile's half of the output ends.
    """
    r, c = tl.arange(0, BM), tl.arange(0, BK)
    mask = (row0 + r < M)[:, None] & (col0 + c < col_end)[None, :]
    row_at = row0.to(tl.int64) * K + col0 + r[:, None] * K + c[None, :]
    if AMAX == "unrounded":
        _raise(amax_ptr, tl.max(tl.abs(v)))
    if ROUND:
        v = v.to(DTYPE).to(tl.float32)
    if AMAX == "rounded":
        _raise(amax_ptr, tl.max(tl.abs(v)))
    if SUM:
        tl.store(sum_ptr + (row0 // BM).to(tl.int64) * K + col0 + c, tl.sum(v, axis=0), mask=col0 + c < col_end)
    if KIND == "plain":
        _store(plain_ptr + row_at, v.to(DTYPE), mask, EVEN)
    elif KIND == "tensor":
        q = _to_bytes(v * scale, E5M2)
        if ROWWISE:
            _store(row_ptr + row_at, q, mask, EVEN)
        if COLUMNWISE:
            _store_columnwise(v * scale, col_ptr, row0, col0, col_end, M, col_stride, E5M2, EVEN, BM, BK)
    elif KIND == "block2d":
        tile_scale = _scale_of(tl.max(tl.abs(v)), FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE)
        q = _to_bytes(v * tile_scale, E5M2)
        inverse = _reciprocal(tile_scale)
        if ROWWISE:
            _store(row_ptr + row_at, q, mask, EVEN)
            tl.store(row_scale_ptr + (row0 // BM) * tl.cdiv(K, BK) + col0 // BK, inverse)
        if COLUMNWISE:
            _store_columnwise(v * tile_scale, col_ptr, row0, col0, col_end, M, col_stride, E5M2, EVEN, BM, BK)
            tl.store(col_scale_ptr + (col0 // BK) * tl.cdiv(M, BM) + row0 // BM, inverse)
    elif KIND == "block1d":
        if ROWWISE:
            row_scale = _scale_of(tl.max(tl.abs(v), axis=1), FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE)
            _store(row_ptr + row_at, _to_bytes(v * row_scale[:, None], E5M2), mask, EVEN)
            tl.store(
                row_scale_ptr + (col0 // BK).to(tl.int64) * M + row0 + r, _reciprocal(row_scale), mask=row0 + r < M
            )
        if COLUMNWISE:
            col_scale = _scale_of(tl.max(tl.abs(v), axis=0), FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE)
            _store_columnwise(v * col_scale[None, :], col_ptr, row0, col0, col_end, M, col_stride, E5M2, EVEN, BM, BK)
            tl.store(
                col_scale_ptr + (row0 // BM).to(tl.int64) * K + col0 + c,
                _reciprocal(col_scale),
                mask=col0 + c < col_end,
            )
    elif KIND == "mx":
        if ROWWISE:
            blocks = tl.reshape(v, [BM, BK // 32, 32])
            exponent = _e8m0_of(tl.max(tl.abs(blocks), axis=2), FP8_MAX)
            q = _to_bytes(blocks * _power_of_two(exponent)[:, :, None], E5M2)
            _store(row_ptr + row_at, tl.reshape(q, [BM, BK]), mask, EVEN)
            block = col0 // 32 + tl.arange(0, BK // 32)
            width = tl.cdiv(K, 32)
            tl.store(
                row_scale_ptr + (row0 + r)[:, None].to(tl.int64) * width + block[None, :], exponent.to(tl.uint8),
                mask=(row0 + r < M)[:, None] & (block < width)[None, :],
            )  # fmt: skip
        if COLUMNWISE:
            blocks = tl.reshape(v, [BM // 32, 32, BK])
            exponent = _e8m0_of(tl.max(tl.abs(blocks), axis=1), FP8_MAX)
            scaled = tl.reshape(blocks * _power_of_two(exponent)[:, None, :], [BM, BK])
            _store_columnwise(scaled, col_ptr, row0, col0, col_end, M, col_stride, E5M2, EVEN, BM, BK)
            block = row0 // 32 + tl.arange(0, BM // 32)
            width = tl.cdiv(M, 32)
            tl.store(
                col_scale_ptr + (col0 + c)[None, :].to(tl.int64) * width + block[:, None], exponent.to(tl.uint8),
                mask=(col0 + c < col_end)[None, :] & (block < width)[:, None],
            )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- kernel


@triton.jit
def _tile_kernel(
    x_ptr, dy_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, x_stride, dy_stride,
    scale_ptr, amax_in_ptr,
    row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, plain_ptr,
    M, K, col_stride,
    PRODUCER: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BETA: tl.constexpr, CENTER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, SCALE: tl.constexpr,
    KIND: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    INF_VALUE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr, SUM: tl.constexpr,
    ROUND: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """M x K: what the grid covers; for a gated backward the output is M x 2K and each program makes two tiles of it."""
    col0, row0 = tl.program_id(0) * BK, tl.program_id(1) * BM
    r, c = tl.arange(0, BM), tl.arange(0, BK)
    mask = (row0 + r < M)[:, None] & (col0 + c < K)[None, :]
    x_at = x_ptr + row0.to(tl.int64) * x_stride + col0 + r[:, None] * x_stride + c[None, :]
    x = _load(x_at, mask, EVEN)

    if SCALE == "given":
        scale = tl.load(scale_ptr)
    elif SCALE == "amax":
        scale = _scale_of(tl.load(amax_in_ptr), FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE)
    else:
        scale = 1.0
    if SCALE != "none":  # known when the kernel is compiled; the next one is not  # noqa: SIM102
        if (col0 == 0) & (row0 == 0):
            if ROWWISE:
                tl.store(row_scale_ptr, _reciprocal(scale))
            if COLUMNWISE:
                tl.store(col_scale_ptr, _reciprocal(scale))

    if PRODUCER == "identity":
        v = x
    elif PRODUCER == "norm":
        if CENTER:
            x = x - tl.load(mean_ptr + row0 + r, mask=row0 + r < M, other=0.0)[:, None]
        gain = tl.load(gamma_ptr + col0 + c, mask=col0 + c < K, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            gain = gain + 1.0
        v = (x * tl.load(rstd_ptr + row0 + r, mask=row0 + r < M, other=0.0)[:, None]) * gain[None, :]
        if BETA:
            v = v + tl.load(beta_ptr + col0 + c, mask=col0 + c < K, other=0.0).to(tl.float32)[None, :]
    elif PRODUCER == "activation":
        v = _activate(x, ACT)
        if GATED:
            v = v * _load(x_at + K, mask, EVEN)
    else:
        tl.static_assert(PRODUCER == "activation_backward")
        dy = _load(dy_ptr + row0.to(tl.int64) * dy_stride + col0 + r[:, None] * dy_stride + c[None, :], mask, EVEN)
        if GATED:
            up = _load(x_at + K, mask, EVEN)
            v = (dy * up) * _derivative(x, ACT)
            _consume(
                dy * _activate(x, ACT), row0, col0 + K, 2 * K, M, 2 * K, col_stride, scale,
                row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, plain_ptr,
                KIND, E5M2, FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE, ROWWISE, COLUMNWISE, AMAX, SUM, ROUND, DTYPE, EVEN, BM, BK,
            )  # fmt: skip
        else:
            v = dy * _derivative(x, ACT)
    if (not EVEN) and ((PRODUCER == "norm") or (PRODUCER == "activation_backward")):
        v = tl.where(mask, v, 0.0)  # beta and the overlap of the two halves reach past the edge

    WIDTH = 2 * K if (PRODUCER == "activation_backward") & GATED else K
    _consume(
        v, row0, col0, K, M, WIDTH, col_stride, scale,
        row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, plain_ptr,
        KIND, E5M2, FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE, ROWWISE, COLUMNWISE, AMAX, SUM, ROUND, DTYPE, EVEN, BM, BK,
    )  # fmt: skip


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
    **dict.fromkeys(("row_ptr", "row_scale_ptr", "col_ptr", "col_scale_ptr", "amax_ptr", "sum_ptr", "plain_ptr")),
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


_KERNEL = Launcher(_tile_kernel)
# Tile and warps by kind, from benchmarks/kernels.py on an H200.
_TILES = {
    "tensor": ((64, 128), 4),
    "block1d": ((128, 128), 8),
    "block2d": ((128, 128), 8),
    "mx": ((64, 128), 4),
    "plain": ((32, 128), 4),
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
    tile, warps = _TILES["plain"]
    _launch(producer, tile, warps, KIND="plain", ROUND=False, plain_ptr=out)
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
