"""The gradient of a stage's operand: the weights' side, kept or made again, and its product with the output's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ottava.nn.columnwise import quantize_again
from ottava.nn.delayed_columns import column_of, weight_column
from ottava.nn.operand import Operand, kept_columns, transposed
from ottava.nn.output_gradient import quantizes_gradient
from ottava.nn.product import Product
from ottava.nn.stage import Gradient, Saved, Stage
from ottava.nn.strategy import ALONE, Later
from ottava.quant.tensor import QuantizedTensor

ops = torch.ops.ottava


def dgrad_operand(stage: Stage, s: Saved, dtype: torch.dtype) -> Operand:
    """The weight's side of dgrad [K, N]: the columnwise copy, or a view of the weight in high precision."""
    assert s.weight_data is not None
    if quantizes_gradient(stage):
        assert stage.weight is not None
        held = s.weight_data, s.weight_scale_inv, s.weight_amax
        return kept_columns(*held, stage.weight) if stage.two_copies else transposed(Operand(*held, stage.weight))
    if stage.backward == "dequantized" and stage.weight is not None:
        weight = ops.dequantize(s.weight_data, s.weight_scale_inv, s.weight_amax, str(stage.weight), dtype)
    elif isinstance(s.weight_data, QuantizedTensor):
        weight = s.weight_data.dequantize().to(dtype)
    else:
        weight = s.weight_data.to(dtype)
    return Operand(weight.t())


def dgrad_operands(
    stage: Stage, saved: list[Saved], sources: tuple[Any, ...], start: int, fwd_scale: Tensor | None, dtype: torch.dtype
) -> list[Operand]:
    """Of all groups, of which the first is stage number `start`. Copies that were not kept are made."""
    found = []
    for number, s in enumerate(saved, start):
        if sources[number] is None:
            found.append(dgrad_operand(stage, s, dtype))
            continue
        scale = column_of(fwd_scale, weight_column(number)) if stage.delayed else None
        made = quantize_again(sources[number], ops, str(stage.weight), scale, s.weight_amax)
        assert stage.weight is not None
        found.append(kept_columns(*made, stage.weight))
    return found


def dgrad(
    stage: Stage,
    weights: list[Operand],
    grads: list[Gradient],
    rows: list[Operand],
    extra: Tensor | None,
    dtype: torch.dtype,
    under: Later | None,
) -> tuple[Callable[[], Tensor], list[Operand]]:
    """(what gives the gradient of the operands [M, K], the gradients' rowwise copies of all tokens).

    rows: the copies of this rank's tokens. extra: another gradient of the operands of all tokens. under: what may travel meanwhile.
    """
    multiply = Product(weights, dtype, stage.split_dgrad, stage.output_parts, extra)
    strategy = ALONE if grads[0].gathered else stage.strategy
    return strategy.dgrad(rows, multiply) if under is None else strategy.dgrad(rows, multiply, under.begin)
