"""The Triton kernel of `ottava::transpose`: bytes [M, K] -> bytes [K, M], in words of four.

Four bytes of four rows are turned inside registers and whole words are transposed as a tile: Triton 3.6 misplaces bytes of transposed
8-bit tiles (see [Note: halves] in `tile_kernel`), and one byte a thread would use a quarter of the memory's rate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launch, Launcher


@triton.jit
def _turned(w0, w1, w2, w3, B: tl.constexpr):
    """Byte B of four words, as one word."""
    low = ((w0 >> (8 * B)) & 0xFF) | (((w1 >> (8 * B)) & 0xFF) << 8)
    return low | (((w2 >> (8 * B)) & 0xFF) << 16) | (((w3 >> (8 * B)) & 0xFF) << 24)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, M, K, BM: tl.constexpr, BK: tl.constexpr):
    """x_ptr: words [M, K/4]; out_ptr: words [K, M/4]. M, K: in bytes, multiples of 4. BM, BK: words down and across of a tile."""
    i = tl.program_id(1) * BM + tl.arange(0, BM)  # four rows of x: a column of words of the result
    j = tl.program_id(0) * BK + tl.arange(0, BK)  # a column of words of x: four rows of the result
    mask = (4 * i < M)[:, None] & (4 * j < K)[None, :]
    at = x_ptr + (4 * i)[:, None].to(tl.int64) * (K // 4) + j[None, :]
    w0 = tl.load(at, mask=mask, other=0)
    w1 = tl.load(at + K // 4, mask=mask, other=0)
    w2 = tl.load(at + 2 * (K // 4), mask=mask, other=0)
    w3 = tl.load(at + 3 * (K // 4), mask=mask, other=0)
    to = out_ptr + (4 * j)[:, None].to(tl.int64) * (M // 4) + i[None, :]
    turned = tl.trans(mask)
    tl.store(to, tl.trans(_turned(w0, w1, w2, w3, 0)), mask=turned)
    tl.store(to + M // 4, tl.trans(_turned(w0, w1, w2, w3, 1)), mask=turned)
    tl.store(to + 2 * (M // 4), tl.trans(_turned(w0, w1, w2, w3, 2)), mask=turned)
    tl.store(to + 3 * (M // 4), tl.trans(_turned(w0, w1, w2, w3, 3)), mask=turned)


_TRANSPOSE = Launcher(transpose_kernel)
_LAUNCHES: dict[tuple[int, int], Launch] = {}
"""By shape: weights have few."""
MOST_LAUNCHES = 4096


def transpose(data: Tensor) -> Tensor:
    """uint8 [M, K] -> [K, M]; contiguous, on 4-byte boundaries, both sizes multiples of 4 (`fits`)."""
    m, k = data.shape
    out = data.new_empty(k, m)
    launch = _LAUNCHES.get((m, k))
    if launch is None:
        bm, bk = 32, 64
        grid = (triton.cdiv(k, 4 * bk), triton.cdiv(m, 4 * bm))
        launch = _TRANSPOSE.prepare(grid, 4, {"M": m, "K": k, "BM": bm, "BK": bk}, ("x_ptr", "out_ptr"))
        if len(_LAUNCHES) < MOST_LAUNCHES:
            _LAUNCHES[m, k] = launch
    launch(data.view(torch.int32), out.view(torch.int32))
    return out


def fits(data: Tensor) -> bool:
    """Whether the kernel takes it."""
    m, k = data.shape
    aligned = data.data_ptr() % 4 == 0 and data.storage_offset() % 4 == 0  # `view(int32)` wants the latter
    return data.is_contiguous() and aligned and m % 4 == k % 4 == 0 and data.numel() > 0
