"""Triton version of the ops in `attention_documents.py`; imported only where a CUDA tensor meets them.

The keys that a query sees are one run of its row: from the beginning of its document to itself. So the first query of a block says where
the keys of the block begin, the last key of a block where its queries end, and nothing depends on how many documents there are: grids and
shapes are static, which CUDA graphs need. All blocks are masked in one loop: a loop of their own for those that need no mask makes ptxas
put the products of all loops one behind the other (its warning C7515) and spill registers. Heads that share a key are summed by one
program, so its gradient needs no atomics and has a fixed order. Scores, sums and accumulators are float32, operands of products 16 bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launcher

LOG2E = 1.0 / math.log(2.0)
# One compiled kernel for all of these: they steer loops, and no load gets wider by knowing them.
_SIZES = ("length", "heads", "share")


@triton.jit
def _tile(base, first, index, channel, step, length, dim: tl.constexpr):
    """Rows first + index of a matrix [length, dim], whose rows lie `step` apart; index and channel say which way the tile lies."""
    at = base + tl.cast(first, tl.int64) * step + index * step + channel
    return tl.load(at, mask=(first + index < length) & (channel < dim), other=0.0)


@triton.jit
def _forward_blocks(
    out, total, largest, q, k, v, low, high, row, start, k_step, v_step, length, scale,
    dim: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, KEYS)
    channel = tl.arange(0, DIM)
    for first in range(low, high, KEYS):
        keys = _tile(k, first, index[None, :], channel[:, None], k_step, length, dim)  # [DIM, KEYS]
        scores = tl.dot(q, keys) * scale
        column = first + index
        seen = (column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None])
        # Finite: a row that has seen nothing yet holds garbage, which the factor 0 of its first real key takes away.
        scores = tl.where(seen, scores, -1.0e30)
        new = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - new)
        weights = tl.exp2(scores - new[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = _tile(v, first, index[:, None], channel[None, :], v_step, length, dim)  # [KEYS, DIM]
        out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None])
        largest = new
    return out, total, largest


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    q, k, v, out, sums, starts,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, o_batch, o_head, o_step,
    length, heads, share, scale,
    dim: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """out of ROWS queries of one head, and log2 of the sum of their weights."""
    first = tl.program_id(0) * ROWS
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    group = head // share
    q += batch * q_batch + head * q_head
    k += batch * k_batch + group * k_head
    v += batch * v_batch + group * v_head
    out += batch * o_batch + head * o_head
    starts += batch * length
    index = tl.arange(0, ROWS)
    channel = tl.arange(0, DIM)
    row = first + index
    start = tl.load(starts + row, mask=row < length, other=0)
    queries = _tile(q, first, index[:, None], channel[None, :], q_step, length, dim)
    total = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    result = tl.zeros([ROWS, DIM], tl.float32)
    low = tl.load(starts + first) // KEYS * KEYS  # the first query's document begins earliest
    high = tl.minimum(first + ROWS, length)
    result, total, largest = _forward_blocks(
        result, total, largest, queries, k, v, low, high, row, start, k_step, v_step, length, scale, dim, DIM, KEYS
    )
    inside = (row[:, None] < length) & (channel[None, :] < dim)
    at = out + tl.cast(first, tl.int64) * o_step + index[:, None] * o_step + channel[None, :]
    tl.store(at, (result / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(sums + (batch * heads + head) * length + row, largest + tl.log2(total), mask=row < length)


@triton.jit(do_not_specialize=_SIZES)
def _delta_kernel(
    out, grad, delta, o_batch, o_head, o_step, g_batch, g_head, g_step, length, heads,
    dim: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum over channels of out * grad, [b, h, s] float32."""
    first = tl.program_id(0) * ROWS
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    index = tl.arange(0, ROWS)
    channel = tl.arange(0, DIM)
    o = out + batch * o_batch + head * o_head
    g = grad + batch * g_batch + head * g_head
    a = _tile(o, first, index[:, None], channel[None, :], o_step, length, dim).to(tl.float32)
    b = _tile(g, first, index[:, None], channel[None, :], g_step, length, dim).to(tl.float32)
    row = first + index
    tl.store(delta + (batch * heads + head) * length + row, tl.sum(a * b, 1), mask=row < length)


@triton.jit
def _query_blocks(
    dq, q, grad, lse, delta, k, v, low, high, row, start, k_step, v_step, length, scale,
    dim: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, KEYS)
    channel = tl.arange(0, DIM)
    for first in range(low, high, KEYS):
        keys = _tile(k, first, index[None, :], channel[:, None], k_step, length, dim)  # [DIM, KEYS]
        values = _tile(v, first, index[None, :], channel[:, None], v_step, length, dim)  # [DIM, KEYS]
        p = tl.exp2(tl.dot(q, keys) * scale - lse[:, None])
        column = first + index
        p = tl.where((column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None]), p, 0.0)
        ds = p * (tl.dot(grad, values) - delta[:, None])
        dq = tl.dot(ds.to(keys.dtype), tl.trans(keys), dq)
    return dq


