"""`ottava::sums_of_squares` and `ottava::norm_and_scale`: the norm of many tensors, read once, and what it takes to clip by it.

>>> squares = torch.ops.ottava.sums_of_squares([torch.ones(3), torch.ones(2, 2)], [0, 1], 2)
>>> squares, torch.ops.ottava.norm_and_scale(squares, 1.0)
(tensor([3., 4.], dtype=torch.float64), tensor([2.6458, 0.3780]))

On a CPU sums are float64: however ranks share the gradients out, the norm is rounded to the same float32, and meshes clip alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.registry import define


def _sums(tensors: list[Tensor], bins: list[int], count: int) -> Tensor:
    """[count]: the sum of squares of the tensors of each bin. bins: of each tensor. All on one device, at least one."""
    squares = torch.zeros(count, dtype=_dtype(tensors), device=tensors[0].device)
    for tensor, chosen in zip(tensors, bins, strict=True):
        squares[chosen] += tensor.to(squares.dtype).square().sum()
    return squares


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    return torch.float64 if tensors[0].device.type == "cpu" else torch.float32


def _sums_cuda(tensors: list[Tensor], bins: list[int], count: int) -> Tensor:
    from ottava.kernels import squares_triton

    if any(t.dtype not in squares_triton.CODES for t in tensors):
        return _sums(tensors, bins, count)
    return squares_triton.sums([t.contiguous() for t in tensors], bins, count)


def _fake_sums(tensors: list[Tensor], bins: list[int], count: int) -> Tensor:
    return tensors[0].new_empty(count, dtype=_dtype(tensors))


sums_of_squares = define("sums_of_squares", _sums, _fake_sums, _sums_cuda)


def _norm_and_scale(squares: Tensor, max_norm: float) -> Tensor:
    """float32 [2]: the norm, and the factor that brings it to `max_norm` at most, as `torch.nn.utils.clip_grad_norm_` has it."""
    norm = squares.sum().sqrt().float()
    return torch.stack([norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)])


def _norm_and_scale_cuda(squares: Tensor, max_norm: float) -> Tensor:
    from ottava.kernels import squares_triton

    return squares_triton.norm_and_scale(squares.contiguous(), max_norm)


norm_and_scale = define(
    "norm_and_scale",
    _norm_and_scale,
    lambda squares, max_norm: squares.new_empty(2, dtype=torch.float32),
    _norm_and_scale_cuda,
)
