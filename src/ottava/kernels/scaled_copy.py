"""`ottava::scaled_copy`: a tensor times one number, rounded to another dtype, in one pass over memory.

torch's multiplication into an output of another dtype takes a kernel that reads and writes element by element: 1.0 ms for the 263 million
elements of a head's gradient on an H200, where the memory needs 0.37.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.registry import define


def _scaled_copy(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor, in the dtype of x, rounded to `dtype`. factor: one number, of the dtype of x."""
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def _scaled_copy_fake(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _scaled_copy_cuda(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype is not torch.float32 or factor.dtype is not torch.float32 or not x.is_contiguous() or x.numel() == 0:
        return _scaled_copy(x, factor, dtype)
    from ottava.kernels import scaled_copy_triton

    return scaled_copy_triton.scaled_copy(x, factor, dtype)


scaled_copy = define("scaled_copy", _scaled_copy, _scaled_copy_fake, _scaled_copy_cuda)
