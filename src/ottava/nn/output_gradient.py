"""The gradient of a stage's output: whether and how it is quantized, and what the two products of backward take of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.cast import operand_amax
from ottava.nn.delayed_columns import DelayedTensors, column_of, grad_column
from ottava.nn.operand import Operand, columnwise, quantize, rowwise
from ottava.nn.stage import Chain, Gradient, Stage, count_into
from ottava.nn.strategy import ALONE, Later
from ottava.notices import leads, warn_once

ops = torch.ops.ottava


def quantizes_gradient(stage: Stage) -> bool:
    """Whether the stage's products of backward take its output's gradient quantized."""
    return stage.grad is not None and stage.backward == "quantized"


def shares_gradient_amax(stage: Stage) -> bool:
    """Whether ranks agree on its amax before they quantize their parts of it."""
    return (
        stage.strategy.shares_grad_amax
        and not stage.delayed
        and stage.grad is not None
        and stage.grad.needs_tensor_amax
    )


def _blocks_cross_ranks(stage: Stage, grads: list[Gradient]) -> bool:
    """Whether columnwise blocks of a gradient would need tokens of two ranks; of any group: all go the same way."""
    if not stage.strategy.gathers_grad or stage.grad is None or grads[0].value is None:
        return False
    return not all(stage.grad.fills_blocks(grad.value.shape[0]) for grad in grads if grad.value is not None)


def _quantized_gradient(stage: Stage, grad: Gradient, scale: Tensor | None, whole: bool) -> tuple[Gradient, Tensor]:
    """(the gradient of this rank's tokens, quantized; its amax). whole: of all tokens at once, where blocks would cross ranks."""
    scheme, strategy, dy = stage.grad, stage.strategy, grad.value
    assert scheme is not None and dy is not None
    if whole:
        warn_of_crossing_blocks()
        q = quantize(strategy.gather(dy), scheme, scale, None, True, True)
        return Gradient(dy, q, grad.column_sum, gathered=True), q.rowwise_amax
    amax = strategy.share_amax(operand_amax(dy, scheme)) if shares_gradient_amax(stage) else None
    # Bytes with one scale, or one for a square block, can be transposed after they have travelled.
    q = quantize(dy, scheme, scale, amax, True, not (strategy.gathers_grad and scheme.transposable))
    return Gradient(dy, q, grad.column_sum), q.rowwise_amax


def quantize_gradients(chain: Chain, start: int, grads: list[Gradient], state: DelayedTensors) -> list[Gradient]:
    """The gradients of the outputs of all groups, of which the first is stage number `start`, quantized if the stage wants it."""
    whole = _blocks_cross_ranks(chain.stages[start], grads)
    return [_quantize_gradient(chain, number, grad, state, whole) for number, grad in enumerate(grads, start)]


def _quantize_gradient(chain: Chain, number: int, grad: Gradient, state: DelayedTensors, whole: bool) -> Gradient:
    """Quantizes the gradient of the output of stage `number` if the stage wants it, and records its amax."""
    stage = chain.stages[number]
    if not quantizes_gradient(stage):
        return grad
    if grad.quantized is not None:
        amax = grad.quantized.rowwise_amax
    else:
        scale = column_of(state.bwd_scale, grad_column(number)) if stage.delayed else None
        count_into(chain, number, 2)
        grad, amax = _quantized_gradient(stage, grad, scale, whole)
    if stage.delayed:
        ops.record_amax_(state.bwd_history, amax, grad_column(number), chain.owner)
    return grad


def bias_gradient(grad: Gradient) -> Tensor:
    """The sum over its rows [N]."""
    return grad.column_sum if grad.column_sum is not None else ops.column_sum(grad.value)


def rows_of(stage: Stage, grad: Gradient) -> Operand:
    """The gradient's side of dgrad."""
    if grad.quantized is not None:
        assert stage.grad is not None
        return rowwise(grad.quantized, stage.grad)
    assert grad.value is not None
    return Operand(grad.value)


def columns_of(stage: Stage, grads: list[Gradient]) -> Later | None:
    """The gradients' side of wgrad, of all tokens, where it is a copy of its own; None: the rows of all tokens can be transposed."""
    strategy = ALONE if grads[0].gathered else stage.strategy
    if strategy.gathers_grad and stage.grad is not None and stage.grad.transposable:
        return None
    scheme = stage.grad
    copies = [columnwise(grad.quantized, scheme) for grad in grads if grad.quantized is not None and scheme is not None]
    return Later(lambda: strategy.begin_columns(copies)) if copies else None


def warn_of_crossing_blocks() -> None:
    """Ranks whose tokens do not fill blocks gather in high precision what would travel in FP8: right, and twice the bytes."""
    if not torch.compiler.is_compiling() and leads():
        warn_once(
            "ottava: the tokens of a tensor-parallel rank do not fill the recipe's blocks, so inputs of weight gradients, and gradients "
            "of row-parallel layers, are gathered in high precision before they are quantized: twice the bytes. Pad sequences so that "
            "each rank has a multiple of 128 tokens (of 32 for MXFP8, of 16 for NVFP4)."
        )
