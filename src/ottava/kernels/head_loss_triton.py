"""The Triton versions of `head_loss.py`; imported only where a CUDA tensor meets them. One program a row of logits.

[Note: lanes] A row is walked in blocks [lanes, EACH]. Every lane keeps a maximum and a sum of its own, so that no lane waits for another
until the row is read; EACH neighbours that a thread holds have one maximum, so that a logit takes one exponential and not two. Lanes are
joined at the end, always in the same order. Blocks without an edge in them are walked without masks, and the target, which is one logit of
a hundred thousand, is corrected at the end instead of being looked for all along.

Rows are walked backwards for the gradient: what was read last is what the L2 cache still holds. Programs are so large that a processor
has one or two of them: rows that are being walked have to stay in that cache. Offsets of rows are 64-bit, as tokens times vocabulary exceed
2^31.
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
LOG2_E = tl.constexpr(1.4426950408889634)
WIDEST = 16384
"""Columns that a program takes at a time, at most."""
EACH = 8
"""Of these a lane takes: what a thread loads at once in bf16, so that it asks no other for their maximum."""
PER_WARP = 512
"""Of these a warp takes."""


@triton.jit
def _exp2(x):
    """2^x, to two ulp, and 0 where that is subnormal."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp(x):
    """e^x."""
    return _exp2(x * LOG2_E)


@triton.jit
def _columns(LANES: tl.constexpr, EACH: tl.constexpr):
    """int32 [LANES, EACH]: those of the first block."""
    return tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def _statistics_with(x, highest, total):
    """A lane's maximum and sum of exponents relative to it, with those of a block more."""
    higher = tl.maximum(highest, tl.max(x, axis=1))
    shift = tl.maximum(higher, -2.0e38) * LOG2_E  # finite, also where there was nothing but -inf
    return higher, total * _exp(highest - higher) + tl.sum(_exp2(x * LOG2_E - shift[:, None]), axis=1)


