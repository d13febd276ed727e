"""A float32 matrix product on the CPU that gives the same bits for any number of threads.

The BLAS behind torch cuts a product differently for 1, 2 or 8 threads: of 1,500 random shapes tried with torch 2.13 (MKL),
most with a contraction of 700 or more, and many with a single row, changed in the last bit with `torch.set_num_threads`.
One thread has one order, so the product itself runs on one thread; everything around it keeps all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul(a, b)`; on the CPU independent of `torch.set_num_threads`. Switching takes less than a microsecond."""
    if a.device.type != "cpu":
        return torch.matmul(a, b)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return torch.matmul(a, b)
    finally:
        torch.set_num_threads(threads)
