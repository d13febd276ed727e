"""Triton version of `attention_fp8.py`; imported only where a CUDA tensor meets it. Written for Hopper.

Three launches: the largest magnitudes of q, k and v; their bytes; attention on the bytes. These are laid out for the matrix units, which
take both operands of an FP8 product with the contraction contiguous: q and k [b, heads, rows, d], but v transposed, [b, groups, d, rows].
Rows are filled up with zeros to a multiple of `PAD`, so no load of the third kernel needs a mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.attention_fp8 import KEYS, PAD, WEIGHT_EXPONENT
from ottava.kernels.launch import Launcher
from ottava.kernels.magnitudes_triton import raise_to
from ottava.kernels.tile_kernel import _pair_to_bytes, _reciprocal, _scale_of

LOG2E = 1.0 / math.log(2.0)


class Sizes(NamedTuple):
    """Of a program of the third kernel."""

    rows: int
    """Queries: 64, the height of a product of the matrix units, for each four warps."""
    keys: int
    """Keys of a step. The op fixes them; others are for measurements."""
    warps: int
    stages: int
    """Steps whose loads are under way."""


SIZES = Sizes(128, KEYS, 8, 2)
"""`benchmarks/fp8_attention_sizes.py` compares others."""
TOKENS = 64
"""Tokens of a program of the first two kernels."""
_SIZES = ("queries", "keys", "heads", "groups")


@triton.jit
def _which(program, heads, groups):
    """0, 1, 2 for a program that works on q, k, v, and the head of it: the grid counts heads, groups and groups."""
    of_q = program < heads
    of_k = (program >= heads) & (program < heads + groups)
    kind = tl.where(of_q, 0, tl.where(of_k, 1, 2))
    return kind, tl.where(of_q, program, tl.where(of_k, program - heads, program - heads - groups))


@triton.jit
def _rows(
    x,
    batch,
    head,
    first,
    length,
    b_stride,
    h_stride,
    s_stride,
    STEP: tl.constexpr,
    COUNT: tl.constexpr,
    dim: tl.constexpr,
):
    """float32 [COUNT, dim]: rows first, first + STEP, ... of one head; 0 after the last one."""
    index, channel = tl.arange(0, COUNT), tl.arange(0, dim)
    row = first + index * STEP
    at = x + batch * b_stride + head * h_stride + row.to(tl.int64)[:, None] * s_stride + channel[None, :]
    return tl.load(at, mask=row[:, None] < length, other=0.0).to(tl.float32)


@triton.jit
def _raise_amax(amax, value):
    raise_to(amax, tl.max(tl.where(value == value, tl.abs(value), 0.0)))


@triton.jit(do_not_specialize=_SIZES)
def _attention_amax_kernel(
    q, k, v, amax,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, queries, keys, heads, groups,
    dim: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """amax [3], zero before: the largest magnitudes of q, k and v, NaN left out."""
    first, batch = tl.program_id(0) * TOKENS, tl.program_id(2).to(tl.int64)
    kind, head = _which(tl.program_id(1), heads, groups)
    head = head.to(tl.int64)
    if kind == 0:
        _raise_amax(amax, _rows(q, batch, head, first, queries, q_batch, q_head, q_step, 1, TOKENS, dim))
    elif kind == 1:
        _raise_amax(amax + 1, _rows(k, batch, head, first, keys, k_batch, k_head, k_step, 1, TOKENS, dim))
    else:
        _raise_amax(amax + 2, _rows(v, batch, head, first, keys, v_batch, v_head, v_step, 1, TOKENS, dim))


@triton.jit
def _encoded(value, scale):
    """FP8 bytes. The instruction rounds to nearest even and saturates."""
    return (value * scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _store_rows(out, value, scale, batch, head, first, heads, rows, COUNT: tl.constexpr, dim: tl.constexpr):
    """out: bytes [b, heads, rows, dim]."""
    index, channel = tl.arange(0, COUNT), tl.arange(0, dim)
    at = out + ((batch * heads + head) * rows + first) * dim + index[:, None] * dim + channel[None, :]
    tl.store(at, _encoded(value, scale), mask=(first + index)[:, None] < rows)


@triton.jit
def _store_transposed(out, even, odd, scale, batch, head, first, heads, rows, COUNT: tl.constexpr, dim: tl.constexpr):
    """out: bytes [b, heads, dim, rows], written as pairs: Triton 3.6 misplaces bytes of a transposed tile of them on Hopper.

    The pair is made as `tile_kernel` makes it, whose bytes have been compared on an H200.
    """
    pair = _pair_to_bytes(even * scale, odd * scale, False)
    index, channel = tl.arange(0, COUNT), tl.arange(0, dim)
    at = ((batch * heads + head) * dim * rows + first) // 2 + channel[:, None] * (rows // 2) + index[None, :]
    tl.store(out.to(tl.pointer_type(tl.uint16)) + at, tl.trans(pair), mask=(first + 2 * index)[None, :] < rows)


@triton.jit(do_not_specialize=_SIZES)
def _attention_encode_kernel(
    q, k, v, amax, q_bytes, k_bytes, v_bytes, scale_inv,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, queries, keys, q_rows, k_rows, heads, groups,
    PEAK: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr, INF_VALUE: tl.constexpr,
    dim: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Bytes of q and k by rows, of v transposed, and 1 / scale of each in scale_inv [3]."""
    first, batch = tl.program_id(0) * TOKENS, tl.program_id(2).to(tl.int64)
    kind, head = _which(tl.program_id(1), heads, groups)
    head = head.to(tl.int64)
    scale = _scale_of(tl.load(amax + kind), PEAK, EPSILON, POWER_OF_TWO, INF_VALUE)
    if (head == 0) & (batch == 0) & (first == 0):
        tl.store(scale_inv + kind, _reciprocal(scale, POWER_OF_TWO))
    if kind == 0:
        value = _rows(q, batch, head, first, queries, q_batch, q_head, q_step, 1, TOKENS, dim)
        _store_rows(q_bytes, value, scale, batch, head, first, heads, q_rows, TOKENS, dim)
    elif kind == 1:
        value = _rows(k, batch, head, first, keys, k_batch, k_head, k_step, 1, TOKENS, dim)
        _store_rows(k_bytes, value, scale, batch, head, first, groups, k_rows, TOKENS, dim)
    else:
        HALF: tl.constexpr = TOKENS // 2
        even = _rows(v, batch, head, first, keys, v_batch, v_head, v_step, 2, HALF, dim)
        odd = _rows(v, batch, head, first + 1, keys, v_batch, v_head, v_step, 2, HALF, dim)
        _store_transposed(v_bytes, even, odd, scale, batch, head, first, groups, k_rows, HALF, dim)


