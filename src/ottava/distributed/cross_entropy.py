"""Cross-entropy of logits whose vocabulary is split over tensor-parallel ranks. The logits are never gathered.

loss[s, b] = log(sum exp logits) - logits[target]         two reductions of a few numbers a token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ottava.distributed.collectives import all_reduce, all_reduce_max, process_group, rank_of, readable, size_of
from ottava.kernels.cross_entropy import fill_gradient_, fill_row_sums_, fixed_sum

REDUCTIONS = ("mean", "sum", "none")


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
    _check_loss(logits, targets, reduction, label_smoothing, vocabulary, total)
    rows = logits.reshape(-1, logits.shape[-1])
    flat = targets.reshape(-1).to(torch.int64)
    ignored = flat == ignore_index
    wrong = ~ignored & ((flat < 0) | (flat >= vocabulary))
    if readable(flat) and bool(wrong.any()):
        raise ValueError(
            f"Target {int(flat[wrong][0])} is outside the vocabulary [0, {vocabulary}) and is not ignore_index={ignore_index}."
        )
    first = rank_of(group) * logits.shape[-1]
    losses = _CrossEntropy.apply(rows, flat, ignored, wrong, group, first, vocabulary, label_smoothing, z_loss)
    if reduction == "none":
        return losses.reshape(targets.shape)
    total_loss = fixed_sum(losses)
    return total_loss if reduction == "sum" else total_loss / (~ignored).sum().clamp(min=1)


def _local_logits(logits: DTensor, group: Any) -> tuple[Tensor, Any]:
    """What torch's ColwiseParallel leaves behind, if its output layout is Shard(-1)."""
    mesh, placements = logits.device_mesh, logits.placements
    if mesh.ndim != 1 or not placements[0].is_shard(logits.dim() - 1) or logits.shape[-1] % mesh.size():
        raise ValueError(
            "Logits that are a DTensor must be split evenly along the last dimension over a mesh of one dimension; got "
            f"placements {placements} of shape {tuple(logits.shape)} on a mesh of shape {tuple(mesh.shape)}."
        )
    return logits.to_local(), mesh if group is None else group


def _check_loss(logits: Tensor, targets: Tensor, reduction: str, smoothing: float, vocabulary: int, total: int) -> None:
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}."
        )
    if targets.is_floating_point() or not logits.is_floating_point():
        raise ValueError(f"Targets must be integers and logits floats, got {targets.dtype} and {logits.dtype}.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {smoothing}.")
    if not 0 < vocabulary <= total:
        raise ValueError(f"vocabulary_size must be between 1 and the {total} logits of all ranks, got {vocabulary}.")


class _CrossEntropy(torch.autograd.Function):
    """logits [T, C] of columns first to first + C -> losses [T].

    With m the row's maximum and s = sum exp(x - m) over all ranks, loss = log s - (x_target - m). All terms are kept relative to m,
    so that logits of 1e4 lose no digits. Backward needs m and s and takes exp(x - m) again: two numbers a token are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignored: Tensor,
        wrong: Tensor,
        group: Any,
        first: int,
        vocabulary: int,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        real = min(max(vocabulary - first, 0), logits.shape[1])  # columns that are not padding
        index = targets - first
        mine = (index >= 0) & (index < real)
        index = index.masked_fill(~mine, 0)
        if real:
            maximum = logits[:, :real].amax(dim=1).to(wide)
        else:
            maximum = torch.full(logits.shape[:1], float("-inf"), dtype=wide, device=logits.device)
        maximum = all_reduce_max(maximum, group)
        # Sum of exponents, shifted target logit, and with smoothing the sum of shifted logits: one collective for all.
        parts = maximum.new_zeros(3 if smoothing else 2, maximum.numel())
        fill_row_sums_(parts, logits[:, :real], maximum, index, mine)
        parts = all_reduce(parts.t().contiguous(), group).t()
        log_sum = parts[0].log()
        loss = log_sum - parts[1]
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - parts[2] / vocabulary)
        if z_loss:
            loss = loss + z_loss * (maximum + log_sum).square()
        ctx.save_for_backward(logits, index, mine, ignored, maximum, parts[0].clone())
        ctx.real, ctx.vocabulary, ctx.smoothing, ctx.z_loss = real, vocabulary, smoothing, z_loss
        return loss.masked_fill(wrong, float("nan")).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """d loss / d x = softmax (1 + 2 z log-sum-exp) - (1 - smoothing) [x is the target] - smoothing / V."""
        logits, index, mine, ignored, maximum, total = ctx.saved_tensors
        real = ctx.real
        out = torch.zeros_like(logits) if real < logits.shape[1] else torch.empty_like(logits)
        factor = grad / total
        if ctx.z_loss:
            factor = factor * (1.0 + 2.0 * ctx.z_loss * (maximum + total.log()))
        at_target = (grad * (1.0 - ctx.smoothing)).masked_fill(~mine, 0.0)
        everywhere = grad * (ctx.smoothing / ctx.vocabulary) if ctx.smoothing else None
        fill_gradient_(out[:, :real], logits[:, :real], maximum, factor, index, at_target, everywhere)
        # Written, not multiplied by 0: a row that is ignored may hold NaN, as attention gives for a padding token.
        out.masked_fill_(ignored[:, None], 0.0)
        return out, None, None, None, None, None, None, None, None