@triton.jit
def _row_statistics(row, index, here, SMOOTHED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """(maximum, sum of exponents relative to it, logit of column `index` or 0 for -1, sum) of the `here` logits at `row`."""
    BLOCK: tl.constexpr = LANES * EACH
    target = tl.load(row + index, mask=index >= 0, other=0.0).to(tl.float32)
    columns = _columns(LANES, EACH)
    highest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    plain = tl.zeros([LANES, EACH], tl.float32)
    edge = here // BLOCK * BLOCK
    for start in range(0, edge, BLOCK):
        x = tl.load(row + start + columns).to(tl.float32)
        highest, total = _statistics_with(x, highest, total)
        if SMOOTHED:
            plain += x
    if edge < here:
        inside = edge + columns < here
        x = tl.load(row + edge + columns, mask=inside, other=float("-inf")).to(tl.float32)
        highest, total = _statistics_with(x, highest, total)
        if SMOOTHED:
            plain += tl.where(inside, x, 0.0)
    maximum = tl.max(highest, axis=0)
    return maximum, tl.sum(total * _exp(highest - maximum), axis=0), target, tl.sum(plain)


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
    out, row, maximum, total, target, grad, index, here, width, vocabulary, smoothing, z_loss,
    POSITIVE: tl.constexpr, SMOOTHED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """At `out`, `width` numbers: the gradient of the row's loss times `grad` for the `here` logits at `row`, else 0. target: the logit of
    column `index`; -1 if the target is not here. POSITIVE: what exponents are multiplied by is above 0, and so can be added to them."""
    BLOCK: tl.constexpr = LANES * EACH
    dtype = out.dtype.element_ty
    factor = grad * (1.0 + 2.0 * z_loss * (maximum + tl.log(total))) / total
    shift = maximum * -LOG2_E
    if POSITIVE:
        shift += tl.log2(factor)
    everywhere = grad * smoothing / vocabulary
    columns = _columns(LANES, EACH)
    blocks = here // BLOCK
    for start in range(blocks * BLOCK, width, BLOCK):
        inside = start + columns < here
        x = tl.load(row + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        value = tl.where(inside, _exp(x - maximum) * factor - everywhere, 0.0)
        tl.store(out + start + columns, value.to(dtype), mask=start + columns < width)
    for i in range(blocks):
        start = (blocks - 1 - i) * BLOCK
        value = _exp2(tl.load(row + start + columns).to(tl.float32) * LOG2_E + shift)
        if not POSITIVE:
            value *= factor
        if SMOOTHED:
            value -= everywhere
        tl.store(out + start + columns, value.to(dtype))
    if index >= 0:
        tl.debug_barrier()  # this store is to come after that of the whole block
        value = _exp(target - maximum) * factor - everywhere - grad * (1.0 - smoothing)
        tl.store(out + index, value.to(dtype))


@triton.jit
def _fused_kernel(
    logits, targets, losses, stride, width, real, vocabulary, ignore, smoothing, z_loss,
    POSITIVE: tl.constexpr, SMOOTHED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    word = tl.load(targets + number)
    row = logits + number * stride
    here = tl.where(word == ignore, 0, tl.minimum(width, real))  # nothing of an ignored row is read
    index = tl.where((word >= 0) & (word < here), word, -1).to(tl.int32)
    maximum, total, target, plain = _row_statistics(row, index, here, SMOOTHED, LANES, EACH)
    loss = _loss(maximum, total, target, plain, word, vocabulary, ignore, smoothing, z_loss, SMOOTHED)
    tl.store(losses + number, loss)
    _write_gradient(
        row, row, maximum, total, target, 1.0, index, here, width, vocabulary, smoothing, z_loss, POSITIVE, SMOOTHED, LANES, EACH
    )  # fmt: skip


@triton.jit
def _statistics_kernel(
    logits, targets, out, stride, width, first, real, ignore, SMOOTHED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    word = tl.load(targets + number)
    here = tl.where(word == ignore, 0, tl.minimum(width, real))
    index = tl.where((word >= first) & (word < first + here), word - first, -1).to(tl.int32)
    maximum, total, target, plain = _row_statistics(logits + number * stride, index, here, SMOOTHED, LANES, EACH)
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
    z_loss, GIVEN: tl.constexpr, POSITIVE: tl.constexpr, SMOOTHED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    word = tl.load(targets + number)
    row = logits + number * stride
    here = tl.where(word == ignore, 0, tl.minimum(width, real))
    index = tl.where((word >= first) & (word < first + here), word - first, -1).to(tl.int32)
    maximum, total, _, _ = _joined(statistics, number, rows, ranks)
    target = tl.load(row + index, mask=index >= 0, other=0.0).to(tl.float32)
    grad = tl.full([], 1.0, tl.float32)
    if GIVEN:
        grad = tl.load(grads + number)
    _write_gradient(
        out + number * out_stride, row, maximum, total, target, grad, index, here, width, vocabulary, smoothing, z_loss,
        POSITIVE, SMOOTHED, LANES, EACH,
    )  # fmt: skip


_FUSED = Launcher(_fused_kernel)
_STATISTICS = Launcher(_statistics_kernel)
_VALUES = Launcher(_values_kernel)
_GRADIENT = Launcher(_gradient_kernel)


def _lanes(width: int) -> int:
    return min(max(triton.next_power_of_2(width), 1024), WIDEST) // EACH


def _launch(launcher: Launcher, count: int, lanes: int, arguments: dict[str, Any]) -> None:
    if count:
        # A limit above what the compiler would take lets it keep more loads under way.
        registers = 64 if lanes * EACH == WIDEST else None
        launcher((count,), max(lanes * EACH // PER_WARP, 1), arguments, fuse_multiply_add=True, registers=registers)


def _rows(logits: Tensor) -> Tensor:
    """Logits whose rows are contiguous; they may lie apart."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def fused_(logits: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """See `head_loss._fused`."""
    if logits.stride(1) != 1:
        raise ValueError(f"Logits that are overwritten must have contiguous rows, got strides {logits.stride()}.")
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    lanes = _lanes(logits.shape[1])
    _launch(_FUSED, losses.numel(), lanes, {
        "logits": logits, "targets": targets.contiguous(), "losses": losses, "stride": logits.stride(0), "width": logits.shape[1],
        "real": terms.real, "vocabulary": terms.vocabulary, "ignore": terms.ignore_index, "smoothing": terms.smoothing,
        "z_loss": terms.z_loss, "POSITIVE": terms.z_loss == 0, "SMOOTHED": terms.smoothing != 0, "LANES": lanes, "EACH": EACH,
    })  # fmt: skip
    return losses


def statistics(logits: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """See `head_loss._statistics`."""
    logits = _rows(logits)
    out = torch.empty(logits.shape[0], 4, dtype=torch.float32, device=logits.device)
    lanes = _lanes(logits.shape[1])
    _launch(_STATISTICS, out.shape[0], lanes, {
        "logits": logits, "targets": targets.contiguous(), "out": out, "stride": logits.stride(0), "width": logits.shape[1],
        "first": terms.first, "real": terms.real, "ignore": terms.ignore_index, "SMOOTHED": terms.smoothing != 0,
        "LANES": lanes, "EACH": EACH,
    })  # fmt: skip
    return out


def values(statistics: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """See `head_loss._values`."""
    ranks, rows = statistics.shape[:2]
    losses = torch.empty(rows, dtype=torch.float32, device=statistics.device)
    _launch(_VALUES, rows, 1, {
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
    lanes = _lanes(logits.shape[1])
    _launch(_GRADIENT, rows, lanes, {
        "out": out, "logits": logits, "statistics": statistics, "targets": targets.contiguous(),
        "grads": statistics if grad is None else grad.float().contiguous(), "rows": rows, "ranks": ranks, "out_stride": out.stride(0),
        "stride": logits.stride(0), "width": logits.shape[1], "first": terms.first, "real": terms.real,
        "vocabulary": terms.vocabulary, "ignore": terms.ignore_index, "smoothing": terms.smoothing, "z_loss": terms.z_loss,
        "GIVEN": grad is not None, "POSITIVE": grad is None and terms.z_loss == 0, "SMOOTHED": terms.smoothing != 0,
        "LANES": lanes, "EACH": EACH,
    })  # fmt: skip
