"""Magnitudes of a tile in Triton kernels: amaxes, which ignore NaN, and how many numbers are not finite.

Without their signs, as integers, floating-point numbers have the order that they have as numbers, with infinity above all finite ones and
NaN above that. So the largest of a tile says whether anything in it is to be counted or ignored, and only then is it looked at again.

[Note: packed] Where a tile is rounded to bf16 anyway, its halves (tile_kernel.py, [Note: halves]) are kept in one: the even row's number in
the low 16 bits, the odd row's in the high ones. That takes half the registers of a float32 tile, and one instruction looks at two numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def raise_to(amax_ptr, amax):
    """*amax_ptr = max(itself, amax). Most tiles do not raise it: a plain read saves the contended atomic."""
    if amax > tl.load(amax_ptr):
        tl.atomic_max(amax_ptr, amax)


@triton.jit
def pack(even, odd):
    """Two float32 tiles -> one of 32 bits, rounded to bf16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def even_of(packed):
    """float32."""
    return (packed << 16).to(tl.float32, bitcast=True)


@triton.jit
def odd_of(packed):
    """float32."""
    return (packed & 0xFFFF0000).to(tl.float32, bitcast=True)


# ------------------------------------------------------------------------------------------------------------ packed tiles


@triton.jit
def _larger(a, b):
    """Of each 16 bits."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _unsigned(packed):
    return packed & 0x7FFF7FFF


@triton.jit
def _without_nan(top):
    """Magnitudes, with 0 for NaN."""
    low = tl.where((top & 0xFFFF) > 0x7F80, 0, top & 0xFFFF)
    return low | tl.where(top > 0x7F80FFFF, 0, top & 0xFFFF0000)


@triton.jit
def _packed_count(top):
    """int32: how many of the magnitudes are not finite."""
    low, high = (top & 0x7F80) == 0x7F80, (top & 0x7F800000) == 0x7F800000
    return tl.sum(low.to(tl.int32) + high.to(tl.int32))


@triton.jit
def _larger_half(top):
    """float32."""
    return tl.maximum(even_of(top), odd_of(top))


@triton.jit
def _is_finite(top):
    """Of a packed number's magnitudes, both."""
    return ((top & 0xFFFF) < 0x7F80) & (top < 0x7F800000)


@triton.jit
def of_packed(bad_ptr, packed):
    """See `of_floats`."""
    top = _unsigned(packed)
    whole = tl.reduce(top, None, _larger)
    if not _is_finite(whole):
        if bad_ptr is not None:
            tl.atomic_add(bad_ptr, _packed_count(top))
        whole = tl.reduce(_without_nan(top), None, _larger)
    return _larger_half(whole)


@triton.jit
def of_two_packed(bad_ptr, packed, twin):
    """The amax of two packed tiles."""
    top, other = _unsigned(packed), _unsigned(twin)
    whole = tl.reduce(_larger(top, other), None, _larger)
    if not _is_finite(whole):
        if bad_ptr is not None:
            tl.atomic_add(bad_ptr, _packed_count(top) + _packed_count(other))
        whole = tl.reduce(_larger(_without_nan(top), _without_nan(other)), None, _larger)
    return _larger_half(whole)


# ----------------------------------------------------------------------------------------------------------- float32 tiles


@triton.jit
def _bits(even, odd):
    """Of the larger of each two numbers, without its sign."""
    return tl.maximum(even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _count(even, odd):
    """int32: how many numbers are not finite."""
    low = (even.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    high = (odd.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    return tl.sum(low.to(tl.int32) + high.to(tl.int32))


@triton.jit
def of_floats(bad_ptr, even, odd):
    """float32: the amax of the tile. *bad_ptr, if given, is raised by how many of its numbers are not finite."""
    largest = tl.max(_bits(even, odd))
    amax = largest.to(tl.float32, bitcast=True)
    if largest >= 0x7F800000:
        if bad_ptr is not None:
            tl.atomic_add(bad_ptr, _count(even, odd))
        amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)))
    return amax


@triton.jit
def of_two_floats(bad_ptr, even, odd, even_twin, odd_twin):
    """The amax of two tiles."""
    largest = tl.max(tl.maximum(_bits(even, odd), _bits(even_twin, odd_twin)))
    amax = largest.to(tl.float32, bitcast=True)
    if largest >= 0x7F800000:
        if bad_ptr is not None:
            tl.atomic_add(bad_ptr, _count(even, odd) + _count(even_twin, odd_twin))
        sizes = tl.maximum(tl.abs(even), tl.abs(odd))
        amax = tl.max(tl.maximum(sizes, tl.maximum(tl.abs(even_twin), tl.abs(odd_twin))))
    return amax
