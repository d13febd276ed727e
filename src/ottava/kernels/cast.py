"""Cast, cast + transpose, amax and dequantize: `ottava::quantize`, `ottava::amax`, `ottava::dequantize`.

All quantizing ops return the same six tensors (see `Buffers`), whatever the scheme and whatever produced the values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels import tally
from ottava.kernels.fixed_order import matmul, sum_rows
from ottava.kernels.registry import define, without_gradients
from ottava.quant.formats import E2M1_VALUES, NAN_BYTE, Element, e8m0_to_float
from ottava.quant.scaling import amax_of, e8m0_from_amax, scale_from_amax
from ottava.quant.scheme import DIRECTIONS, Scheme

NVFP4_SCALE_MIN = 2.0**-6  # smallest normal E4M3: block scales below it would lose bits
NVFP4_SCALE_MAX = 448.0


class Buffers(NamedTuple):
    """What a quantizing op returns. A copy that was not asked for is an empty tensor.

    Of values [M, K]: rowwise_data is uint8 [M, K] ([M, K/2] for E2M1), columnwise_data [K, M] ([K, M/2]).
    Scales: per tensor [1]; 1xB [M, ceil(K/B)]; BxB [ceil(M/B), ceil(K/B)]; columnwise the same of the transpose.
    Amax [1]: of the values that were quantized, for per-tensor schemes (rowwise_amax, whatever copies were made) and NVFP4 (one a
    copy, since the columnwise one may be of Hadamard-transformed values).
    """

    rowwise_data: Tensor
    rowwise_scale_inv: Tensor
    columnwise_data: Tensor
    columnwise_scale_inv: Tensor
    rowwise_amax: Tensor
    columnwise_amax: Tensor


# `Buffers` as an op's schema can say it: schemas know plain tuples only.
BufferTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# ---------------------------------------------------------------------------------------------- one direction, by the rules


def to_fp8_bytes(scaled: Tensor, element: Element) -> Tensor:
    """float32 values -> bytes of `element`: clamp, round to nearest even; NaN becomes one canonical byte."""
    assert element.dtype is not None
    data = scaled.clamp(-element.max, element.max).to(element.dtype).view(torch.uint8)
    return data.masked_fill_(scaled.isnan(), NAN_BYTE[element.name])


def _pad_to_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[M, K] -> [ceil(M/r), r, ceil(K/c), c], zero padded, for a block of r x c."""
    m, k = x.shape
    r, c = block
    pad_m, pad_k = -m % r, -k % c
    if pad_m or pad_k:
        x = torch.nn.functional.pad(x, (0, pad_k, 0, pad_m))
    return x.reshape((m + pad_m) // r, r, (k + pad_k) // c, c)


def _unpad(blocks: Tensor, shape: torch.Size) -> Tensor:
    r, rows, c, cols = blocks.shape
    return blocks.reshape(r * rows, c * cols)[: shape[0], : shape[1]].contiguous()


def _direction_by_tensor(
    x: Tensor, scheme: Scheme, scale: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    amax = amax_of(x) if amax is None or scale is not None else amax.clone()
    check_scale(scale)
    if scale is None:
        scale = scale_from_amax(amax, scheme.element.max, scheme.epsilon, scheme.power_of_two)
    data = to_fp8_bytes(x.float() * scale, scheme.element)
    return data, torch.ones_like(scale) / scale, amax


def _direction_by_block(x: Tensor, scheme: Scheme, inf_value: float) -> tuple[Tensor, Tensor, Tensor]:
    assert scheme.block is not None
    blocks = _pad_to_blocks(x.float(), scheme.block)
    amax = amax_of(blocks, dim=(1, 3), keepdim=True)
    scale = scale_from_amax(amax, scheme.element.max, scheme.epsilon, scheme.power_of_two, inf_value)
    data = _unpad(to_fp8_bytes(blocks * scale, scheme.element), x.shape)
    scale_inv = (torch.ones_like(scale) / scale)[:, 0, :, 0].contiguous()
    if scheme.block[0] == 1:
        scale_inv = _rows_fastest(scale_inv)
    return data, scale_inv, x.new_empty(0, dtype=torch.float32)


def _rows_fastest(scale: Tensor) -> Tensor:
    """1x128 scales lie in memory with the row index fastest, on every device: the block GEMM of cuBLASLt reads them so."""
    return scale.t().clone(memory_format=torch.contiguous_format).t()


def _direction_by_mx(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    assert scheme.block is not None
    blocks = _pad_to_blocks(x.float(), scheme.block)
    exponent = e8m0_from_amax(amax_of(blocks, dim=(1, 3), keepdim=True), scheme.element.max)
    scale = e8m0_to_float(254 - exponent)  # 2^(127 - e)
    data = _unpad(to_fp8_bytes(blocks * scale, scheme.element), x.shape)
    return data, exponent[:, 0, :, 0].contiguous(), x.new_empty(0, dtype=torch.float32)


def _direction_by_nvfp4(x: Tensor, scheme: Scheme, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    assert scheme.block is not None
    x = x.float()
    amax = amax_of(x) if amax is None else amax.clone()
    tensor_scale = nvfp4_tensor_scale(amax)
    blocks = _pad_to_blocks(x, scheme.block)
    block_amax = amax_of(blocks, dim=(1, 3), keepdim=True)
    block_scale = (block_amax / torch.full_like(block_amax, 6.0)) / tensor_scale
    block_scale = block_scale.clamp(NVFP4_SCALE_MIN, NVFP4_SCALE_MAX).to(torch.float8_e4m3fn)
    inverse = (torch.ones_like(tensor_scale) / tensor_scale) / block_scale.float()
    # E2M1 has no NaN: a block that holds one gets a NaN scale, so that it does not become a number.
    has_nan = blocks.isnan().any(dim=3, keepdim=True).any(dim=1, keepdim=True)
    scale_bytes = block_scale.view(torch.uint8).masked_fill(has_nan, NAN_BYTE["e4m3"])
    codes = to_e2m1_codes((blocks * inverse).clamp(-6.0, 6.0), scheme.stochastic)
    codes = _unpad(codes, x.shape)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)  # even columns in the low half
    return packed, scale_bytes[:, 0, :, 0].contiguous(), amax


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """amax / (448 * 6), at least the smallest normal float32 so that its reciprocal is finite.

    1 for an all-zero or non-finite tensor: zeros stay zeros instead of becoming 0/0.
    """
    usable = torch.isfinite(amax) & (amax > 0)
    scale = (amax / torch.full_like(amax, 448.0 * 6.0)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(usable, scale, torch.ones_like(amax))


def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 on `device`. While a CUDA graph is recorded nothing can be sent there: each number is then an argument of a launch."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return torch.tensor(values, dtype=torch.float32, device=device)
    table = torch.empty(len(values), dtype=torch.float32, device=device)
    for i, value in enumerate(values):
        table[i].fill_(value)
    return table


def to_e2m1_codes(x: Tensor, stochastic: bool) -> Tensor:
    """float32 in [-6, 6] -> 4-bit codes (uint8), rounding to nearest with ties to even, or stochastically. NaN becomes 6."""
    magnitude = x.abs()
    sign = (torch.signbit(x) & ~x.isnan()).to(torch.uint8) << 3  # devices disagree about the sign of a NaN
    values = _table(E2M1_VALUES, x.device)
    below = torch.bucketize(magnitude, values, right=True).sub_(1).clamp_(0, 6)  # values[below] <= magnitude
    low, high = values[below], values[below + 1]
    fraction = (magnitude - low) / (high - low)
    if stochastic:
        up = fraction > torch.rand_like(fraction)
    else:
        up = (fraction > 0.5) | ((fraction == 0.5) & (below % 2 == 1))
    up |= magnitude.isnan()
    return (below + up).to(torch.uint8) | sign


# A fixed sign pattern makes the transform "random" but the same in every process: the two operands of wgrad must agree.
_HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard16(x: Tensor) -> Tensor:
    """Rotates groups of 16 along the last dimension by an orthonormal matrix, in float32. Length must be a multiple of 16."""
    h = torch.ones(1, 1, device=x.device, dtype=torch.float32)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    matrix = _table(_HADAMARD_SIGNS, x.device)[:, None] * h / 4.0
    return matmul(x.float().reshape(-1, 16), matrix).reshape(x.shape)


def quantize_direction(
    x: Tensor, scheme: Scheme, scale: Tensor | None, amax: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    if scheme.kind == "tensor":
        return _direction_by_tensor(x, scheme, scale, amax)
    if scheme.kind == "block":
        return _direction_by_block(x, scheme, torch.finfo(dtype).max)
    return _direction_by_mx(x, scheme) if scheme.kind == "mx" else _direction_by_nvfp4(x, scheme, amax)


# ------------------------------------------------------------------------------------------------------- both directions


def check_shape(m: int, k: int, scheme: Scheme, rowwise: bool, columnwise: bool) -> None:
    """Packed formats need whole blocks along the dimension they are packed in."""
    if scheme.kind != "nvfp4":
        return
    for size, wanted, name in (
        (k, rowwise, "last dimension"),
        (m, columnwise, "product of all dimensions but the last"),
    ):
        if wanted and size % 16:
            raise ValueError(f"NVFP4 needs a {name} that is a multiple of 16, got {size}: pad the tensor.")


def reference_buffers(
    values: Tensor,
    scheme: Scheme,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    dtype: torch.dtype,
) -> Buffers:
    """The truth: `values` [M, K] in any float dtype -> buffers.

    Per-tensor schemes use `scale` [1] if given (delayed scaling: the amax is then that of the values), else the scale of `amax` [1] if
    given (an amax that was reduced over ranks, or found by an earlier pass), else that of the values. NVFP4 takes `amax` [2]: of the
    rowwise and of the columnwise values, see `operand_amax`. `dtype` is the activation dtype that the values have or would have had: an
    overflowing block scale becomes its largest value.
    """
    assert scheme.columns is None, scheme  # `each_direction` comes first
    check_shape(values.shape[0], values.shape[1], scheme, rowwise, columnwise)
    tally.count(values)
    row_amax = col_amax = amax
    if amax is not None and scheme.kind == "nvfp4":
        row_amax, col_amax = amax.chunk(2)

    row, col = _nothing(values, scheme), _nothing(values, scheme)
    if rowwise or scheme.transposable:
        row = quantize_direction(values, scheme, scale, row_amax, dtype)
    if columnwise and scheme.transposable:
        col = _transposed(row, scheme)
    elif columnwise:
        transposed = values.t().contiguous()
        col = quantize_direction(
            hadamard16(transposed) if scheme.hadamard else transposed, scheme, scale, col_amax, dtype
        )
    if not rowwise:
        none = _nothing(values, scheme)
        row = (*none[:2], row[2] if scheme.per_tensor else none[2])
    return Buffers(row[0], row[1], col[0], col[1], row[2], col[2])


def _nothing(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """(data, scale_inv, amax) of a copy that is not made."""
    return tuple(x.new_empty(0, dtype=d) for d in (torch.uint8, scheme.scale_dtype, torch.float32))  # type: ignore[return-value]


def _transposed(row: tuple[Tensor, Tensor, Tensor], scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """The columnwise copy of a scheme whose transpose is exact."""
    data, scale_inv, amax = row
    if scheme.format == "e2m1":
        codes = torch.stack([data & 0xF, data >> 4], dim=-1).flatten(1).t()
        data = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
    else:
        data = _transposed_copy(data)
    if scheme.per_tensor:
        return data, scale_inv.clone(), amax.new_empty(0)
    return data, _transposed_copy(scale_inv), amax.clone()


def _transposed_copy(x: Tensor) -> Tensor:
    """Always a copy: `.t().contiguous()` of a single row or column would be the same memory, and outputs of an op may not share it."""
    return x.t().clone(memory_format=torch.contiguous_format)


def each_direction(
    x: Tensor, scheme: Scheme, rowwise: bool, columnwise: bool, make: Callable[[Scheme, bool, bool], BufferTensors]
) -> Buffers:
    """The buffers of a scheme that has two ways (quant/scheme.py, [Note: two ways]): `make(scheme, rowwise, columnwise)` for each.

    x: of the device that they are on.
    """
    rows, columns = (scheme.along(direction) for direction in DIRECTIONS)
    row, row_scale, amax = _nothing(x, rows)
    column, column_scale, column_amax = _nothing(x, columns)
    if rowwise:
        row, row_scale, _, _, amax, _ = make(rows, True, False)
    if columnwise:
        with tally.again() if rowwise else contextlib.nullcontext():
            _, _, column, column_scale, found, column_amax = make(columns, False, True)
        amax = found if columns.per_tensor else amax
    return Buffers(row, row_scale, column, column_scale, amax, column_amax)


def fake_buffers(x: Tensor, m: int, k: int, scheme: Scheme, rowwise: bool, columnwise: bool) -> Buffers:
    """Empty tensors of the right shapes."""
    if scheme.columns is not None:
        return each_direction(x, scheme, rowwise, columnwise, lambda *asked: fake_buffers(x, m, k, *asked))

    def one(rows: int, cols: int, wanted: bool) -> tuple[Tensor, Tensor]:
        scale_dtype = torch.uint8 if scheme.kind in ("mx", "nvfp4") else torch.float32
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=scale_dtype)
        data = x.new_empty(rows, cols // 2 if scheme.format == "e2m1" else cols, dtype=torch.uint8)
        if scheme.block is None:
            return data, x.new_empty(1, dtype=torch.float32)
        r, c = scheme.block
        shape = ((rows + r - 1) // r, (cols + c - 1) // c)
        if scheme.kind == "block" and r == 1:  # see `_rows_fastest`
            return data, x.new_empty(shape[::-1], dtype=scale_dtype).t()
        return data, x.new_empty(shape, dtype=scale_dtype)

    def amax(wanted: bool) -> Tensor:
        return x.new_empty(1 if wanted else 0, dtype=torch.float32)

    nvfp4 = scheme.kind == "nvfp4"
    row, col = one(m, k, rowwise), one(k, m, columnwise)
    return Buffers(
        row[0], row[1], col[0], col[1], amax(scheme.per_tensor or (nvfp4 and rowwise)), amax(nvfp4 and columnwise)
    )


# ------------------------------------------------------------------------------------------------------------------- ops


def check_scale(scale: Tensor | None) -> None:
    """A given scale is float32 [1]: the kernels are compiled for that, and a rounded one would give other bytes."""
    if scale is not None and (scale.dtype is not torch.float32 or scale.numel() != 1):
        raise ValueError(
            f"A scale must be one float32 number, got {scale.dtype} of shape {tuple(scale.shape)}: pass scale.float().reshape(1)."
        )


def _quantize(
    x: Tensor, scheme: str, scale: Tensor | None, amax: Tensor | None, rowwise: bool, columnwise: bool
) -> BufferTensors:
    """x: [M, K] in float32, bfloat16 or float16. The copies are contiguous whatever x is."""
    parsed = Scheme.parse(scheme)
    if parsed.columns is not None:
        again = torch.ops.ottava.quantize
        return each_direction(x, parsed, rowwise, columnwise, lambda s, r, c: again(x, str(s), scale, amax, r, c))
    return reference_buffers(x.contiguous(), parsed, scale, amax, rowwise, columnwise, x.dtype)


def _quantize_fake(
    x: Tensor, scheme: str, scale: Tensor | None, amax: Tensor | None, rowwise: bool, columnwise: bool
) -> BufferTensors:
    return fake_buffers(x, x.shape[0], x.shape[1], Scheme.parse(scheme), rowwise, columnwise)


def _quantize_cuda(
    x: Tensor, scheme: str, scale: Tensor | None, amax: Tensor | None, rowwise: bool, columnwise: bool
) -> BufferTensors:
    import ottava.kernels.tile as tile

    producer = tile.Identity()
    producer.x = x if x.stride(-1) == 1 else x.contiguous()
    made = tile.quantize(producer, scheme, scale, amax, rowwise, columnwise)
    return _QUANTIZE(x, scheme, scale, amax, rowwise, columnwise) if made is None else made


_QUANTIZE = without_gradients(_quantize)
quantize = define("quantize", _quantize, _quantize_fake, _quantize_cuda, cuda_launches=True)


def _amax(x: Tensor) -> Tensor:
    return amax_of(x)


def _amax_cuda(x: Tensor) -> Tensor:
    import ottava.kernels.tile as tile

    producer = tile.Identity()
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    producer.x = rows if rows.stride(-1) == 1 else rows.contiguous()
    return tile.amax(producer)


amax = define("amax", _amax, lambda x: x.new_empty(1, dtype=torch.float32), _amax_cuda, cuda_launches=True)


def operand_amax(x: Tensor, scheme: Scheme) -> Tensor:
    """What ranks that quantize parts of one tensor have to share first, and then give to `quantize`.

    [1] for per-tensor schemes; [2] for NVFP4: of the rowwise values, and of the columnwise ones, which a Hadamard transform changes.
    """
    of_rows = torch.ops.ottava.amax(x)
    if scheme.kind != "nvfp4":
        return of_rows
    return torch.cat([of_rows, amax_of(hadamard16(x.t().contiguous())) if scheme.hadamard else of_rows])


def _dequantize(data: Tensor, scale_inv: Tensor, amax: Tensor, scheme: str, dtype: torch.dtype) -> Tensor:
    """data, scale_inv, amax: of one direction. Returns [rows, columns] in `dtype`: float32 product, rounded once."""
    parsed = Scheme.parse(scheme)
    values = unpack(data, parsed)
    if parsed.kind == "nvfp4":
        scale_inv = scale_inv.view(torch.float8_e4m3fn).float() * nvfp4_tensor_scale(amax)
    elif parsed.kind == "mx":
        scale_inv = e8m0_to_float(scale_inv)
    return (values * expand_scale(scale_inv, parsed, values.shape)).to(dtype)


def unpack(data: Tensor, scheme: Scheme) -> Tensor:
    """Bytes -> unscaled float32 values [rows, columns]."""
    assert scheme.columns is None, scheme  # which direction are they?
    if scheme.element.dtype is not None:
        return data.view(scheme.element.dtype).float()
    table = _table(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), data.device)
    codes = torch.stack([data & 0xF, data >> 4], dim=-1).flatten(1)
    return table[codes.int()]


def expand_scale(scale_inv: Tensor, scheme: Scheme, shape: torch.Size) -> Tensor:
    """One scale an element (or [1])."""
    if scheme.block is None:
        return scale_inv
    r, c = block_of(scale_inv, scheme, shape)
    if r > 1:
        scale_inv = scale_inv.repeat_interleave(r, dim=0)
    return scale_inv.repeat_interleave(c, dim=1)[: shape[0], : shape[1]]


def block_of(scale_inv: Tensor, scheme: Scheme, shape: torch.Size | tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of values [shape] that one number of `scale_inv` stands for.

    The scheme's block, or a smaller one: of a part that begins inside of a block of the whole matrix (a tensor-parallel rank's), scales
    come on a finer grid, which divides the part evenly (`quant.weight_place.grid_step`).
    """
    assert scheme.block is not None
    usual = scheme.scale_shape(*shape)
    r, c = (b if have == n else size // have for b, have, n, size in zip(scheme.block, scale_inv.shape, usual, shape))
    return r, c


def _dequantize_fake(data: Tensor, scale_inv: Tensor, amax: Tensor, scheme: str, dtype: torch.dtype) -> Tensor:
    packed = 2 if Scheme.parse(scheme).format == "e2m1" else 1
    return data.new_empty(data.shape[0], data.shape[1] * packed, dtype=dtype)


dequantize = define("dequantize", _dequantize, _dequantize_fake)


def _column_sum(x: Tensor) -> Tensor:
    """Sum over rows in float32, rounded once to x's dtype: the bias gradient."""
    return sum_rows(x.float()).to(x.dtype)


column_sum = define("column_sum", _column_sum, lambda x: x.new_empty(x.shape[1]))
