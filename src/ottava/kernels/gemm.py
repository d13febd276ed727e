"""Matrix products: `out[m, n] = A[m, k] @ B[n, k].T`, quantized (`ottava::scaled_mm`) or not (`ottava::mm`).

On CUDA a quantized product goes to cuBLASLt through `torch.nn.functional.scaled_mm` where the device multiplies the formats
natively. Everywhere else it is emulated exactly: FP8 values are exact in float32 (and bf16), so the products are exact and only
the order of the float32 sum differs from the hardware's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad

from ottava import torch_private
from ottava.kernels.cast import expand_scale, nvfp4_tensor_scale, unpack
from ottava.kernels.fixed_order import matmul
from ottava.kernels.registry import define, has_triton
from ottava.notices import leads, warn_once
from ottava.quant.formats import e8m0_to_float
from ottava.quant.scheme import Scheme
from ottava.recipe import Recipe

ALIGNMENT = 16  # bytes: cuBLASLt's FP8 products want every row of an operand to start on such a boundary
BLOCK_ROWS = 8  # cuBLASLt's products of 128-blocks want rows of both operands in multiples of these

# ------------------------------------------------------------------------------------------------------------- emulation


def _by_blocks_of_128(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_scheme: Scheme, b_scheme: Scheme, parts: int
) -> Tensor:
    """A float32 partial product for each 128-wide slice of k, times both scales, added by halves (see `fixed_order`)."""
    m, k = a.shape
    n = b.shape[0]

    def per_row(scale: Tensor, scheme: Scheme, rows: int) -> Tensor:  # -> [rows, ceil(k/128)]
        assert scheme.block is not None
        return scale if scheme.block[0] == 1 else scale.repeat_interleave(scheme.block[0], dim=0)[:rows]

    count = -(-k // 128)
    stride = count // parts if k % (128 * parts) == 0 else count  # slices of one part
    starts = range(0, count, stride) if count else range(0)
    blocks = _Blocks(a, b, per_row(a_scale, a_scheme, m), per_row(b_scale, b_scheme, n), starts)
    return _sum_of_slices(blocks, 0, stride) if count else a.new_zeros(m, n)


class _Blocks(NamedTuple):
    """Unscaled operands [m, k] and [n, k], their scales [m or n, ceil(k/128)], and the slices at which parts of k begin."""

    a: Tensor
    b: Tensor
    a_rows: Tensor
    b_rows: Tensor
    starts: range


def _sum_of_slices(blocks: _Blocks, first: int, last: int) -> Tensor:
    """Slices [first, last) of every part. (Not a closure that calls itself: that is a cycle, which keeps operands until collected.)"""
    a, b = blocks.a, blocks.b
    if (last - first) % 2 == 0:
        middle = (first + last) // 2
        return _sum_of_slices(blocks, first, middle).add_(_sum_of_slices(blocks, middle, last))
    out = a.new_zeros(a.shape[0], b.shape[0])
    for j in (start + i for i in range(first, last) for start in blocks.starts):
        part = slice(128 * j, 128 * (j + 1))
        out += matmul(a[:, part], b[:, part].t()) * (blocks.a_rows[:, j, None] * blocks.b_rows[None, :, j])
    return out


def _emulate(
    a: Tensor,
    a_scale: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_amax: Tensor,
    a_scheme: Scheme,
    b_scheme: Scheme,
    parts: int,
) -> Tensor:
    """float32 [m, n]."""
    a32, b32 = unpack(a, a_scheme), unpack(b, b_scheme)
    if a_scheme.kind == "tensor":
        return _scaled_product(a32, b32, a_scale, b_scale, parts)
    if a_scheme.kind == "block" and not _finer(a, a_scale, a_scheme) and not _finer(b, b_scale, b_scheme):
        return _by_blocks_of_128(a32, a_scale, b32, b_scale, a_scheme, b_scheme, parts)
    if a_scheme.kind == "block":
        a32 = a32 * expand_scale(a_scale, a_scheme, a32.shape)
        return matmul(a32, (b32 * expand_scale(b_scale, b_scheme, b32.shape)).t(), parts)
    if a_scheme.kind == "mx":
        a32 = a32 * expand_scale(e8m0_to_float(a_scale), a_scheme, a32.shape)
        b32 = b32 * expand_scale(e8m0_to_float(b_scale), b_scheme, b32.shape)
        return _exact_product(a32, b32, parts)
    a32 = a32 * expand_scale(a_scale.view(torch.float8_e4m3fn).float(), a_scheme, a32.shape)
    b32 = b32 * expand_scale(b_scale.view(torch.float8_e4m3fn).float(), b_scheme, b32.shape)
    return _scaled_product(a32, b32, nvfp4_tensor_scale(a_amax), nvfp4_tensor_scale(b_amax), parts)


def _finer(data: Tensor, scale: Tensor, scheme: Scheme) -> bool:
    """Whether scales come on a finer grid than the scheme's: see `kernels.cast.block_of`."""
    shape = (data.shape[0], data.shape[1] * scheme.elements_per_byte)
    return scheme.block is not None and tuple(scale.shape) != scheme.scale_shape(*shape)


