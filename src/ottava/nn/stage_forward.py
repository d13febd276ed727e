"""One stage on the way forward: the operands of its groups, what they leave for backward, and the product."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.nn.delayed_columns import DelayedTensors, column_of, input_column, weight_column
from ottava.nn.operand import Operand, quantize, rowwise
from ottava.nn.producer import has_producer, produce, produce_quantized, shared_amax, statistics
from ottava.nn.product import Product
from ottava.nn.stage import Chain, Made, Saved, Stage, StageTensors, count_into

ops = torch.ops.ottava

_DataScaleAmax = tuple[Tensor | None, Tensor | None, Tensor | None]


def make_operands(
    chain: Chain,
    start: int,
    parts: list[Tensor],
    residual: Tensor | None,
    tensors: list[StageTensors],
    state: DelayedTensors,
    keep: bool,
) -> list[Made]:
    """The operands of all groups, of which the first is stage number `start`; their amax is recorded where somebody collects it.

    parts: the rows of each group. residual: what the norm adds to them. tensors: of all stages. keep: a backward pass will come.
    """
    stage, made = chain.stages[start], []
    for number, part in enumerate(parts, start):
        t = tensors[number]
        count_into(chain, number, 0)
        if stage.input is None:
            one = _make_unquantized(stage, part, residual, t)
        else:
            scale = column_of(state.fwd_scale, input_column(number)) if stage.delayed else None
            one = _make_quantized(stage, part, residual, t, scale, keep)
        _record_amax(chain, number, one, t, state.fwd_history)
        made.append(one)
    return made


def _make_quantized(
    stage: Stage, h: Tensor, residual: Tensor | None, t: StageTensors, scale: Tensor | None, keep: bool
) -> Made:
    """The quantized operand of one group. keep: a backward pass will come."""
    assert stage.input is not None
    source, amax = statistics(stage, h, residual, t)
    h = source.h
    amax = shared_amax(stage, source, amax)
    norm_out = produce(stage, source) if stage.return_norm else None
    remake = stage.recompute or (stage.strategy.gathers_input and not stage.input.fills_blocks(h.shape[0]))
    column = keep and stage.backward == "quantized" and not remake
    if norm_out is not None:  # it exists anyway: quantize the rounded tensor
        q = quantize(norm_out, stage.input, scale, amax, True, column)
    else:
        q = produce_quantized(stage, source, scale, amax, True, column)
    if amax is None and stage.input.per_tensor and not stage.delayed:
        amax = q.rowwise_amax  # found on the way: what is made again need not look for it
    operand: _DataScaleAmax = (None, None, amax)
    if column:
        operand = (q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax)
    elif stage.backward == "dequantized" and not remake:
        operand = (q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax)
    elif stage.backward == "high_precision" and not remake:
        operand = (norm_out if norm_out is not None else produce(stage, source), None, None)
    saved = Saved(h if remake or has_producer(stage) else None, *source[1:], *operand, *_kept_weight(stage, t))
    return Made(rowwise(q, stage.input), saved, norm_out, q.rowwise_amax)


def _kept_weight(stage: Stage, t: StageTensors) -> _DataScaleAmax:
    """(data, scale_inv, amax) of the weight's side of dgrad, as far as it is kept."""
    if stage.backward == "quantized" and (t.col is not None or t.source is not None):
        return t.col, t.col_scale, t.col_amax
    if stage.backward != "high_precision":  # backward transposes, or dequantizes
        return t.row, t.row_scale, t.row_amax
    return t.weight, None, None


def _make_unquantized(stage: Stage, h: Tensor, residual: Tensor | None, t: StageTensors) -> Made:
    """The same in the activation dtype."""
    source, _ = statistics(stage, h, residual, t)
    h = source.h
    operand = produce(stage, source)
    kept = None if stage.remakes else operand
    needs_source = stage.remakes or has_producer(stage)
    saved = Saved(h if needs_source else None, *source[1:], kept, None, None, t.weight, None, None)
    return Made(Operand(operand), saved, operand if stage.return_norm else None, None)


def _weight_operand(stage: Stage, t: StageTensors) -> Operand:
    """What the forward GEMM multiplies with."""
    if stage.weight is None:
        return Operand(t.weight)
    assert t.row is not None
    return Operand(t.row, t.row_scale, t.row_amax, stage.weight.along("rowwise"))


def fprop(stage: Stage, made: list[Made], tensors: list[StageTensors], dtype: torch.dtype) -> Tensor:
    """The output of all groups [M, N]."""
    weights = [_weight_operand(stage, t) for t in tensors]
    biases = [t.bias for t in tensors if t.bias is not None]
    return stage.strategy.fprop([m.operand for m in made], Product(weights, dtype, stage.split_fprop), biases)


def _record_amax(chain: Chain, number: int, made: Made, t: StageTensors, history: Tensor | None) -> None:
    """Raises the amax history of stage `number`, where somebody collects it."""
    if chain.calibrate:
        ops.record_amax_(history, ops.amax(made.operand.data), input_column(number), 0)
        ops.record_amax_(history, ops.amax(t.weight), weight_column(number), 0)
    elif chain.record and chain.stages[number].delayed:
        ops.record_amax_(history, made.amax, input_column(number), 0)