@triton.jit(do_not_specialize=_SIZES)
def _query_kernel(
    q, k, v, grad, sums, deltas, starts, dq,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, g_batch, g_head, g_step,
    d_batch, d_head, d_step, length, heads, share, scale, softmax_scale,
    dim: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of ROWS queries of one head."""
    first = tl.program_id(0) * ROWS
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    group = head // share
    q += batch * q_batch + head * q_head
    k += batch * k_batch + group * k_head
    v += batch * v_batch + group * v_head
    grad += batch * g_batch + head * g_head
    dq += batch * d_batch + head * d_head
    starts += batch * length
    index = tl.arange(0, ROWS)
    channel = tl.arange(0, DIM)
    row = first + index
    start = tl.load(starts + row, mask=row < length, other=0)
    lse = tl.load(sums + (batch * heads + head) * length + row, mask=row < length, other=float("inf"))
    delta = tl.load(deltas + (batch * heads + head) * length + row, mask=row < length, other=0.0)
    queries = _tile(q, first, index[:, None], channel[None, :], q_step, length, dim)
    grads = _tile(grad, first, index[:, None], channel[None, :], g_step, length, dim)
    result = tl.zeros([ROWS, DIM], tl.float32)
    low = tl.load(starts + first) // KEYS * KEYS  # the first query's document begins earliest
    high = tl.minimum(first + ROWS, length)
    result = _query_blocks(
        result, queries, grads, lse, delta, k, v, low, high, row, start, k_step, v_step, length, scale, dim, DIM, KEYS
    )
    inside = (row[:, None] < length) & (channel[None, :] < dim)
    at = dq + tl.cast(first, tl.int64) * d_step + index[:, None] * d_step + channel[None, :]
    tl.store(at, (result * softmax_scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _key_blocks(
    dk, dv, k, v, q, grad, sums, deltas, starts, low, high, column, q_step, g_step, length, scale,
    dim: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, ROWS)
    channel = tl.arange(0, DIM)
    for first in range(low, high, ROWS):
        row = first + index
        queries = _tile(q, first, index[None, :], channel[:, None], q_step, length, dim)  # [DIM, ROWS]
        grads = _tile(grad, first, index[:, None], channel[None, :], g_step, length, dim)  # [ROWS, DIM]
        lse = tl.load(
            sums + row, mask=row < length, other=float("inf")
        )  # beyond the end of the row the weights become 0
        delta = tl.load(deltas + row, mask=row < length, other=0.0)
        start = tl.load(starts + row, mask=row < length, other=0)
        p = tl.exp2(tl.dot(k, queries) * scale - lse[None, :])  # [KEYS, ROWS]
        p = tl.where((column[:, None] <= row[None, :]) & (column[:, None] >= start[None, :]), p, 0.0)
        dv = tl.dot(p.to(grads.dtype), grads, dv)
        ds = p * (tl.dot(v, tl.trans(grads)) - delta[None, :])
        dk = tl.dot(ds.to(queries.dtype), tl.trans(queries), dk)
    return dk, dv


@triton.jit(do_not_specialize=_SIZES)
def _key_kernel(
    q, k, v, grad, sums, deltas, starts, ends, dk, dv,
    q_batch, q_head, q_step, k_batch, k_head, k_step, v_batch, v_head, v_step, g_batch, g_head, g_step,
    dk_batch, dk_head, dk_step, dv_batch, dv_head, dv_step, length, heads, share, scale, softmax_scale,
    dim: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of KEYS keys of one group: the sum over the heads that share them."""
    groups = heads // share
    first = tl.program_id(0) * KEYS
    batch = (tl.program_id(1) // groups).to(tl.int64)
    group = (tl.program_id(1) % groups).to(tl.int64)
    k += batch * k_batch + group * k_head
    v += batch * v_batch + group * v_head
    dk += batch * dk_batch + group * dk_head
    dv += batch * dv_batch + group * dv_head
    starts += batch * length
    ends += batch * length
    index = tl.arange(0, KEYS)
    channel = tl.arange(0, DIM)
    column = first + index
    last = tl.minimum(first + KEYS, length)
    keys = _tile(k, first, index[:, None], channel[None, :], k_step, length, dim)
    values = _tile(v, first, index[:, None], channel[None, :], v_step, length, dim)
    low = first // ROWS * ROWS
    high = tl.load(ends + last - 1)  # the last key's document ends latest
    result_k = tl.zeros([KEYS, DIM], tl.float32)
    result_v = tl.zeros([KEYS, DIM], tl.float32)
    for i in range(share):
        head = group * share + i
        q_here = q + batch * q_batch + head * q_head
        g_here = grad + batch * g_batch + head * g_head
        sums_here = sums + (batch * heads + head) * length
        deltas_here = deltas + (batch * heads + head) * length
        result_k, result_v = _key_blocks(
            result_k, result_v, keys, values, q_here, g_here, sums_here, deltas_here, starts,
            low, high, column, q_step, g_step, length, scale, dim, DIM, ROWS,
        )  # fmt: skip
    inside = (column[:, None] < length) & (channel[None, :] < dim)
    base = tl.cast(first, tl.int64)
    at_k = dk + base * dk_step + index[:, None] * dk_step + channel[None, :]
    at_v = dv + base * dv_step + index[:, None] * dv_step + channel[None, :]
    tl.store(at_k, (result_k * softmax_scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(at_v, result_v.to(dv.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------------- launchers


_FORWARD, _DELTA = Launcher(_forward_kernel), Launcher(_delta_kernel)
_QUERY, _KEY = Launcher(_query_kernel), Launcher(_key_kernel)


def _sizes(kernel: str, dim: int) -> tuple[int, int, int]:
    """(queries, keys, warps) of a block of `kernel`, "forward", "query" or "key", for heads of `dim` channels.

    The long side stays with a program, the short one passes by in three stages: 164 KiB of shared memory at 128 channels.
    """
    if dim > 128:
        return (32, 64, 8) if kernel == "key" else (64, 32, 4)
    if kernel == "key":
        return 64, 128, 8
    return 128, 64, 4 if kernel == "forward" and dim <= 64 else 8


def _rowed(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor, name: str, batch_first: bool) -> dict[str, int]:
    """Of [b, s, h, d] or [s, b, h, d]."""
    batch, step = (0, 1) if batch_first else (1, 0)
    return {f"{name}_batch": x.stride(batch), f"{name}_head": x.stride(2), f"{name}_step": x.stride(step)}


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, scale: float, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """See `attention_documents._document_attention`."""
    q, k, v = _rowed(q), _rowed(k), _rowed(v)
    batch, length = starts.shape
    heads, dim = q.shape[2:]
    out = q.new_empty(q.shape)
    sums = q.new_empty(batch, heads, length, dtype=torch.float32)
    if out.numel() == 0:
        return out, sums
    rows, keys, warps = _sizes("forward", dim)
    _FORWARD(
        (triton.cdiv(length, rows), batch * heads),
        warps,
        {
            "q": q, "k": k, "v": v, "out": out, "sums": sums, "starts": starts.contiguous(),
            **_strides(q, "q", batch_first), **_strides(k, "k", batch_first), **_strides(v, "v", batch_first),
            **_strides(out, "o", batch_first), "length": length, "heads": heads, "share": heads // k.shape[2],
            "scale": scale * LOG2E, "dim": dim, "DIM": triton.next_power_of_2(dim), "ROWS": rows, "KEYS": keys,
        },
        True,
    )  # fmt: skip
    return out, sums


def document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, ends: Tensor,
    scale: float, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `attention_documents._document_attention_backward`."""
    grad, q, k, v = _rowed(grad), _rowed(q), _rowed(k), _rowed(v)
    batch, length = starts.shape
    heads, dim = q.shape[2:]
    groups = k.shape[2]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if q.numel() == 0:
        return dq, dk, dv
    width = triton.next_power_of_2(dim)
    deltas = torch.empty_like(sums)
    _DELTA(
        (triton.cdiv(length, 64), batch * heads),
        4,
        {
            "out": out, "grad": grad, "delta": deltas, **_strides(out, "o", batch_first), **_strides(grad, "g", batch_first),
            "length": length, "heads": heads, "dim": dim, "DIM": width, "ROWS": 64,
        },
        True,
    )  # fmt: skip
    common = {
        "q": q, "k": k, "v": v, "grad": grad, "sums": sums, "deltas": deltas, "starts": starts.contiguous(),
        **_strides(q, "q", batch_first), **_strides(k, "k", batch_first), **_strides(v, "v", batch_first),
        **_strides(grad, "g", batch_first), "length": length, "heads": heads, "share": heads // groups,
        "scale": scale * LOG2E, "softmax_scale": scale, "dim": dim, "DIM": width,
    }  # fmt: skip
    rows, keys, warps = _sizes("key", dim)
    own = {"ends": ends.contiguous(), "dk": dk, "dv": dv, "ROWS": rows, "KEYS": keys}
    own |= {**_strides(dk, "dk", batch_first), **_strides(dv, "dv", batch_first)}
    _KEY((triton.cdiv(length, keys), batch * groups), warps, common | own, True)
    rows, keys, warps = _sizes("query", dim)
    own = {"dq": dq, "ROWS": rows, "KEYS": keys, **_strides(dq, "d", batch_first)}
    _QUERY((triton.cdiv(length, rows), batch * heads), warps, common | own, True)
    return dq, dk, dv
