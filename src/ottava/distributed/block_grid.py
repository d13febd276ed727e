"""Quantizing rows of a matrix whose blocks lie on the grid of the WHOLE matrix, wherever the rows are cut.

    amax_of_blocks    the part of each block's amax that these rows know
    block_scales      amax of whole blocks -> what values are multiplied by, and what is stored
    encode            values -> bytes

A block is rows x columns of the matrix [M, K]: (128, 128) and (16, 16) serve both directions, (1, B) is the rowwise direction of
1-D blocks, and (B, 1) the columnwise one. Same bytes as `kernels.cast`, which sees whole matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottava.kernels.cast import NVFP4_SCALE_MAX, NVFP4_SCALE_MIN, nvfp4_tensor_scale, to_e2m1_codes, to_fp8_bytes
from ottava.quant.formats import NAN_BYTE, e8m0_to_float
from ottava.quant.scaling import amax_of, e8m0_from_amax, scale_from_amax
from ottava.quant.scheme import Scheme

Block = tuple[int, int]


def amax_of_blocks(x: Tensor, block: Block, top: int) -> Tensor:
    """max(|x|) of each block that x [m, K] touches, float32 [n, ceil(K / columns)]; x[0] is row `top` of the matrix."""
    rows, columns = block
    across = -(-x.shape[1] // columns)
    if x.numel() == 0:
        return torch.zeros(0, across, device=x.device)
    above = top % rows  # of the first block, what other ranks hold
    below, after = -(above + x.shape[0]) % rows, -x.shape[1] % columns
    blocks = pad(x, (0, after, above, below)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return amax_of(blocks, dim=(1, 3))


def block_scales(
    amax: Tensor, scheme: Scheme, dtype: torch.dtype, tensor_amax: Tensor, has_nan: Tensor
) -> tuple[Tensor, Tensor]:
    """(factor, stored), each of amax's shape: values are multiplied by `factor`; `stored` is the buffer's `scale_inv`.

    dtype: of the values. tensor_amax [1] and has_nan (of amax's shape, above 0 where a block has a NaN): for E2M1 only.
    """
    if scheme.kind == "mx":
        exponent = e8m0_from_amax(amax, scheme.element.max)
        return e8m0_to_float(254 - exponent), exponent  # 2^(127 - e)
    if scheme.kind == "block":
        largest = torch.finfo(dtype).max
        scale = scale_from_amax(amax, scheme.element.max, scheme.epsilon, scheme.power_of_two, largest)
        return scale, torch.ones_like(scale) / scale
    tensor_scale = nvfp4_tensor_scale(tensor_amax)
    block_scale = (amax / torch.full_like(amax, 6.0)) / tensor_scale
    block_scale = block_scale.clamp(NVFP4_SCALE_MIN, NVFP4_SCALE_MAX).to(torch.float8_e4m3fn)
    factor = (torch.ones_like(tensor_scale) / tensor_scale) / block_scale.float()
    return factor, block_scale.view(torch.uint8).masked_fill(has_nan > 0, NAN_BYTE["e4m3"])


def each_element(of_blocks: Tensor, block: Block, shape: torch.Size, top: int) -> Tensor:
    """The number of its block for every element of rows [m, K] that start at row `top` of the matrix.

    of_blocks: of all blocks that the rows touch, as `amax_of_blocks` returns them.
    """
    rows, columns = block
    first = top // rows
    row = torch.arange(top, top + shape[0], device=of_blocks.device) // rows - first
    column = torch.arange(shape[1], device=of_blocks.device) // columns
    return of_blocks[row][:, column]


def encode(x: Tensor, factor: Tensor, scheme: Scheme) -> Tensor:
    """x [m, K] times `factor` (one number, or one an element) -> uint8 [m, K]; for E2M1 [m, K/2], even columns in the low half."""
    scaled = x.float() * factor
    if scheme.format != "e2m1":
        return to_fp8_bytes(scaled, scheme.element)
    codes = to_e2m1_codes(scaled.clamp(-6.0, 6.0), stochastic=False)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def transposed(data: Tensor, scheme: Scheme) -> Tensor:
    """uint8 [M, K] -> [K, M] as a view; for E2M1 [M, K/2] -> [K, M/2], packed anew."""
    if scheme.format != "e2m1":
        return data.t()
    codes = torch.stack([data & 0xF, data >> 4], dim=-1).flatten(1).t()
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
