"""Grouped products in one launch: `out[rows of g] = A[g] @ B[g].T` for every group g, of FP8 bytes with scales or of 16-bit values.

Groups have their own numbers of rows and contractions and lie anywhere in memory: nothing is copied together. A small table on the
device says where (one row a group), and a program finds the group of its tile in it.

Speed: not tuned; tiles are those that Hopper's FP8 and 16-bit units fill (128 bytes of the contraction a step).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launcher

TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
"""Elements that the kernel multiplies."""
ALIGNMENT = 16  # bytes: where every row (or column, whichever is contiguous) of an operand must start; the widest load


class Side(NamedTuple):
    """One operand of every group. data[g]: [rows, k] in one of `TYPES`; one of its strides is 1, in all groups the same one.

    See `fits`.
    """

    data: list[Tensor]
    scale_inv: list[Tensor] | None = None
    """float32 of each group: [1]; or [ceil(rows / block_rows), ceil(k / 128)]."""
    block_rows: int = 0
    """Rows that share a scale, 1 or 128; 0: there is one scale a group, or none."""


class _Row(NamedTuple):
    """What the kernel knows of one group: a row of the table, as int64. Addresses are of bytes, strides of elements."""

    first_tile: int
    m: int
    k: int
    first_row: int
    """Where the group's rows begin in the output."""
    a: int
    a_stride: int
    """Between rows of A, or between columns where those are not adjacent."""
    a_scale: int
    a_scale_row: int
    a_scale_column: int
    b: int
    b_stride: int
    b_scale: int
    b_scale_row: int
    b_scale_column: int
    bias: int


COLUMNS = tl.constexpr(len(_Row._fields))


