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


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul(a, b)` of matrices; on the CPU by halves, and independent of `torch.set_num_threads`."""
    if a.device.type != "cpu":
        return torch.matmul(a, b)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # takes less than a microsecond
    try:
        return _by_halves(a, b)
    finally:
        torch.set_num_threads(threads)


def _by_halves(a: Tensor, b: Tensor) -> Tensor:
    k = a.shape[1]
    if k <= LEAF or k % 2:
        return torch.matmul(a, b)
    half = k // 2
    return _by_halves(a[:, :half], b[:half]).add_(_by_halves(a[:, half:], b[half:]))
