"""Many matrices at once: what `kernels/grid.py` does to a part of one matrix, for all weights of a model in one launch.

    ottava::amax_many        each tensor's amax, or that of each of its blocks
    ottava::encode_many_     values times the factor of their tensor or block -> bytes

`blocks` is the block of the scheme, [rows, columns], or empty for one number a tensor. `offsets` has (top, left) of each part in its
matrix, one after the other: blocks lie on the grid of the matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ottava.kernels import tally
from ottava.kernels.grid import _block_amax, _encode, _touched
from ottava.kernels.registry import define
from ottava.quant.scaling import amax_of
from ottava.quant.scheme import Scheme


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def amax_shapes(values: list[Tensor], blocks: list[int], offsets: list[int]) -> list[tuple[int, ...]]:
    """[1], or [blocks down, across] of the blocks that it touches, for each tensor."""
    if not blocks:
        return [(1,)] * len(values)
    (r, c), at = blocks, _pairs(offsets)
    return [(_touched(top, x.shape[0], r), _touched(left, x.shape[1], c)) for x, (top, left) in zip(values, at)]


def _amax_many(values: list[Tensor], blocks: list[int], offsets: list[int]) -> Tensor:
    """float32 numbers of the tensors [m, k], one after the other: `amax_shapes`. A NaN is ignored."""
    if not blocks:
        found = torch.cat([amax_of(x) for x in values])
    else:
        (r, c), at = blocks, _pairs(offsets)
        parts = zip(values, at, strict=True)
        found = torch.cat([_block_amax(x, r, c, top, left).flatten() for x, (top, left) in parts])
    tally.count_amax(found)
    return found


def _amax_many_fake(values: list[Tensor], blocks: list[int], offsets: list[int]) -> Tensor:
    numbers = sum(math.prod(shape) for shape in amax_shapes(values, blocks, offsets))
    return values[0].new_empty(numbers, dtype=torch.float32)


def _amax_many_cuda(values: list[Tensor], blocks: list[int], offsets: list[int]) -> Tensor:
    from ottava.kernels import many_triton

    if not many_triton.fits(values, values, blocks):
        return _amax_many(values, blocks, offsets)
    sizes = [math.prod(shape) for shape in amax_shapes(values, blocks, offsets)]
    return many_triton.amax(values, sizes, blocks, _pairs(offsets))


amax_many = define("amax_many", _amax_many, _amax_many_fake, _amax_many_cuda)


def _encode_many(
    out: list[Tensor], values: list[Tensor], factors: list[Tensor], scheme: str, blocks: list[int], offsets: list[int]
) -> None:
    """Writes uint8 [m, k] into out[i] (E2M1: [m, k/2]). factors[i]: of `amax_shapes`."""
    r, c = blocks or (1, 1)
    for target, x, factor, (top, left) in zip(out, values, factors, _pairs(offsets), strict=True):
        target.copy_(_encode(x, factor, scheme, r, c, top, left))


def _encode_many_fake(
    out: list[Tensor], values: list[Tensor], factors: list[Tensor], scheme: str, blocks: list[int], offsets: list[int]
) -> None:
    return None


def _encode_many_cuda(
    out: list[Tensor], values: list[Tensor], factors: list[Tensor], scheme: str, blocks: list[int], offsets: list[int]
) -> None:
    from ottava.kernels import many_triton

    parsed = Scheme.parse(scheme)
    if parsed.elements_per_byte == 1 and many_triton.fits(values, out, blocks):
        many_triton.encode(out, values, factors, parsed.format == "e5m2", blocks, _pairs(offsets))
    else:
        _encode_many(out, values, factors, scheme, blocks, offsets)


encode_many_ = define("encode_many_", _encode_many, _encode_many_fake, _encode_many_cuda, mutates=("out",))
