"""The gradient of the weights: the operand that forward has multiplied, kept or made again, and its product with the output's gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ottava.nn.operand import Operand, columnwise, kept_columns, quantize, rowwise, transposed
from ottava.nn.output_gradient import warn_of_crossing_blocks
from ottava.nn.producer import produce, produce_quantized
from ottava.nn.product import product
from ottava.nn.stage import Saved, Stage, source_of

ops = torch.ops.ottava


def begin_wgrad(
    stage: Stage, saved: list[Saved], scales: list[Tensor | None], dtype: torch.dtype
) -> Callable[[], list[Operand]]:
    """What gives the input's side of wgrad for all tokens. Where they are spread over ranks, their gather begins now."""
    scheme = stage.input
    if stage.backward == "dequantized" and scheme is not None and stage.strategy.gathers_input:
        arriving = stage.strategy.before_wgrad([_saved_rows(stage, s, c) for s, c in zip(saved, scales)])
        return lambda: [Operand(ops.dequantize(*rows[:3], str(scheme), dtype)) for rows in arriving()]
    after = [_quantizes_after_gather(stage, s) for s in saved]  # by group: their rows may or may not fill blocks
    if not any(after):
        return stage.strategy.before_wgrad([_wgrad_operand(stage, s, c, dtype) for s, c in zip(saved, scales)])
    warn_of_crossing_blocks()
    begun = stage.strategy.before_wgrad(
        [
            Operand(produce(stage, source_of(s))) if later else _wgrad_operand(stage, s, c, dtype)
            for s, c, later in zip(saved, scales, after)
        ]
    )
    return lambda: [
        columnwise(quantize(x.data, scheme, c, None, False, True), scheme) if later and scheme is not None else x
        for x, c, later in zip(begun(), scales, after)
    ]


def _quantizes_after_gather(stage: Stage, s: Saved) -> bool:
    """Whether the input's side of wgrad is gathered in high precision, because columnwise blocks would cross ranks."""
    return (
        stage.input is not None
        and stage.backward == "quantized"
        and stage.strategy.gathers_input
        and s.data is None
        and s.h is not None
        and not stage.input.fills_blocks(s.h.shape[0])
    )


def _wgrad_operand(stage: Stage, s: Saved, scale: Tensor | None, dtype: torch.dtype) -> Operand:
    """The input's side of wgrad, of this rank's tokens: saved, or made again if the stage recomputes. In high precision [M, K]."""
    if stage.input is None or stage.backward != "quantized":
        return Operand(_high_precision_operand(stage, s, scale, dtype))
    if s.data is not None:
        return kept_columns(s.data, s.scale_inv, s.amax, stage.input)
    source = source_of(s)
    if stage.return_norm:
        q = quantize(produce(stage, source), stage.input, scale, s.amax, False, True)
    else:
        q = produce_quantized(stage, source, scale, s.amax, False, True)
    return columnwise(q, stage.input)


def _high_precision_operand(stage: Stage, s: Saved, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """This rank's operand [M, K] in high precision, for a stage that does not go back quantized."""
    if s.data is not None and (stage.input is None or stage.backward == "high_precision"):
        return s.data
    if stage.backward == "dequantized" and stage.input is not None:
        return ops.dequantize(*_saved_rows(stage, s, scale)[:3], str(stage.input), dtype)
    return produce(stage, source_of(s))


def _saved_rows(stage: Stage, s: Saved, scale: Tensor | None) -> Operand:
    """This rank's operand [M, K] as forward multiplied it, for a stage that dequantizes it: saved, or made again."""
    assert stage.input is not None
    if s.data is not None:
        return Operand(s.data, s.scale_inv, s.amax, stage.input)
    return rowwise(produce_quantized(stage, source_of(s), scale, s.amax, True, False), stage.input)


def wgrad(stage: Stage, sides: list[Operand], operands: list[Operand], dtype: torch.dtype) -> Tensor:
    """The gradient of the weights of all groups, under one another: [groups * N, K]. sides: the gradients'."""
    operands = [transposed(o) if o.scheme is None else o for o in operands]
    return product(sides, operands, [], dtype, stage.split_wgrad)