@triton.jit
def _blocks(
    out, total, largest, q, k, v, low, high, row, start, keys, k_rows, factor,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    dim: tl.constexpr, KEYS: tl.constexpr, EXPONENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes in the keys low ... high - 1, a block at a time. `largest` is in units of log2; weights are 2^EXPONENT times what they are."""
    index, channel = tl.arange(0, KEYS), tl.arange(0, dim)
    for first in tl.range(low, high, KEYS, num_stages=STAGES):
        block = tl.load(k + (first + index)[None, :] * dim + channel[:, None])  # [dim, KEYS], dim contiguous
        scores = tl.dot(q, block)
        if MASKED:
            column = first + index
            seen = (column < keys)[None, :]
            if CAUSAL:
                seen = seen & (column[None, :] <= row[:, None])
            if DOCUMENTS:
                seen = seen & (column[None, :] >= start[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1) * factor)
        shrink = tl.exp2(largest - new)
        weights = tl.exp2(scores * factor - (new - EXPONENT)[:, None])  # at most 2^EXPONENT
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + channel[None, :] * k_rows + (first + index)[:, None])  # [KEYS, dim], KEYS contiguous
        # The matrix units add FP8 products with 14 bits: the sum of one block, then in float32.
        out = out * shrink[:, None] + tl.dot(weights.to(tl.float8e4nv), values)
        largest = new
    return out, total, largest


@triton.jit(do_not_specialize=("queries", "keys", "heads", "share"))
def _attention_fp8_kernel(
    q, k, v, scale_inv, starts, out, sums, o_batch, o_head, o_step, queries, keys, q_rows, k_rows, heads, share, scale,
    CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, dim: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    EXPONENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out of ROWS queries of one head, and the natural logarithm of the sum of exp(score). The last rows, which see most keys, go first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    groups = heads // share
    q += ((batch * heads + head) * q_rows + first) * dim
    k += (batch * groups + head // share) * k_rows * dim
    v += (batch * groups + head // share) * k_rows * dim
    index, channel = tl.arange(0, ROWS), tl.arange(0, dim)
    row = first + index
    start = row
    low = 0
    if DOCUMENTS:
        start = tl.load(starts + batch * queries + row, mask=row < queries, other=0)
        low = tl.load(starts + batch * queries + first) // KEYS * KEYS  # the first query's document begins earliest
    # Not 0: an infinite score times it has to stay infinite.
    factor = tl.maximum(tl.load(scale_inv) * tl.load(scale_inv + 1) * scale, 1.0e-37)
    block = tl.load(q + index[:, None] * dim + channel[None, :])
    total = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    result = tl.zeros([ROWS, dim], tl.float32)
    high = keys
    if CAUSAL:
        high = tl.minimum(first + ROWS, keys)
    # Blocks that every query sees whole need no mask.
    plain = low
    if not DOCUMENTS:
        plain = keys // KEYS * KEYS
        if CAUSAL:
            plain = tl.minimum(first // KEYS * KEYS, plain)
        result, total, largest = _blocks(
            result, total, largest, block, k, v, low, plain, row, start, keys, k_rows, factor,
            False, CAUSAL, DOCUMENTS, dim, KEYS, EXPONENT, STAGES,
        )  # fmt: skip
    result, total, largest = _blocks(
        result, total, largest, block, k, v, plain, high, row, start, keys, k_rows, factor,
        True, CAUSAL, DOCUMENTS, dim, KEYS, EXPONENT, STAGES,
    )  # fmt: skip
    alive = total > 0.0
    safe = tl.where(alive, total, 1.0)
    result = result * (tl.load(scale_inv + 2) / safe)[:, None]
    at = out + batch * o_batch + head * o_head + row.to(tl.int64)[:, None] * o_step + channel[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=row[:, None] < queries)
    logarithm = tl.where(alive, (largest + tl.log2(safe) - EXPONENT) * 0.6931471805599453, float("-inf"))
    tl.store(sums + (batch * heads + head) * queries + row, logarithm, mask=row < queries)


# --------------------------------------------------------------------------------------------------------------- launchers

_AMAX, _ENCODE, _ATTENTION = (
    Launcher(_attention_amax_kernel),
    Launcher(_attention_encode_kernel),
    Launcher(_attention_fp8_kernel),
)


def _strides(x: Tensor, name: str, batch_first: bool) -> dict[str, int]:
    """Of [b, s, h, d] or [s, b, h, d]."""
    batch, step = (0, 1) if batch_first else (1, 0)
    return {f"{name}_batch": x.stride(batch), f"{name}_head": x.stride(2), f"{name}_step": x.stride(step)}


def operands(
    q: Tensor, k: Tensor, v: Tensor, batch_first: bool, peak: float, epsilon: float, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `attention_fp8.operands`."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    step, of_batch = (1, 0) if batch_first else (0, 1)
    batch, heads, dim = q.shape[of_batch], q.shape[2], q.shape[3]
    groups, queries, keys = k.shape[2], q.shape[step], k.shape[step]
    q_rows, k_rows = (triton.cdiv(n, PAD) * PAD for n in (queries, keys))
    q_bytes = q.new_empty(batch, heads, q_rows, dim, dtype=torch.uint8)
    k_bytes = q.new_empty(batch, groups, k_rows, dim, dtype=torch.uint8)
    v_bytes = q.new_empty(batch, groups, dim, k_rows, dtype=torch.uint8)
    amax, scale_inv = q.new_zeros(3, dtype=torch.float32), q.new_empty(3, dtype=torch.float32)
    common = {
        "q": q, "k": k, "v": v, "amax": amax, "queries": queries, "keys": keys, "heads": heads, "groups": groups, "dim": dim,
        "TOKENS": TOKENS, **_strides(q, "q", batch_first), **_strides(k, "k", batch_first), **_strides(v, "v", batch_first),
    }  # fmt: skip
    grid = (max(q_rows, k_rows) // TOKENS, heads + 2 * groups, batch)
    _AMAX(grid, 4, common)
    own = {
        "q_bytes": q_bytes, "k_bytes": k_bytes, "v_bytes": v_bytes, "scale_inv": scale_inv, "q_rows": q_rows, "k_rows": k_rows,
        "PEAK": peak, "EPSILON": epsilon, "POWER_OF_TWO": power_of_two, "INF_VALUE": torch.finfo(torch.float32).max,
    }  # fmt: skip
    _ENCODE(grid, 4, common | own)
    return q_bytes, k_bytes, v_bytes, scale_inv


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, ends: Tensor | None, scale: float, causal: bool, batch_first: bool,
    peak: float, epsilon: float, power_of_two: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `attention_fp8._fp8_attention`."""
    laid = operands(q, k, v, batch_first, peak, epsilon, power_of_two)
    out = q.new_empty(q.shape)
    return out, attend(laid, out, starts, scale, causal, batch_first, k.shape[1 if batch_first else 0])


def attend(
    laid: tuple[Tensor, Tensor, Tensor, Tensor], out: Tensor, starts: Tensor | None, scale: float, causal: bool,
    batch_first: bool, keys: int, sizes: Sizes = SIZES,
) -> Tensor:  # fmt: skip
    """Attention of what `operands` gives, into `out`; returns the sums."""
    q, k, v, scale_inv = laid
    batch, heads, q_rows, dim = q.shape
    queries = out.shape[1 if batch_first else 0]
    sums = out.new_empty(batch, heads, queries, dtype=torch.float32)
    e4m3 = torch.float8_e4m3fn
    _ATTENTION(
        (triton.cdiv(queries, sizes.rows), batch * heads),
        sizes.warps,
        {
            "q": q.view(e4m3), "k": k.view(e4m3), "v": v.view(e4m3), "scale_inv": scale_inv,
            "starts": sums if starts is None else starts.contiguous(), "out": out, "sums": sums,
            **_strides(out, "o", batch_first), "queries": queries, "keys": keys, "q_rows": q_rows, "k_rows": k.shape[2],
            "heads": heads, "share": heads // k.shape[1], "scale": scale * LOG2E, "CAUSAL": causal,
            "DOCUMENTS": starts is not None, "dim": dim, "ROWS": sizes.rows, "KEYS": sizes.keys,
            "EXPONENT": float(WEIGHT_EXPONENT), "STAGES": sizes.stages,
        },
        True,
    )  # fmt: skip
    return sums
