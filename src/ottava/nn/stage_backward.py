"""One stage on the way back: its two products, then the way through its producer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ottava.nn.delayed_columns import DelayedTensors
from ottava.nn.dgrad import dgrad
from ottava.nn.operand import Operand, transposed
from ottava.nn.output_gradient import columns_of, rows_of
from ottava.nn.producer import ProducerGradients, has_producer, producer_backward
from ottava.nn.stage import Chain, Gradient, Saved, Stage
from ottava.nn.wgrad import begin_wgrad, wgrad


def products_backward(
    stage: Stage,
    saved: list[Saved],
    grads: list[Gradient],
    scales: list[Tensor | None],
    weights: Callable[[], list[Operand]] | None,
    needs_wgrad: bool,
    extra: Tensor | None,
    accumulators: tuple,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(the gradient of the operands [M, K], that of each group's weight) where they are needed. weights: the weights' side of dgrad, if
    that is.

    The operand of wgrad is gathered under dgrad's product, the input's gradient is summed under wgrad's.
    """
    operands = begin_wgrad(stage, saved, scales, dtype) if needs_wgrad else None
    columns = columns_of(stage, grads) if needs_wgrad else None
    summed, rows = None, [rows_of(stage, grad) for grad in grads]
    if weights is not None:
        summed, rows = dgrad(stage, weights(), grads, rows, extra, dtype, columns)
    elif needs_wgrad and columns is None and not grads[0].gathered:
        rows = [stage.strategy.before_dgrad(row) for row in rows]
    dweight: list[Tensor | None] = [None] * len(grads)
    if operands is not None:
        accumulates = accumulators[0] is not None
        sides = [transposed(row) for row in rows] if columns is None else columns()
        whole = wgrad(stage, sides, operands(), torch.float32 if accumulates else weight_dtype)
        dweight = list(whole.chunk(len(grads))) if len(grads) > 1 else [whole]
        if accumulates:
            dweight = [add(part) for add, part in zip(accumulators, dweight)]
    return None if summed is None else summed(), dweight


def producers_backward(
    chain: Chain,
    start: int,
    dgrads: list[Tensor],
    dnorms: list[Tensor] | None,
    dtotal: Tensor | None,
    saved: list[Saved],
    state: DelayedTensors,
    needs_bias: list[bool],
) -> list[ProducerGradients]:
    """Through the producers of all groups, of which the first is stage number `start`.

    dgrads: the gradient of each group's operand. dnorms, dtotal: those of the norm's output and of its input, where they were returned.
    needs_bias: whether the bias of each group of the stage before wants a gradient.
    """
    if not has_producer(chain.stages[start]):
        return [ProducerGradients(Gradient(dgrad)) for dgrad in dgrads]
    found = []
    for g, (dgrad_of_group, s) in enumerate(zip(dgrads, saved)):
        more = (None if dnorms is None else dnorms[g], dtotal)
        found.append(producer_backward(chain, start + g, dgrad_of_group, more, s, state, needs_bias[g]))
    return found
