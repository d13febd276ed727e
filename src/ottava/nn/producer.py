"""What makes a stage's operand from its input, and the way back through it: a norm, an activation, or nothing at all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels.cast import Buffers, operand_amax
from ottava.nn.delayed_columns import DelayedTensors, column_of, grad_column
from ottava.nn.output_gradient import quantizes_gradient, shares_gradient_amax
from ottava.nn.stage import Chain, Gradient, Saved, Source, Stage, StageTensors, count_into

ops = torch.ops.ottava


def has_producer(stage: Stage) -> bool:
    """Whether the operand is something else than the stage's input."""
    return stage.norm is not None or stage.activation is not None


def statistics(stage: Stage, h: Tensor, residual: Tensor | None, t: StageTensors) -> tuple[Source, Tensor | None]:
    """What the stage's operand is produced from, and its amax where current scaling needs it and a norm has found it.

    residual: what is added to h before the norm; the source's `h` is the sum then.
    """
    if stage.norm is None:
        return Source(h, t.gamma, t.beta, None, None), None
    needs_amax = stage.input is not None and stage.input.per_tensor and not stage.delayed
    norm = (t.gamma, t.beta, stage.norm.kind, stage.norm.eps, stage.norm.zero_centered, needs_amax)
    if residual is None:
        mean, rstd, amax = ops.norm_stats(h, *norm)
    else:
        h, mean, rstd, amax = ops.norm_add_stats(h, residual, *norm)
    return Source(h, t.gamma, t.beta, mean, rstd), amax if needs_amax else None


def produce(stage: Stage, source: Source) -> Tensor:
    """The stage's operand in the activation dtype [M, K]."""
    h = source.h
    if stage.norm is not None:
        return ops.norm_apply(h, source.gamma, source.beta, source.mean, source.rstd, stage.norm.zero_centered, h.dtype)
    return h if stage.activation is None else ops.activation(h, stage.activation)


def produce_quantized(
    stage: Stage, source: Source, scale: Tensor | None, amax: Tensor | None, row: bool, column: bool
) -> Buffers:
    """The stage's operand, quantized, without a high-precision copy in between. row, column: which copies."""
    args = (str(stage.input), scale, amax, row, column)
    if stage.norm is not None:
        norm = (source.gamma, source.beta, source.mean, source.rstd, stage.norm.zero_centered)
        return Buffers(*ops.norm_quantize(source.h, *norm, *args))
    if stage.activation is not None:
        return Buffers(*ops.activation_quantize(source.h, stage.activation, *args))
    return Buffers(*ops.quantize(source.h, *args))


def shared_amax(stage: Stage, source: Source, own: Tensor | None) -> Tensor | None:
    """The amax of the stage's operand over all ranks that hold a part of it. own: what the norm found on this rank."""
    scheme, strategy = stage.input, stage.strategy
    assert scheme is not None
    if not strategy.shares_input_amax or stage.delayed or not scheme.needs_tensor_amax:
        return own
    if not scheme.per_tensor:
        own = operand_amax(produce(stage, source), scheme)
    elif own is None:
        own = ops.amax(source.h) if stage.activation is None else ops.activation_amax(source.h, stage.activation)
    return strategy.share_amax(own)


class ProducerGradients(NamedTuple):
    """Of one group: the gradient of the stage's input, and those of the norm's gain and bias."""

    grad: Gradient
    dgamma: Tensor | None = None
    dbeta: Tensor | None = None


def producer_backward(
    chain: Chain,
    number: int,
    dgrad: Tensor,
    more: tuple[Tensor | None, Tensor | None],
    s: Saved,
    state: DelayedTensors,
    needs_bias: bool,
) -> ProducerGradients:
    """Through the producer of stage `number`. more: gradients of the norm's output and of its input, where those were returned."""
    stage, (dnorm, dtotal) = chain.stages[number], more
    if stage.norm is not None:
        dgrad = dgrad if dnorm is None else dgrad + dnorm
        norm = (s.h, s.gamma, s.mean, s.rstd, stage.norm.zero_centered, s.beta is not None)
        if dtotal is None:
            dx, dgamma, dbeta = ops.norm_backward(dgrad, *norm)
        else:
            dx, dgamma, dbeta, _ = ops.norm_backward_add(dgrad, *norm, dtotal, False)
        return ProducerGradients(Gradient(dx), dgamma, dbeta if s.beta is not None else None)
    return ProducerGradients(_activation_backward(chain, number, dgrad, s, state, needs_bias))


def _activation_backward(
    chain: Chain, number: int, dgrad: Tensor, s: Saved, state: DelayedTensors, needs_bias: bool
) -> Gradient:
    """Through the activation of stage `number`; straight into quantized form if the stage before takes it so."""
    name = chain.stages[number].activation
    earlier = number - chain.groups
    before = chain.stages[earlier] if earlier >= 0 else None
    if before is None or not quantizes_gradient(before) or shares_gradient_amax(before):
        return Gradient(ops.activation_backward(dgrad, s.h, name))
    scale = column_of(state.bwd_scale, grad_column(earlier)) if before.delayed else None
    count_into(chain, earlier, 2)
    *q, column_sum = ops.activation_backward_quantize(
        dgrad, s.h, name, str(before.fused_grad or before.grad), scale, None, True, True, needs_bias
    )
    return Gradient(None, Buffers(*q), column_sum if needs_bias else None)
