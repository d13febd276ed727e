"""The Triton versions of `head_loss.py`; imported only where a CUDA tensor meets them. One program a row of logits.

[Note: lanes] Every lane of a program keeps a maximum and a sum of its own while it walks along the row, so that no lane waits for
another until the row is read; that takes two exponentials an element instead of one, which a memory-bound kernel has time for. Lanes
are joined at the end, always in the same order.

Rows are walked backwards for the gradient: what was read last is what the L2 cache still holds. Offsets of rows are 64-bit, as tokens
times vocabulary exceed 2^31.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.head_loss import LOWEST as _LOWEST
from ottava.kernels.head_loss import Terms
from ottava.kernels.launch import Launcher

LOWEST = tl.constexpr(_LOWEST)
WIDEST = 4096
"""Columns that a program takes at a time, at most."""
PER_WARP = 256
"""Of these a warp takes: 8 a thread, one load of 16 bytes in bf16. The fastest of those tried on an H200."""


@triton.jit
def _row_statistics(row, index, here, real, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    """(maximum, sum of exponents relative to it, logit of column `index` or 0 for -1, sum) of the first `real` of `here` logits at `row`.

    Loads stop at `here`, the width of the logits, not at `real`: widths are padded to what loads of 16 bytes want.
    """
    target = tl.load(row + index, mask=index >= 0, other=0.0).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, here, BLOCK):
        at = start + lanes
        x = tl.load(row + at, mask=at < here, other=float("-inf")).to(tl.float32)
        x = tl.where(at < real, x, float("-inf"))
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
        if SMOOTHED:
            plain += tl.where(at < tl.minimum(here, real), x, 0.0)
    maximum = tl.max(highest, axis=0)
    return maximum, tl.sum(total * tl.exp(highest - maximum), axis=0), target, tl.sum(plain, axis=0)


@triton.jit
def _joined(statistics, row, rows, ranks):
    """The four numbers of a whole row, from those of its parts: statistics [ranks, rows, 4]."""
    maximum = tl.full([], LOWEST, tl.float32)
    for rank in range(ranks):
        maximum = tl.maximum(maximum, tl.load(statistics + (rank * rows + row) * 4))
    total = tl.full([], 0.0, tl.float32)
    target = tl.full([], 0.0, tl.float32)
    plain = tl.full([], 0.0, tl.float32)
    for rank in range(ranks):
        at = statistics + (rank * rows + row) * 4
        total += tl.load(at + 1) * tl.exp(tl.load(at) - maximum)
        target += tl.load(at + 2)
        plain += tl.load(at + 3)
    return maximum, total, target, plain


@triton.jit
def _loss(
    maximum, total, target, plain, word, vocabulary, ignore, smoothing, z_loss, SMOOTHED: tl.constexpr
):  # fmt: skip
    log_sum = tl.log(total)
    loss = log_sum - (target - maximum)
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - (plain / vocabulary - maximum))
    loss += z_loss * (maximum + log_sum) * (maximum + log_sum)
    loss = tl.where((word < 0) | (word >= vocabulary), float("nan"), loss)
    return tl.where(word == ignore, 0.0, loss)


@triton.jit
def _write_gradient(
    out, row, maximum, total, grad, index, here, real, width, vocabulary, smoothing, z_loss, BLOCK: tl.constexpr
):  # fmt: skip
    """At `out`, `width` numbers: the gradient of the row's loss times `grad` for the first `real` of `here` logits at `row`, else 0."""
    factor = grad * (1.0 + 2.0 * z_loss * (maximum + tl.log(total))) / total
    at_target = grad * (1.0 - smoothing)
    everywhere = grad * smoothing / vocabulary
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(width, BLOCK)
    for i in range(blocks):
        at = (blocks - 1 - i) * BLOCK + lanes
        x = tl.load(row + at, mask=at < here, other=float("-inf")).to(tl.float32)
        value = tl.exp(x - maximum) * factor - everywhere
        value = tl.where(at == index, value - at_target, value)
        value = tl.where((at < here) & (at < real), value, 0.0)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _fused_kernel(
    logits, targets, losses, stride, width, real, vocabulary, ignore, smoothing, z_loss,
    SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    word = tl.load(targets + number)
    row = logits + number * stride
    index = tl.where((word >= 0) & (word < real), word, -1).to(tl.int32)
    here = tl.where(word == ignore, 0, width)  # nothing of an ignored row is read
    maximum, total, target, plain = _row_statistics(row, index, here, real, SMOOTHED, BLOCK)
    loss = _loss(maximum, total, target, plain, word, vocabulary, ignore, smoothing, z_loss, SMOOTHED)
    tl.store(losses + number, loss)
    _write_gradient(row, row, maximum, total, 1.0, index, here, real, width, vocabulary, smoothing, z_loss, BLOCK)


@triton.jit
def _statistics_kernel(
    logits, targets, out, stride, width, first, real, ignore, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    word = tl.load(targets + number)
    index = tl.where((word >= first) & (word < first + real) & (word != ignore), word - first, -1).to(tl.int32)
    here = tl.where(word == ignore, 0, width)
    maximum, total, target, plain = _row_statistics(logits + number * stride, index, here, real, SMOOTHED, BLOCK)
    tl.store(out + number * 4, maximum)
    tl.store(out + number * 4 + 1, total)
    tl.store(out + number * 4 + 2, target)
    tl.store(out + number * 4 + 3, plain)


@triton.jit
def _values_kernel(
    statistics, targets, losses, rows, ranks, vocabulary, ignore, smoothing, z_loss, SMOOTHED: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    word = tl.load(targets + number)
    maximum, total, target, plain = _joined(statistics, number, rows, ranks)
    loss = _loss(maximum, total, target, plain, word, vocabulary, ignore, smoothing, z_loss, SMOOTHED)
    tl.store(losses + number, loss)


@triton.jit
def _gradient_kernel(
    out, logits, statistics, targets, grads, rows, ranks, out_stride, stride, width, first, real, vocabulary, ignore, smoothing,
    z_loss, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    word = tl.load(targets + number)
    index = tl.where((word >= first) & (word < first + real), word - first, -1).to(tl.int32)
    here = tl.where(word == ignore, 0, width)
    maximum, total, _, _ = _joined(statistics, number, rows, ranks)
    grad = tl.full([], 1.0, tl.float32)
    if GIVEN:
        grad = tl.load(grads + number)
    _write_gradient(
        out + number * out_stride, logits + number * stride, maximum, total, grad, index, here, real, width, vocabulary, smoothing,
        z_loss, BLOCK,
    )  # fmt: skip


_FUSED = Launcher(_fused_kernel)
_STATISTICS = Launcher(_statistics_kernel)
_VALUES = Launcher(_values_kernel)
_GRADIENT = Launcher(_gradient_kernel)


def _block(width: int) -> int:
    return min(max(triton.next_power_of_2(width), 1024), WIDEST)


def _launch(launcher: Launcher, count: int, block: int, arguments: dict[str, Any]) -> None:
    if count:
        launcher((count,), block // PER_WARP, arguments, fuse_multiply_add=True)


def _rows(logits: Tensor) -> Tensor:
    """Logits whose rows are contiguous; they may lie apart."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def fused_(logits: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """See `head_loss._fused`."""
    if logits.stride(1) != 1:
        raise ValueError(f"Logits that are overwritten must have contiguous rows, got strides {logits.stride()}.")
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    block = _block(logits.shape[1])
    _launch(_FUSED, losses.numel(), block, {
        "logits": logits, "targets": targets.contiguous(), "losses": losses, "stride": logits.stride(0), "width": logits.shape[1],
        "real": terms.real, "vocabulary": terms.vocabulary, "ignore": terms.ignore_index, "smoothing": terms.smoothing,
        "z_loss": terms.z_loss, "SMOOTHED": terms.smoothing != 0, "BLOCK": block,
    })  # fmt: skip
    return losses


def statistics(logits: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """See `head_loss._statistics`."""
    logits = _rows(logits)
    out = torch.empty(logits.shape[0], 4, dtype=torch.float32, device=logits.device)
    block = _block(logits.shape[1])
    _launch(_STATISTICS, out.shape[0], block, {
        "logits": logits, "targets": targets.contiguous(), "out": out, "stride": logits.stride(0), "width": logits.shape[1],
        "first": terms.first, "real": terms.real, "ignore": terms.ignore_index, "SMOOTHED": terms.smoothing != 0, "BLOCK": block,
    })  # fmt: skip
    return out


def values(statistics: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """See `head_loss._values`."""
    ranks, rows = statistics.shape[:2]
    losses = torch.empty(rows, dtype=torch.float32, device=statistics.device)
    _launch(_VALUES, rows, PER_WARP, {
        "statistics": statistics.contiguous(), "targets": targets.contiguous(), "losses": losses, "rows": rows, "ranks": ranks,
        "vocabulary": terms.vocabulary, "ignore": terms.ignore_index, "smoothing": terms.smoothing, "z_loss": terms.z_loss,
        "SMOOTHED": terms.smoothing != 0,
    })  # fmt: skip
    return losses


def gradient_(
    out: Tensor, logits: Tensor, statistics: Tensor, targets: Tensor, grad: Tensor | None, terms: Terms
) -> None:
    """See `head_loss._gradient`."""
    if out.stride(1) != 1:
        raise ValueError(f"A gradient is written into contiguous rows, got strides {out.stride()}.")
    logits, statistics = _rows(logits), statistics.contiguous()
    ranks, rows = statistics.shape[:2]
    block = _block(logits.shape[1])
    _launch(_GRADIENT, rows, block, {
        "out": out, "logits": logits, "statistics": statistics, "targets": targets.contiguous(),
        "grads": statistics if grad is None else grad.float().contiguous(), "rows": rows, "ranks": ranks, "out_stride": out.stride(0),
        "stride": logits.stride(0), "width": logits.shape[1], "first": terms.first, "real": terms.real,
        "vocabulary": terms.vocabulary, "ignore": terms.ignore_index, "smoothing": terms.smoothing, "z_loss": terms.z_loss,
        "GIVEN": grad is not None, "BLOCK": block,
    })  # fmt: skip
