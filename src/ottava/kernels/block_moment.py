"""A moment of Adam in 8 bits an element: blocks of 128 along the rows of a matrix, each with a float32 scale.

[Note: block moments] Two formats:

    signed   E4M3, the block's largest magnitude at 448. For exp_avg.
    root     the square root of the value, which halves its exponent, as an unsigned number with 4 exponent and 4 mantissa bits: without
             a sign there is room for a mantissa bit more. From 2^-18 to 1.875 in a block, so 2^37 between squares. 0xFF is NaN. For
             exp_avg_sq.

Scales are float32 and not powers of two: the largest value of a block is exact, and where it moves the whole grid moves with it, so that
values do not stick to one grid point step after step; the 4 bytes are 3% of a block. Blocks begin at multiples of 128 of a row of the
whole matrix, so every mesh that cuts rows, or columns at such multiples, has the same bytes.

The Triton twins are in `adam_triton.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0
FLOAT32_MAX = 3.4028234663852886e38
ROOT_MAX = 1.875  # code 0xFE: exponent 15, mantissa 14/16
ROOT_NAN = 0xFF
ROOT_SMALLEST_NORMAL = 2.0**-14
ROOT_STEPS = 2.0**18  # subnormal codes count 2^-18
ROOT_OFFSET = (127 - 15) << 4  # between the upper bits of a float32 and a code


def blocks_of_row(columns: int) -> int:
    """Scales of a row."""
    return -(-columns // BLOCK)


def scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor's scales."""
    return (*shape[:-1], blocks_of_row(shape[-1]))


def scales_at(
    box: tuple[tuple[int, ...], tuple[int, ...]], whole: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Where scales of shape `scales` lie among those of a tensor of shape `whole`, if they are those of its box (offset, shape).

    None if they are not, or if the box cuts a block.

    >>> scales_at(((4, 256), (4, 256)), (8, 512), (4, 2))
    (4, 2)
    """
    offset, extent = box
    end = offset[-1] + extent[-1]
    uncut = offset[-1] % BLOCK == 0 and (end % BLOCK == 0 or end == whole[-1])
    return (*offset[:-1], offset[-1] // BLOCK) if uncut and scales == scale_shape(extent) else None


def encode(value: Tensor, root: bool, bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float32 [..., K] -> (uint8 [..., K], scale_inv float32 [..., ceil(K/128)]). bits: round stochastically by these (int64)."""
    # Through float64: the root in float32 of a CPU is not always the nearest, as a GPU's is.
    blocks = _in_blocks(value.double().sqrt().float() if root else value, 0.0)
    magnitude = torch.where(blocks.isnan(), torch.zeros_like(blocks), blocks.abs())
    amax = magnitude.amax(-1, keepdim=True) if value.numel() else magnitude.sum(-1, keepdim=True)
    usable = (amax > 0) & amax.isfinite()
    limit = torch.full_like(amax, ROOT_MAX if root else E4M3_MAX)
    scale = torch.where(usable, limit / torch.where(usable, amax, limit), torch.ones_like(amax)).clamp(max=FLOAT32_MAX)
    random = None if bits is None else _in_blocks(bits, 0)
    codes = _root_codes(blocks, blocks * scale, random) if root else _signed_codes(blocks * scale, random)
    return _out_of_blocks(codes, value), (torch.ones_like(scale) / scale).squeeze(-1)


def decode(stored: Tensor, scale_inv: Tensor, root: bool) -> Tensor:
    """The float32 values."""
    blocks = _in_blocks(stored, 0)
    if root:
        codes = blocks.to(torch.int32)
        normal = ((codes + ROOT_OFFSET) << 19).view(torch.float32)
        small = codes.float() * (1.0 / ROOT_STEPS)
        value = torch.where(codes >= 16, normal, small)
        value = torch.where(codes == ROOT_NAN, torch.full_like(value, float("nan")), value) * scale_inv.unsqueeze(-1)
        return _out_of_blocks(value * value, stored)
    return _out_of_blocks(blocks.view(torch.float8_e4m3fn).float() * scale_inv.unsqueeze(-1), stored)


def _in_blocks(x: Tensor, filler: float) -> Tensor:
    """[..., K] -> [..., ceil(K/128), 128]"""
    missing = blocks_of_row(x.shape[-1]) * BLOCK - x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, missing), value=filler) if missing else x.contiguous()
    return padded.view(*x.shape[:-1], -1, BLOCK) if x.numel() else x.new_zeros(*scale_shape(x.shape), BLOCK)


def _out_of_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]].reshape(like.shape)


def _signed_codes(y: Tensor, random: Tensor | None) -> Tensor:
    """E4M3 bytes of scaled values."""
    y = y.clamp(-E4M3_MAX, E4M3_MAX)
    if random is not None:
        # Normal numbers drop 20 bits of the mantissa; below 2^-6 there are steps of 2^-9.
        normal = ((y.view(torch.int32) + (random & 0xFFFFF).to(torch.int32)) & -0x100000).view(torch.float32)
        small = (y.abs() * 512.0 + (random & 0xFFFFF).float() * 2.0**-20).floor() * 2.0**-9
        small = torch.where(y < 0, -small, small)
        rounded = torch.where(y.abs() < 2.0**-6, small, normal).clamp(-E4M3_MAX, E4M3_MAX)
        y = torch.where(y.isnan(), y, rounded)
    return y.to(torch.float8_e4m3fn).view(torch.uint8)


def _root_codes(root: Tensor, y: Tensor, random: Tensor | None) -> Tensor:
    """Unsigned codes of scaled roots. A root above 0 never becomes 0: Adam divides by it."""
    y = y.clamp(max=ROOT_MAX)
    raw = y.view(torch.int32)
    if random is None:
        normal = (raw + 0x3FFFF + ((raw >> 19) & 1)) >> 19  # to the nearest, ties to even
        small = y * ROOT_STEPS + 8388608.0  # 2^23: rounds to an integer, ties to even, in the low bits
    else:
        fraction = (random & 0x7FFFF).to(torch.int32)
        normal = (raw + fraction) >> 19
        small = (y * ROOT_STEPS + fraction.float() * 2.0**-19).floor() + 8388608.0
    codes = torch.where(y < ROOT_SMALLEST_NORMAL, small.view(torch.int32) & 0x1F, normal - ROOT_OFFSET)
    codes = codes.clamp(max=0xFE)
    codes = torch.where((root > 0) & (codes == 0), torch.ones_like(codes), codes)
    return torch.where(root.isnan(), torch.full_like(codes, ROOT_NAN), codes).to(torch.uint8)
