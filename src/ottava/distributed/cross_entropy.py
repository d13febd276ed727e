"""Cross-entropy of logits whose vocabulary is split over tensor-parallel ranks. The logits are never gathered.

loss[s, b] = log(sum exp logits) - logits[target]         two reductions of a few numbers a token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ottava.kernels import cross_entropy as arithmetic
from ottava.kernels.head_loss import Terms, columns_of
from ottava.overlap import collectives
from ottava.overlap.collectives import process_group, rank_of, readable, size_of

ops = torch.ops.ottava


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    vocabulary_size: int | None = None,
) -> Tensor:
    """Cross-entropy of logits [..., V/tp], split over `group` along the last dimension, and targets [...], equal on all its ranks.

    Arithmetic is float32 (float64 for float64 logits), in chunks: no second tensor of the logits' size exists in forward.
    label_smoothing as in `torch.nn.functional.cross_entropy`; z_loss adds z_loss * log(sum exp)^2 for each token, which keeps logits
    from drifting. vocabulary_size: logits from here on are padding and count as -inf; by default there is none.
    reduction: "mean" over the tokens that are not ignored (0 if all are), "sum", or "none" (float32 [...], 0 where ignored). The mean
    is over this call's tokens: where data-parallel ranks ignore different numbers of tokens, take the sum and divide by the total.
    A target outside the vocabulary is an error on a CPU, and gives NaN on a GPU.

        >>> logits = torch.zeros(2, 8, requires_grad=True)  # on rank r of tp: columns r V/tp to (r+1) V/tp, and group=mesh["tp"]
        >>> vocab_parallel_cross_entropy(logits, torch.tensor([3, -100]))
        tensor(2.0794, grad_fn=<DivBackward0>)
    """
    if isinstance(logits, DTensor):
        logits, group = _local_logits(logits, group)
    group = process_group(group)
    total = logits.shape[-1] * size_of(group)
    vocabulary = total if vocabulary_size is None else vocabulary_size
    arithmetic.check_shapes(logits, targets)
    arithmetic.check_loss(reduction, label_smoothing, vocabulary, total)
    rows = logits.reshape(-1, logits.shape[-1])
    flat = targets.reshape(-1).to(torch.int64)
    if readable(flat):
        arithmetic.check_targets(flat, ignore_index, vocabulary)
    first = rank_of(group) * logits.shape[-1]
    real = min(max(vocabulary - first, 0), logits.shape[-1])  # columns that are not padding
    kind = _ByKernels if rows.is_cuda else _CrossEntropy
    losses = kind.apply(rows, flat, group, Terms(first, real, vocabulary, ignore_index, label_smoothing, z_loss))
    if reduction == "none":
        return losses.reshape(targets.shape)
    total_loss = arithmetic.fixed_sum(losses)
    return total_loss if reduction == "sum" else total_loss / (flat != ignore_index).sum().clamp(min=1)


def _local_logits(logits: DTensor, group: Any) -> tuple[Tensor, Any]:
    """What torch's ColwiseParallel leaves behind, if its output layout is Shard(-1)."""
    mesh, placements = logits.device_mesh, logits.placements
    if mesh.ndim != 1 or not placements[0].is_shard(logits.dim() - 1) or logits.shape[-1] % mesh.size():
        raise ValueError(
            "Logits that are a DTensor must be split evenly along the last dimension over a mesh of one dimension; got "
            f"placements {placements} of shape {tuple(logits.shape)} on a mesh of shape {tuple(mesh.shape)}."
        )
    return logits.to_local(), mesh if group is None else group


class _ByKernels(torch.autograd.Function):
    """On a GPU: logits are read once in forward; four numbers of each rank and token are kept, and they are read again in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any, terms: Terms) -> Tensor:
        statistics = collectives.all_gather(ops.loss_statistics(logits, targets, *terms)[None], group)
        ctx.save_for_backward(logits, targets, statistics)
        ctx.terms = terms
        return ops.loss_values(statistics, targets, *terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets, statistics = ctx.saved_tensors
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        ops.loss_gradient_(out, logits, statistics, targets, grad, *ctx.terms)
        return out, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """logits [T, C] of columns first to first + C -> losses [T].

    With m the row's maximum and s = sum exp(x - m) over all ranks, loss = log s - (x_target - m). All terms are kept relative to m,
    so that logits of 1e4 lose no digits. Backward needs m and s and takes exp(x - m) again: two numbers a token are kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any, terms: Terms) -> Tensor:
        index, mine = columns_of(targets, terms.first, terms.real)
        maximum = collectives.all_reduce_max(arithmetic.row_maxima(logits[:, : terms.real]), group)
        # Sum of exponents, shifted target logit, and with smoothing the sum of shifted logits: one collective for all.
        parts = maximum.new_zeros(3 if terms.smoothing else 2, maximum.numel())
        arithmetic.fill_row_sums_(parts, logits[:, : terms.real], maximum, index, mine)
        parts = collectives.all_reduce(parts.t().contiguous(), group).t()
        ctx.save_for_backward(logits, targets, index, mine, maximum, parts[0].clone())
        ctx.terms = terms
        return arithmetic.losses_of(parts, maximum, targets, *terms[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets, index, mine, maximum, total = ctx.saved_tensors
        out = torch.empty_like(logits)
        arithmetic.fill_loss_gradient_(out, grad, logits, targets, index, mine, maximum, total, *ctx.terms[1:])
        return out, None, None, None
