"""A float32 matrix product on the CPU whose bits depend on its operands alone.

The BLAS behind torch cuts a product differently for 1, 2 or 8 threads: of 1,500 random shapes tried with torch 2.13 (MKL),
most with a contraction of 700 or more, and many with a single row, changed in the last bit with `torch.set_num_threads`.
One thread has one order, so the product itself runs on one thread; everything around it keeps all of them.

[Note: sums by halves] A contraction of more than 64 is the sum of the contractions of its halves, and so on. Tensor-parallel ranks
hold such halves (quarters, ...) and add their partial products in the same order (`distributed/collectives.py`): in float32 a layer
that is split over 2, 4 or 8 ranks gives the bits of one process. FP8 makes this worth having: a difference in the last bit of one
number moves another number by a whole FP8 step, and after a few training steps an error can no longer be told from a rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAF = 64  # longest contraction that is left to BLAS. On one core 64 costs about 1.2 of one whole product; 32 costs 2 to 10.


def matmul(a: Tensor, b: Tensor, parts: int = 1) -> Tensor:
    """`torch.matmul(a, b)` of matrices; on the CPU by halves, and independent of `torch.set_num_threads`.

    parts: the contraction is that of several matrices side by side, of which ranks hold halves one by one (gate and up of an MLP).
    """
    if a.device.type != "cpu":
        return torch.matmul(a, b)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # takes less than a microsecond
    try:
        if parts == 1 or a.shape[1] % parts:
            return _by_halves([a], [b])
        return _by_halves(list(a.chunk(parts, 1)), list(b.chunk(parts, 0)))
    finally:
        torch.set_num_threads(threads)


def _by_halves(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Sum over i of a[i] @ b[i], which are contractions of one length."""
    k = a[0].shape[1]
    if k <= LEAF or k % 2:
        out = torch.matmul(a[0], b[0])
        for x, y in zip(a[1:], b[1:]):
            out += torch.matmul(x, y)
        return out
    half = k // 2
    first = _by_halves([x[:, :half] for x in a], [y[:half] for y in b])
    return first.add_(_by_halves([x[:, half:] for x in a], [y[half:] for y in b]))


def sum_rows(x: Tensor) -> Tensor:
    """x [M, N] -> [N]; on the CPU by halves of the rows, as ranks that hold halves of the tokens add theirs."""
    rows, parts = x.shape[0], 1
    if x.device.type != "cpu":
        return x.sum(0)
    while rows > LEAF and rows % 2 == 0:
        rows, parts = rows // 2, parts * 2
    sums = x.reshape(parts, rows, x.shape[1]).sum(1)
    while sums.shape[0] > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]
