"""The amax of an activation, or of its backward, without computing most of it. Called by `tile.amax`.

Current scaling reads a tensor twice: for its amax, then to quantize it. The exponential of SiLU takes forty instructions an element, more
than the memory gives time for, and the amax needs few of them: |silu(g)| and |silu'(g)| have bounds of a few instructions that are a few
percent off near 0, so a tile whose bound is not above the largest value found so far is passed over. The amax is exact: what may raise it
is computed as the quantizing kernel does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.activation_triton import activate, derivative
from ottava.kernels.launch import Launch, Launcher
from ottava.kernels.magnitudes_triton import raise_to
from ottava.kernels.tile_kernel import _load

TILE = (32, 128)
BOUNDED = ("silu",)
"""Activations that there are bounds for."""


@triton.jit
def _silu_bound(gate):
    """At least |silu(gate)|: sigmoid(g) <= min(1, 1/2 + g/4) for g >= 0, where it is concave, and <= 1/2 below. With room for rounding."""
    return tl.abs(gate) * tl.minimum(0.50001 + 0.25001 * tl.maximum(gate, 0.0), 1.00001)


@triton.jit
def _silu_slope_bound(gate):
    """At least |silu'(gate)|, which is at most 1.0999: concave for g >= 0, where its tangent at 0 is 1/2 + g/2; from -0.1 to 1/2 below."""
    return tl.minimum(0.50001 + 0.50001 * tl.maximum(gate, 0.0), 1.1)


@triton.jit
def _amax_kernel(
    x_ptr, dy_ptr, amax_ptr, x_stride, dy_stride, M, K,
    ACT: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """M x K: of the activation's output. Of float32 values for an activation, of rounded ones for its backward (as the references do)."""
    col0, row0 = tl.program_id(0) * BK, tl.program_id(1) * BM
    r, c = tl.arange(0, BM), tl.arange(0, BK)
    mask = (row0 + r < M)[:, None] & (col0 + c < K)[None, :]
    x_at = x_ptr + row0.to(tl.int64) * x_stride + col0 + r[:, None] * x_stride + c[None, :]
    gate = _load(x_at, mask, EVEN)
    dy, up = gate, gate
    if GATED:
        up = _load(x_at + K, mask, EVEN)
    # The products of the values, in their order: where a factor is not smaller, neither is a rounded product.
    if BACKWARD:
        dy = _load(dy_ptr + row0.to(tl.int64) * dy_stride + col0 + r[:, None] * dy_stride + c[None, :], mask, EVEN)
        bound = tl.abs(dy * up if GATED else dy) * _silu_slope_bound(gate)
        if GATED:
            bound = tl.maximum(bound, tl.abs(dy) * _silu_bound(gate))
    else:
        bound = _silu_bound(gate)
        if GATED:
            bound = bound * tl.abs(up)
    # As other programs have left it, not what this processor saw before. Warps read it one after the other, and it rises meanwhile: what
    # they do has to follow from something that all of them have, since there is a reduction over the warps in the branch.
    largest = tl.load(amax_ptr, cache_modifier=".cg")
    # A NaN is above nothing. That of an infinite gate's bound may hide a value which is not one.
    above = (bound > largest) | (tl.abs(gate) == float("inf"))
    if tl.max(above.to(tl.int32)) > 0:
        if BACKWARD:
            value = dy * derivative(gate, ACT)
            if GATED:
                value = (dy * up) * derivative(gate, ACT)
                value = tl.maximum(tl.abs(value), tl.abs(dy * activate(gate, ACT)))
            value = tl.abs(value).to(x_ptr.dtype.element_ty).to(tl.float32)  # the largest is rounded to the largest
        else:
            value = activate(gate, ACT)
            if GATED:
                value = value * up
        raise_to(amax_ptr, tl.max(tl.abs(value)))


_AMAX = Launcher(_amax_kernel)


def prepare(x: Tensor, columns: int, gated: bool, dy_stride: int | None) -> Launch:
    """A launch that takes x, dy (if dy_stride is given: the backward) and the amax [1], which is zero before. columns: of the output."""
    (bm, bk), m = TILE, x.shape[0]
    backward = dy_stride is not None
    arguments = {
        "dy_ptr": None, "x_stride": x.stride(0), "dy_stride": dy_stride or 0, "M": m, "K": columns,
        "ACT": "silu", "GATED": gated, "BACKWARD": backward, "EVEN": m % bm == 0 and columns % bk == 0, "BM": bm, "BK": bk,
    }  # fmt: skip
    grid = (triton.cdiv(columns, bk), triton.cdiv(m, bm))
    pointers = ("x_ptr", "dy_ptr", "amax_ptr") if backward else ("x_ptr", "amax_ptr")
    return _AMAX.prepare(grid, 4, arguments, pointers)