def _scaled_product(a32: Tensor, b32: Tensor, a_scale: Tensor, b_scale: Tensor, parts: int) -> Tensor:
    """A @ B.T times both scales. On the CPU the operands are scaled, so that partial products of ranks add up to the whole one's bits."""
    if a32.is_cuda:
        return _exact_product(a32, b32, parts) * (a_scale * b_scale)
    return matmul(a32 * a_scale, (b32 * b_scale).t(), parts)


def _exact_product(a32: Tensor, b32: Tensor, parts: int) -> Tensor:
    """A @ B.T of values with at most 8 significant bits: exact in bf16, so a GPU may use its bf16 units."""
    if a32.is_cuda:
        return torch.mm(a32.bfloat16(), b32.bfloat16().t(), out_dtype=torch.float32)
    return matmul(a32, b32.t(), parts)


CPU_NOTICE = "ottava: on a CPU, FP8 products run by exact emulation in float32: the numbers are those of the recipe, the speed is not."


def _scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_amax: Tensor,
    a_scheme: str,
    b_scheme: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    split_accumulator: bool,
    parts: int = 1,
) -> Tensor:
    """Operands are one direction of quantized buffers, K-major. bias: [n]. The bias is added in float32, before rounding.

    parts: of the contraction, for the order of its sum (`fixed_order.matmul`).
    """
    sa, sb = Scheme.parse(a_scheme), Scheme.parse(b_scheme)
    if a.is_cuda and not has_triton():
        _warn_of_emulation(sa, a.device, "Triton cannot be imported")
    elif not a.is_cuda and leads():
        warn_once(CPU_NOTICE)
    out = _emulate(a, a_scale, a_amax, b, b_scale, b_amax, sa, sb, parts)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _scaled_mm_fake(
    a: Tensor,
    a_scale: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_amax: Tensor,
    a_scheme: str,
    b_scheme: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    split_accumulator: bool,
    parts: int = 1,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


# ------------------------------------------------------------------------------------------------------------------ CUDA


_KIND_NAMES = {"tensor": "per-tensor FP8", "block": "128-block FP8", "mx": "MXFP8", "nvfp4": "NVFP4"}


def emulated_because(a_scheme: Scheme, b_scheme: Scheme, capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability does not multiply the two through cuBLASLt here; None if it does.

    >>> emulated_because(Scheme.parse("e4m3:1x32"), Scheme.parse("e4m3:1x32"), (10, 0))
    'Ottava has no native MXFP8 product'
    """
    if a_scheme.kind == "tensor":
        if capability < (8, 9):
            return "native per-tensor FP8 products need compute capability 8.9"
        both_e5m2 = "e5m2" == a_scheme.format == b_scheme.format
        return "cuBLASLt does not multiply E5M2 by E5M2" if both_e5m2 else None
    if a_scheme.kind != "block" or b_scheme.kind != "block":
        return f"Ottava has no native {_KIND_NAMES[a_scheme.kind]} product"
    if capability != (9, 0):
        return "native 128-block FP8 products need compute capability 9.0, and no later one"
    if a_scheme.block != (1, 128):
        return "cuBLASLt takes 128x128 blocks as the second operand only"
    return None if "e4m3" == a_scheme.format == b_scheme.format else "cuBLASLt multiplies 128-blocks of E4M3 only"


def recipe_emulated_because(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    """`emulated_because`, of the three products of a training step by `recipe`.

    >>> recipe_emulated_because(Float8CurrentScaling(), (9, 0))
    """
    x, weight, grad = (Scheme.of(recipe, role) for role in ("input", "weight", "grad"))
    x_columns, weight_columns = x.along("columnwise"), weight.along("columnwise")
    pairs = ((x.along("rowwise"), weight.along("rowwise")), (grad, weight_columns), (grad, x_columns))
    reasons = (emulated_because(*pair, capability) for pair in pairs)
    return next((reason for reason in reasons if reason is not None), None)


def multiplied_unquantized(scheme: Scheme | None) -> bool:
    """Whether every GPU multiplies a first operand of this scheme (None: unquantized) in high precision, as it is or by emulation.

    >>> multiplied_unquantized(Scheme.parse("e4m3:1x32"))
    True
    """
    if scheme is None or scheme.kind in ("mx", "nvfp4"):
        return True
    return scheme.kind == "block" and (scheme.block != (1, 128) or scheme.format != "e4m3")


def native_rows(scheme: Scheme) -> int:
    """Rows in whose multiples a GPU multiplies operands of this scheme; other numbers of them are emulated.

    >>> native_rows(Scheme.parse("e4m3:1x128"))
    8
    """
    return BLOCK_ROWS if scheme.kind == "block" else 1


def _warn_of_emulation(a_scheme: Scheme, device: torch.device, why: str) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    warn_once(
        f"ottava: {_KIND_NAMES[a_scheme.kind]} products run by exact emulation on {torch.cuda.get_device_name(device)} (compute "
        f"capability {major}.{minor}), slower than bf16 ones: {why}."
    )


def align(x: Tensor) -> Tensor:
    """Pads rows of bytes [r, k] so that k is a multiple of 16; zero bytes are zeros in every format."""
    missing = -x.shape[1] % ALIGNMENT
    return pad(x, (0, missing)) if missing else x


def _scaled_mm_cuda(
    a: Tensor,
    a_scale: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_amax: Tensor,
    a_scheme: str,
    b_scheme: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    split_accumulator: bool,
    parts: int = 1,
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    pair = _pair_on(a_scheme, b_scheme, a.device)
    why = pair.emulated_because
    if why is None and not pair.tensorwise:
        if m % BLOCK_ROWS or n % BLOCK_ROWS or k % 128:
            why = f"cuBLASLt wants rows of both operands in multiples of {BLOCK_ROWS}, and a contraction in multiples of 128"
        elif b_scale.shape != (-(-n // pair.b_block[0]), k // pair.b_block[1]):  # `_finer`
            why = "a border between tensor-parallel ranks runs through blocks of 128"
    if m == 0 or n == 0 or k == 0 or why is not None:
        if why is not None and m and n and k:
            _warn_of_emulation(pair.a, a.device, why)
        return _scaled_mm(
            a, a_scale, a_amax, b, b_scale, b_amax, a_scheme, b_scheme, bias, out_dtype, split_accumulator, parts
        )
    if pair.tensorwise:
        return _cublas_tensorwise(a, a_scale, b, b_scale, pair, bias, out_dtype, split_accumulator)
    return _cublas_blockwise(a, a_scale, b, b_scale, pair, bias, out_dtype)


class _Pair(NamedTuple):
    """The schemes of a product's operands, and what follows from them on one device."""

    a: Scheme
    b: Scheme
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    b_block: tuple[int, int]
    """(0, 0): none."""
    tensorwise: bool
    emulated_because: str | None


@functools.lru_cache(maxsize=256)
def _pair_on(a_scheme: str, b_scheme: str, device: torch.device) -> _Pair:
    a, b = Scheme.parse(a_scheme), Scheme.parse(b_scheme)
    assert a.columns is None and b.columns is None, (a, b)  # operands are of one direction
    why = emulated_because(a, b, torch.cuda.get_device_capability(device))
    return _Pair(
        a, b, a.element.dtype or torch.uint8, b.element.dtype or torch.uint8, b.block or (0, 0), a.kind == "tensor", why
    )


def _cublas_tensorwise(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    pair: _Pair,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    split: bool,
) -> Tensor:
    n = b.shape[0]
    if a.shape[1] % ALIGNMENT:
        a, b = align(a), align(b)
    if n % ALIGNMENT:
        b = pad(b, (0, 0, 0, -n % ALIGNMENT))
    fusable = bias is None or (out_dtype == bias.dtype and out_dtype != torch.float32 and n % ALIGNMENT == 0)
    out = torch_private.scaled_mm(
        a.view(pair.a_dtype), b.view(pair.b_dtype).t(), a_scale, _TENSORWISE, b_scale, _TENSORWISE, bias if fusable else None,
        out_dtype, not split,
    )  # fmt: skip
    out = out[:, :n] if n % ALIGNMENT else out
    return out if fusable or bias is None else (out.float() + bias.float()).to(out_dtype)


# As numbers: reading the value of an enum's member is a call.
_TENSORWISE = ScalingType.TensorWise.value
_BLOCK_TYPES = {(1, 128): ScalingType.BlockWise1x128.value, (128, 128): ScalingType.BlockWise128x128.value}


def _cublas_blockwise(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    pair: _Pair,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    out = torch_private.scaled_mm(
        a.view(pair.a_dtype),
        b.view(pair.b_dtype).t(),
        _rows_packed(a_scale),  # always 1x128: `emulated_because`
        _BLOCK_TYPES[1, 128],
        _cublas_scale(b_scale, pair.b),
        _BLOCK_TYPES[pair.b_block],
        None,
        out_dtype if bias is None else torch.float32,  # the bias is added before the one rounding
        False,
    )
    return out if bias is None else (out + bias.float()).to(out_dtype)


def _rows_packed(scale: Tensor) -> Tensor:
    """[rows, k/128] with strides (1, rows), which cuBLASLt's caller wants of a single column too. Some rows of a larger operand, and a
    column that torch calls contiguous as it is, have others."""
    if scale.stride() == (1, scale.shape[0]):
        return scale
    return scale.t().contiguous().as_strided(scale.shape, (1, scale.shape[0]))


def _cublas_scale(scale: Tensor, scheme: Scheme) -> Tensor:
    """1x128 scales as [rows, k/128] with the row index fastest (the kernels write them so).

    128x128 scales (only of B) as [k/128 rounded up to 4, rows/128] with k fastest.
    """
    if scheme.block == (1, 128):
        return _rows_packed(scale)
    missing = -scale.shape[1] % 4
    if missing or not scale.is_contiguous():
        scale = torch.constant_pad_nd(scale, (0, missing))
    return scale.t()


def typed(data: Tensor, scheme: Scheme) -> Tensor:
    """Bytes as torch's dtype of the element format."""
    assert scheme.element.dtype is not None
    return data.view(scheme.element.dtype)


scaled_mm = define("scaled_mm", _scaled_mm, _scaled_mm_fake, _scaled_mm_cuda)


# ----------------------------------------------------------------------------------------------------------- unquantized


def _mm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, parts: int = 1) -> Tensor:
    """float32 accumulation, rounded once. CPUs multiply bf16 slowly and in an order that depends on threads: upcast."""
    out = matmul(a.float(), b.float().t(), parts)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _mm_cuda(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, parts: int = 1) -> Tensor:
    if out_dtype == a.dtype:
        return torch.nn.functional.linear(a, b, None if bias is None else bias.to(a.dtype))
    out = torch.mm(a, b.t(), out_dtype=out_dtype) if out_dtype == torch.float32 else torch.mm(a, b.t()).to(out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


def _mm_fake(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, parts: int = 1) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


mm = define("mm", _mm, _mm_fake, _mm_cuda)