@triton.jit
def _grouped_kernel(
    table_ptr, out_ptr, N, GROUPS,
    A_TYPE: tl.constexpr, B_TYPE: tl.constexpr, BIAS_TYPE: tl.constexpr, A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr,
    A_BLOCK_ROWS: tl.constexpr, B_BLOCK_ROWS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, K_MULTIPLE: tl.constexpr, STRIDE_MULTIPLE: tl.constexpr, MAX_GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program a tile [BM, BN] of the output. A_ALONG_K: elements of A that are next in k are next in memory."""
    tile = tl.program_id(0)
    groups = tl.arange(0, MAX_GROUPS)
    firsts = tl.load(table_ptr + groups * COLUMNS, mask=groups < GROUPS, other=0x7FFFFFFFFFFFFFF)
    row = table_ptr + (tl.sum((firsts <= tile).to(tl.int32)) - 1) * COLUMNS
    within = tile - tl.load(row).to(tl.int32)
    M = tl.load(row + 1).to(tl.int32)
    K = tl.multiple_of(tl.load(row + 2).to(tl.int32), K_MULTIPLE)
    first_row = tl.load(row + 3)
    a_ptr = tl.load(row + 4).to(tl.pointer_type(A_TYPE))
    a_stride = tl.multiple_of(tl.load(row + 5), STRIDE_MULTIPLE)
    b_ptr = tl.load(row + 9).to(tl.pointer_type(B_TYPE))
    b_stride = tl.multiple_of(tl.load(row + 10), STRIDE_MULTIPLE)
    a_ptr, b_ptr = tl.multiple_of(a_ptr, 16), tl.multiple_of(b_ptr, 16)

    # Tiles that share columns of B follow one another: B, the weights, is read once, A from the cache.
    tiles_m = tl.cdiv(M, BM)
    row0, col0 = (within % tiles_m) * BM, (within // tiles_m) * BN
    rm, rn, rk = row0 + tl.arange(0, BM), col0 + tl.arange(0, BN), tl.arange(0, BK)
    # Rows beyond the edge read row 0 instead; what they give is not stored. Where rows are next to one another in memory they are
    # masked: the compiler must see that they are, to load several at once.
    am, bn = tl.where(rm < M, rm, 0), tl.where(rn < N, rn, 0)
    if A_ALONG_K:
        a_at = a_ptr + am[:, None].to(tl.int64) * a_stride + rk[None, :]
    else:
        a_at = a_ptr + rm[:, None] + rk[None, :].to(tl.int64) * a_stride
        a_inside = (rm < tl.multiple_of(M, STRIDE_MULTIPLE))[:, None]
    if B_ALONG_K:
        b_at = b_ptr + bn[None, :].to(tl.int64) * b_stride + rk[:, None]
    else:
        b_at = b_ptr + rn[None, :] + rk[:, None].to(tl.int64) * b_stride
        b_inside = (rn < tl.multiple_of(N, STRIDE_MULTIPLE))[None, :]
    BLOCKED: tl.constexpr = A_BLOCK_ROWS > 0
    if SCALED:
        a_scale_ptr = tl.load(row + 6).to(tl.pointer_type(tl.float32))
        b_scale_ptr = tl.load(row + 11).to(tl.pointer_type(tl.float32))
    if BLOCKED:
        a_scale_at = a_scale_ptr + (am // A_BLOCK_ROWS).to(tl.int64) * tl.load(row + 7)
        b_scale_at = b_scale_ptr + (bn // B_BLOCK_ROWS).to(tl.int64) * tl.load(row + 12)
        a_scale_column, b_scale_column = tl.load(row + 8), tl.load(row + 13)

    total = tl.zeros([BM, BN], tl.float32)
    for step in range(tl.cdiv(K, BK)):
        left = K - step * BK
        if not A_ALONG_K:
            a = tl.load(a_at, mask=a_inside & (rk < left)[None, :], other=0.0)
        elif EVEN_K:
            a = tl.load(a_at)
        else:
            a = tl.load(a_at, mask=(rk < left)[None, :], other=0.0)
        if not B_ALONG_K:
            b = tl.load(b_at, mask=b_inside & (rk < left)[:, None], other=0.0)
        elif EVEN_K:
            b = tl.load(b_at)
        else:
            b = tl.load(b_at, mask=(rk < left)[:, None], other=0.0)
        if BLOCKED:
            scale = tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :]
            total += tl.dot(a, b) * scale
            a_scale_at += a_scale_column
            b_scale_at += b_scale_column
        elif SPLIT:  # float32 takes over after every step; the units alone keep about 14 bits of a sum of FP8 products
            total = tl.dot(a, b, total, max_num_imprecise_acc=BK)
        else:
            total = tl.dot(a, b, total)
        a_at += BK if A_ALONG_K else BK * a_stride
        b_at += BK if B_ALONG_K else BK * b_stride
    if SCALED and not BLOCKED:
        total *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    if BIAS:
        bias_ptr = tl.load(row + 14).to(tl.pointer_type(BIAS_TYPE))
        total += tl.load(bias_ptr + bn).to(tl.float32)[None, :]
    at = out_ptr + (first_row + rm[:, None].to(tl.int64)) * N + rn[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


_GROUPED = Launcher(_grouped_kernel)
_BIAS_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def multiply(a: Side, b: Side, biases: list[Tensor], out_dtype: torch.dtype, split_accumulator: bool) -> Tensor:
    """The rows of a[g] @ b[g].T + biases[g] of all groups under one another: [sum of rows of a, rows of b]."""
    n, element = b.data[0].shape[0], a.data[0].dtype
    bits8, aligned = element.itemsize == 1, ALIGNMENT // element.itemsize
    sizes = [(x.shape[0], x.shape[1]) for x in a.data]
    out = a.data[0].new_empty(sum(m for m, _ in sizes), n, dtype=out_dtype)
    bm, bn, bk = 64 if max(m for m, _ in sizes) <= 64 else 128, 128, 128 if bits8 else 64
    table, tiles = _table(a, b, biases, bm, bn)
    if tiles:
        _GROUPED(
            (tiles,),
            4 if bm == 64 else 8,
            {
                "table_ptr": _on(table, out.device), "out_ptr": out, "N": n, "GROUPS": len(sizes),
                "A_TYPE": TYPES[element], "B_TYPE": TYPES[b.data[0].dtype],
                "BIAS_TYPE": _BIAS_TYPES[biases[0].dtype] if biases else tl.float32,
                "A_ALONG_K": _along_k(a), "B_ALONG_K": _along_k(b),
                "A_BLOCK_ROWS": a.block_rows, "B_BLOCK_ROWS": b.block_rows, "SCALED": a.scale_inv is not None,
                "BIAS": bool(biases), "SPLIT": split_accumulator and bits8, "EVEN_K": all(k % bk == 0 for _, k in sizes),
                "K_MULTIPLE": 1 if any(k % aligned for _, k in sizes) else aligned, "STRIDE_MULTIPLE": aligned,
                "MAX_GROUPS": triton.next_power_of_2(len(sizes)), "BM": bm, "BN": bn, "BK": bk,
            },
            fuse_multiply_add=True,
        )  # fmt: skip
    return out


def fits(x: Tensor) -> bool:
    """Whether the kernel reads an operand [rows, k] as it lies in memory. Rows of FP8 bytes may have to be padded."""
    along_k = x.stride(1) == 1
    size = x.element_size()
    return (
        x.dtype in TYPES
        and (along_k or (x.stride(0) == 1 and x.shape[0] * size % ALIGNMENT == 0))
        and x.stride(0 if along_k else 1) * size % ALIGNMENT == 0
        and x.data_ptr() % ALIGNMENT == 0
    )


def _along_k(side: Side) -> bool:
    return all(x.stride(1) == 1 for x in side.data)


def _table(a: Side, b: Side, biases: list[Tensor], bm: int, bn: int) -> tuple[Tensor, int]:
    """(int64 [groups, COLUMNS] on the CPU, number of tiles)."""
    n, tile, first_row = b.data[0].shape[0], 0, 0
    rows = []
    for g, x in enumerate(a.data):
        m, k = x.shape
        bias = biases[g].data_ptr() if biases else 0
        rows.append((tile, m, k, first_row, *_place(a, g), *_place(b, g), bias))  # a `_Row`
        tile += triton.cdiv(m, bm) * triton.cdiv(n, bn)
        first_row += m
    return torch.tensor(rows, dtype=torch.int64), tile


def _place(side: Side, g: int) -> tuple[int, ...]:
    """Address, stride, and the address and both strides of the scales."""
    x = side.data[g]
    place = (x.data_ptr(), x.stride(0) if _along_k(side) else x.stride(1))
    if side.scale_inv is None:
        return (*place, 0, 0, 0)
    scale = side.scale_inv[g]
    return (*place, scale.data_ptr(), *(scale.stride() if side.block_rows else (0, 0)))


def _on(table: Tensor, device: torch.device) -> Tensor:
    """On `device`, without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
