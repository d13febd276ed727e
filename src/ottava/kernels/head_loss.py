"""Cross-entropy by kernels: `ottava::loss_fused_` for whole rows of logits, and three ops for rows that are split over ranks.

    loss_fused_      logits [T, V] -> losses [T]; the gradient of each loss takes the place of its logits
    loss_statistics  logits [T, V/tp] of this rank -> [T, 4]: four numbers a token, which the ranks exchange
    loss_values      the ranks' numbers [tp, T, 4] -> losses [T]
    loss_gradient_   the same and logits -> the gradient of this rank's logits

On a GPU a row is read once for its maximum, its sum of exponents and (with label smoothing) its sum, and once more, mostly from the L2
cache, for the gradient that is written over it. Losses are float32, gradients have the logits' dtype; the order of all sums is fixed. It
is not that of `cross_entropy.py`, which CPU meshes compare themselves by.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels.cross_entropy import chunks_of_rows, fill_loss_gradient_
from ottava.kernels.registry import define

LOWEST = -3.0e38
"""The maximum of no logits: finite, so that nothing becomes inf - inf, and below every logit that has an exponent."""


class Terms(NamedTuple):
    """What a loss is made of, as all ops here take it behind their tensors.

    first: the vocabulary index of this rank's first column; real: how many of its columns are vocabulary, not padding; vocabulary: real
    columns of all ranks; smoothing and z_loss as in `vocab_parallel_cross_entropy`.
    """

    first: int
    real: int
    vocabulary: int
    ignore_index: int
    smoothing: float
    z_loss: float


# ------------------------------------------------------------------------------------------------------------- reference


def columns_of(targets: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """(the targets' columns here, 0 for those elsewhere; which are here)."""
    index = targets - first
    mine = (index >= 0) & (index < real)
    return index.masked_fill(~mine, 0), mine


def _statistics(
    logits: Tensor,
    targets: Tensor,
    first: int,
    real: int,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    """[T, 4]: maximum, sum of exponents relative to it, the target's logit (0 if elsewhere), sum (0 without smoothing).

    An ignored row is not looked at: (LOWEST, 0, 0, 0).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    out = torch.zeros(logits.shape[0], 4, dtype=wide, device=logits.device)
    out[:, 0] = LOWEST
    index, mine = columns_of(targets, first, real)
    for rows in chunks_of_rows(logits) if real else ():
        x = logits[rows, :real].to(wide)
        maximum = x.amax(dim=1).clamp(min=LOWEST)
        out[rows, 0] = maximum
        out[rows, 2] = x.gather(1, index[rows, None])[:, 0].masked_fill(~mine[rows], 0.0)
        if smoothing:
            out[rows, 3] = x.sum(dim=1)
        out[rows, 1] = (x - maximum[:, None]).exp().sum(dim=1)
    ignored = targets == ignore_index
    nothing = torch.tensor([LOWEST, 0.0, 0.0, 0.0], dtype=wide, device=logits.device)
    return torch.where(ignored[:, None], nothing, out)


def _all_ranks(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[tp, T, 4] -> the same four numbers [T] of whole rows."""
    maximum = statistics[:, :, 0].amax(dim=0)
    total = (statistics[:, :, 1] * (statistics[:, :, 0] - maximum).exp()).sum(dim=0)
    return maximum, total, statistics[:, :, 2].sum(dim=0), statistics[:, :, 3].sum(dim=0)


def _values(
    statistics: Tensor,
    targets: Tensor,
    first: int,
    real: int,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    """losses [T]: 0 where ignored, NaN where the target is outside the vocabulary."""
    maximum, total, target, plain = _all_ranks(statistics)
    log_sum = total.log()
    loss = log_sum - (target - maximum)
    if smoothing:
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - (plain / vocabulary - maximum))
    if z_loss:
        loss = loss + z_loss * (maximum + log_sum).square()
    loss = loss.masked_fill((targets < 0) | (targets >= vocabulary), float("nan"))
    return loss.masked_fill(targets == ignore_index, 0.0)


def _gradient(
    out: Tensor,
    logits: Tensor,
    statistics: Tensor,
    targets: Tensor,
    grad: Tensor | None,
    first: int,
    real: int,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """See `cross_entropy.fill_loss_gradient_`."""
    maximum, total, _, _ = _all_ranks(statistics)
    grad = torch.ones_like(total) if grad is None else grad.to(total.dtype)
    index, mine = columns_of(targets, first, real)
    fill_loss_gradient_(
        out, grad, logits, targets, index, mine, maximum, total, real, vocabulary, ignore_index, smoothing, z_loss
    )


def _fused(
    logits: Tensor,
    targets: Tensor,
    first: int,
    real: int,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    terms = (first, real, vocabulary, ignore_index, smoothing, z_loss)
    statistics = _statistics(logits, targets, *terms)[None]
    losses = _values(statistics, targets, *terms)
    _gradient(logits, logits, statistics, targets, None, *terms)
    return losses


# ------------------------------------------------------------------------------------------------------------------ CUDA


def _statistics_cuda(logits: Tensor, targets: Tensor, *terms: int | float) -> Tensor:
    if logits.dtype is torch.float64:
        return _statistics(logits, targets, *terms)  # type: ignore[arg-type]
    from ottava.kernels import head_loss_triton

    return head_loss_triton.statistics(logits, targets, Terms(*terms))  # type: ignore[arg-type]


def _values_cuda(statistics: Tensor, targets: Tensor, *terms: int | float) -> Tensor:
    if statistics.dtype is torch.float64:
        return _values(statistics, targets, *terms)  # type: ignore[arg-type]
    from ottava.kernels import head_loss_triton

    return head_loss_triton.values(statistics, targets, Terms(*terms))  # type: ignore[arg-type]


def _gradient_cuda(
    out: Tensor, logits: Tensor, statistics: Tensor, targets: Tensor, grad: Tensor | None, *terms: int | float
) -> None:
    if logits.dtype is torch.float64:
        return _gradient(out, logits, statistics, targets, grad, *terms)  # type: ignore[arg-type]
    from ottava.kernels import head_loss_triton

    head_loss_triton.gradient_(out, logits, statistics, targets, grad, Terms(*terms))  # type: ignore[arg-type]
    return None


def _fused_cuda(logits: Tensor, targets: Tensor, *terms: int | float) -> Tensor:
    if logits.dtype is torch.float64:
        return _fused(logits, targets, *terms)  # type: ignore[arg-type]
    from ottava.kernels import head_loss_triton

    return head_loss_triton.fused_(logits, targets, Terms(*terms))  # type: ignore[arg-type]


def _wide(logits: Tensor, *shape: int) -> Tensor:
    return logits.new_empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32))


loss_statistics = define(
    "loss_statistics", _statistics, lambda logits, *_: _wide(logits, logits.shape[0], 4), _statistics_cuda
)
loss_values = define(
    "loss_values", _values, lambda statistics, *_: statistics.new_empty(statistics.shape[1]), _values_cuda
)
loss_gradient_ = define("loss_gradient_", _gradient, lambda *_: None, _gradient_cuda, mutates=("out",))
loss_fused_ = define(
    "loss_fused_", _fused, lambda logits, *_: _wide(logits, logits.shape[0]), _fused_cuda, mutates=("logits",)
)


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [m, n] += a [m, k] @ b [k, n], in the dtype of out: float32 for bf16 operands, whose product is not rounded before."""
    if not out.is_cuda:
        out.add_(torch.ops.ottava.mm(a, b.t(), None, out.dtype))
    elif out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out)
    elif _adds_in_float32(out.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(torch.mm(a, b, out_dtype=out.dtype))


@functools.cache
def _adds_in_float32(device: torch.device) -> bool:
    """Whether this torch's addmm adds a product of bf16 matrices to a float32 one. Earlier ones want all three in bf16."""
    out, a = (
        torch.zeros(16, 16, dtype=torch.float32, device=device),
        torch.ones(16, 16, dtype=torch.bfloat16, device=device),
    )
    try:
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return True
