"""Quantizing a part of a matrix whose blocks lie on the grid of the WHOLE matrix, wherever the part was cut out of it.

    ottava::block_amax     values -> the part of each block's amax that they know
    ottava::block_scales   amax of whole blocks -> what values are multiplied by, and what is stored
    ottava::encode         values -> bytes
    ottava::transpose      bytes [M, K] -> bytes [K, M]

A block is rows x columns of the matrix: (128, 128) and (16, 16) serve both directions, (1, B) is the rowwise direction of 1-D blocks
and (B, 1) the columnwise one. A part [m, k] begins at row `top` and column `left` of the matrix. Same bytes as `kernels.cast`, which
sees whole matrices.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottava.kernels.cast import NVFP4_SCALE_MAX, NVFP4_SCALE_MIN, nvfp4_tensor_scale, to_e2m1_codes, to_fp8_bytes
from ottava.kernels.registry import define
from ottava.quant.formats import NAN_BYTE, e8m0_to_float
from ottava.quant.scaling import amax_of, e8m0_from_amax, scale_from_amax
from ottava.quant.scheme import Scheme


def _touched(start: int, size: int, block: int) -> int:
    """Blocks that `size` elements from `start` on lie in."""
    return -(-(start + size) // block) - start // block if size else 0


def _block_amax(x: Tensor, rows: int, columns: int, top: int, left: int) -> Tensor:
    """max(|x|) of each block that x [m, k] touches: float32 [n, c]. A NaN is ignored."""
    count = _touched(top, x.shape[0], rows), _touched(left, x.shape[1], columns)
    if x.numel() == 0:
        return torch.zeros(count, dtype=torch.float32, device=x.device)
    above, before = top % rows, left % columns  # of the first blocks, what others hold
    below, after = -(above + x.shape[0]) % rows, -(before + x.shape[1]) % columns
    blocks = pad(x, (before, after, above, below)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return amax_of(blocks, dim=(1, 3))


def _block_amax_fake(x: Tensor, rows: int, columns: int, top: int, left: int) -> Tensor:
    return x.new_empty(_touched(top, x.shape[0], rows), _touched(left, x.shape[1], columns), dtype=torch.float32)


block_amax = define("block_amax", _block_amax, _block_amax_fake)


def _block_scales(
    amax: Tensor, has_nan: Tensor, tensor_amax: Tensor, scheme: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(factor, scale_inv), each of amax's shape: values are multiplied by `factor`.

    dtype: of the values. tensor_amax [1] and has_nan (of amax's shape, above 0 where a block has a NaN): for E2M1 only.
    """
    parsed = Scheme.parse(scheme)
    if parsed.kind == "mx":
        exponent = e8m0_from_amax(amax, parsed.element.max)
        return e8m0_to_float(254 - exponent), exponent  # 2^(127 - e)
    if parsed.kind == "block":
        largest = torch.finfo(dtype).max
        scale = scale_from_amax(amax, parsed.element.max, parsed.epsilon, parsed.power_of_two, largest)
        return scale, torch.ones_like(scale) / scale
    tensor_scale = nvfp4_tensor_scale(tensor_amax)
    block_scale = (amax / torch.full_like(amax, 6.0)) / tensor_scale
    block_scale = block_scale.clamp(NVFP4_SCALE_MIN, NVFP4_SCALE_MAX).to(torch.float8_e4m3fn)
    factor = (torch.ones_like(tensor_scale) / tensor_scale) / block_scale.float()
    return factor, block_scale.view(torch.uint8).masked_fill(has_nan > 0, NAN_BYTE["e4m3"])


def _block_scales_fake(
    amax: Tensor, has_nan: Tensor, tensor_amax: Tensor, scheme: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax, dtype=Scheme.parse(scheme).scale_dtype)


block_scales = define("block_scales", _block_scales, _block_scales_fake)


def _encode(x: Tensor, factor: Tensor, scheme: str, rows: int, columns: int, top: int, left: int) -> Tensor:
    """x [m, k] times the factor of its block -> uint8 [m, k]; for E2M1 [m, k/2], even columns in the low half.

    factor: [1], or of all blocks that x touches, as `block_amax` returns them.
    """
    parsed = Scheme.parse(scheme)
    scaled = x.float() * (factor if factor.dim() == 1 else each_element(factor, rows, columns, top, left, x.shape))
    if parsed.element.dtype is not None:
        return to_fp8_bytes(scaled, parsed.element)
    codes = to_e2m1_codes(scaled.clamp(-6.0, 6.0), stochastic=False)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _encode_fake(x: Tensor, factor: Tensor, scheme: str, rows: int, columns: int, top: int, left: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // Scheme.parse(scheme).elements_per_byte, dtype=torch.uint8)


encode = define("encode", _encode, _encode_fake)


def each_element(of_blocks: Tensor, rows: int, columns: int, top: int, left: int, shape: torch.Size) -> Tensor:
    """The number of its block for every element of a part [m, k] = `shape`."""
    row = torch.arange(top, top + shape[0], device=of_blocks.device) // rows - top // rows
    column = torch.arange(left, left + shape[1], device=of_blocks.device) // columns - left // columns
    return of_blocks[row][:, column]


@functools.lru_cache(maxsize=256)
def _elements_per_byte(scheme: str) -> int:
    return Scheme.parse(scheme).elements_per_byte


def _transpose(data: Tensor, scheme: str) -> Tensor:
    """uint8 [M, K] -> [K, M]; for E2M1 [M, K/2] -> [K, M/2], packed anew. Always new memory."""
    if Scheme.parse(scheme).elements_per_byte == 1:
        return data.t().clone(memory_format=torch.contiguous_format)
    codes = torch.stack([data & 0xF, data >> 4], dim=-1).flatten(1).t()
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _transpose_fake(data: Tensor, scheme: str) -> Tensor:
    packed = Scheme.parse(scheme).elements_per_byte
    return data.new_empty(data.shape[1] * packed, data.shape[0] // packed)


def _transpose_cuda(data: Tensor, scheme: str) -> Tensor:
    import ottava.kernels.grid_triton as grid_triton

    if _elements_per_byte(scheme) == 1 and grid_triton.fits(data):
        return grid_triton.transpose(data)
    return _transpose(data, scheme)


transpose = define("transpose", _transpose, _transpose_fake, _transpose_cuda)
