"""The arithmetic of cross-entropy on one rank's columns of the logits, some rows at a time; `distributed.cross_entropy` adds up the ranks.

Sums have one order for any number of threads, and that of ranks which hold halves of the columns (`fixed_order.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.fixed_order import LEAF

# Elements of logits that are worked on in float32 at a time: 4 MiB stay in a CPU's cache, 128 MiB keep a GPU busy.
CHUNK = {"cpu": 2**20, "cuda": 2**25}


REDUCTIONS = ("mean", "sum", "none")


def check_shapes(logits: Tensor, targets: Tensor) -> None:
    """logits [..., V] and targets [...]."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}."
        )
    if targets.is_floating_point() or not logits.is_floating_point():
        raise ValueError(f"Targets must be integers and logits floats, got {targets.dtype} and {logits.dtype}.")


def check_loss(reduction: str, smoothing: float, vocabulary: int, total: int) -> None:
    """total: logits of all ranks, `vocabulary` of which are not padding."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {smoothing}.")
    if not 0 < vocabulary <= total:
        raise ValueError(f"vocabulary_size must be between 1 and the {total} logits of all ranks, got {vocabulary}.")


def check_targets(targets: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Reads the targets: for those on a CPU."""
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if bool(wrong.any()):
        raise ValueError(
            f"Target {int(targets[wrong][0])} is outside the vocabulary [0, {vocabulary}) and is not ignore_index={ignore_index}."
        )


def fixed_sum(x: Tensor) -> Tensor:
    """Sum of a vector. torch cuts a sum with ONE result by the number of threads, so two results are taken and added."""
    halves = torch.nn.functional.pad(x, (0, x.numel() % 2)).view(2, -1).sum(dim=1)
    return halves[0] + halves[1]


def _row_sums(x: Tensor) -> Tensor:
    """[r, c] -> [r]: by halves of the columns, as ranks add their parts (`kernels/fixed_order.py`), for any number of threads."""
    width, parts = x.shape[1], 1
    while width > LEAF and width % 2 == 0:
        width, parts = width // 2, parts * 2
    sums = x.reshape(x.shape[0] * parts, width).sum(dim=1) if x.shape[0] * parts > 1 else fixed_sum(x[0])[None]
    sums = sums.view(-1, parts)
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


def chunks_of_rows(logits: Tensor) -> list[slice]:
    rows = max(CHUNK.get(logits.device.type, CHUNK["cpu"]) // max(logits.shape[1], 1), 1)
    return [slice(i, min(i + rows, logits.shape[0])) for i in range(0, logits.shape[0], rows)]


def fill_row_sums_(parts: Tensor, logits: Tensor, maximum: Tensor, index: Tensor, mine: Tensor) -> None:
    """parts [2 or 3, T], of logits [T, C] relative to the rows' maxima [T]: sum of exponents; the logit of the target, which is column
    `index` where `mine`, else 0; and, if wanted, the sum."""
    for rows in chunks_of_rows(logits):
        shifted = logits[rows].to(maximum.dtype, copy=True).sub_(maximum[rows, None])
        if logits.shape[1]:
            target = shifted.gather(1, index[rows, None])[:, 0]
            parts[1, rows] = target.masked_fill(~mine[rows], 0.0)
        if parts.shape[0] > 2:
            parts[2, rows] = _row_sums(shifted)
        parts[0, rows] = _row_sums(shifted.exp_())


def row_maxima(logits: Tensor) -> Tensor:
    """Of each row [T], in float32 or wider; -inf where there are no columns."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[1]:
        return logits.amax(dim=1).to(wide)
    return torch.full(logits.shape[:1], float("-inf"), dtype=wide, device=logits.device)


def losses_of(
    parts: Tensor, maximum: Tensor, targets: Tensor, vocabulary: int, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    """Losses [T] from what `fill_row_sums_` gives, of all ranks: 0 where a target is ignored, NaN where it is outside the vocabulary."""
    ignored = targets == ignore_index
    wrong = ~ignored & ((targets < 0) | (targets >= vocabulary))
    log_sum = parts[0].log()
    loss = log_sum - parts[1]
    if smoothing:
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - parts[2] / vocabulary)
    if z_loss:
        loss = loss + z_loss * (maximum + log_sum).square()
    return loss.masked_fill(wrong, float("nan")).masked_fill(ignored, 0.0)


def fill_loss_gradient_(
    out: Tensor,
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    index: Tensor,
    mine: Tensor,
    maximum: Tensor,
    total: Tensor,
    real: int,
    vocabulary: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """out [T, V/tp] = grad [T] times d loss / d x = softmax (1 + 2 z log-sum-exp) - (1 - smoothing) [x is the target] - smoothing / V; 0 in
    padding and where ignored. It may be `logits` itself."""
    factor = grad / total
    if z_loss:
        factor = factor * (1.0 + 2.0 * z_loss * (maximum + total.log()))
    at_target = (grad * (1.0 - smoothing)).masked_fill(~mine, 0.0)
    everywhere = grad * (smoothing / vocabulary) if smoothing else None
    fill_gradient_(out[:, :real], logits[:, :real], maximum, factor, index, at_target, everywhere)
    out[:, real:] = 0.0
    # Written, not multiplied by 0: a row that is ignored may hold NaN, as attention gives for a padding token.
    out.masked_fill_((targets == ignore_index)[:, None], 0.0)


def fill_gradient_(
    out: Tensor,
    logits: Tensor,
    maximum: Tensor,
    factor: Tensor,
    index: Tensor,
    at_target: Tensor,
    everywhere: Tensor | None,
) -> None:
    """out [T, C] = exp(logits - maximum) * factor, less `everywhere` [T] in every column and `at_target` [T] in column `index` [T]."""
    for rows in chunks_of_rows(logits):
        p = logits[rows].to(maximum.dtype, copy=True).sub_(maximum[rows, None]).exp_()
        p.mul_(factor[rows, None])
        if everywhere is not None:
            p.sub_(everywhere[rows, None])
        if logits.shape[1]:
            where = index[rows, None]
            p.scatter_(1, where, p.gather(1, where) - at_target[rows, None])
        out[rows] = p
