"""Weights that are the parts of one matrix ([Note: one matrix] in `weight_place`): made so, found to be so, multiplied as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import Weight, gradient_dtype
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE
from ottava.quant.weight_operands import joined_scales, operands
from ottava.quant.weight_place import Extent
from ottava.quant.weight_state import State


def join_parts(weights: Sequence[Weight]) -> None:
    """Makes weights the parts of one matrix, in this order: they get one scale, and are adjacent in memory when gathered."""
    memories = [weight.memory for weight in weights]
    group = memories[0].group.map(lambda t: t)
    total, before = sum(m.place.part[1] for m in memories), 0
    for memory in memories:
        memory.join(group)
        memory.place = memory.place.among(before, total)
        before += memory.place.part[1]


def link_parts(weights: Sequence[Weight]) -> None:
    """Makes parts of one matrix, of which something has made copies one by one, share its scales again."""
    memories = [weight.memory for weight in weights]
    if [id(m) for m in memories[0].group.parts] == [id(m) for m in memories]:
        return
    group = memories[0].group.map(lambda t: t)
    group.delayed, group.column = memories[0].group.delayed, memories[0].group.column
    for memory in memories:
        memory.join(group)


def link_copies(weights: Sequence[Any]) -> bool:
    """Whether weights are copies, made one by one, of all parts of one matrix (`torch.func.functional_call` of cloned parameters): they
    share its scales again then."""
    if not all(isinstance(w, Weight) and w.stored_quantized and w.state is State.WHOLE for w in weights):
        return False
    memories = [weight.memory for weight in weights]
    first, row = memories[0], 0
    for memory in memories:
        place = memory.place
        if place.part[0] != row or place.matrix != first.place.matrix or memory.scheme != first.scheme:
            return False
        if len(memory.group.parts) > 1 or not first.group.same_scales(memory.group):
            return False
        row += place.part[1]
    if row != first.place.matrix[0]:
        return False
    link_parts(weights)
    return True


# ----------------------------------------------------------------------------------------------------- multiplied as one


def one_matrix(weights: Sequence[Any]) -> bool:
    """Whether weights are all the parts of one matrix, in order: bytes that can be multiplied as one."""
    if not all(isinstance(w, Weight) and w.memory.quantized for w in weights):
        return False
    parts = weights[0].memory.group.parts
    return [id(w.memory) for w in weights] == [id(part) for part in parts]


def as_one_matrix(weights: Sequence[Weight]) -> QuantizedTensor:
    """The matrix that the weights are the rows of, without rounding again; gradients go back to each. Only if `one_matrix`."""
    return _OneMatrix.apply(*weights)


class _OneMatrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Weight) -> QuantizedTensor:
        ctx.rows = [w.shape[0] for w in weights]
        ctx.set_materialize_grads(False)
        group, first = weights[0].memory.group, weights[0]
        if first._gather is None:
            parts = operands(group)
        else:
            names = ["rowwise_data", "columnwise_data"] if group.keeps_columnwise else ["rowwise_data"]
            parts = {name: group.joined[name] for name in names}
            parts |= _gathered_scales(weights)
        return QuantizedTensor(parts, first.scheme, (sum(ctx.rows), first.shape[1]), gradient_dtype(first))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None,) * len(ctx.rows) if grad is None else grad.split(ctx.rows)


def _gathered_scales(weights: Sequence[Weight]) -> dict[str, Tensor]:
    """Scales that travelled are put under one another; those that every rank has are asked from the group."""
    group, scheme = weights[0].memory.group, weights[0].scheme
    directions = [ROWWISE, COLUMNWISE] if group.keeps_columnwise else [ROWWISE]
    known = [d for d in directions if group.parts[0].extent(d) is not Extent.OWN]
    found = joined_scales(group, known)
    for direction in (d for d in directions if d not in known):
        name = f"{direction}_scale_inv"
        # Columnwise ones are filled before backward, in the memory that autograd holds from forward on.
        found[name] = group.joined[name] if direction == COLUMNWISE else torch.cat([w._parts[name] for w in weights])
        if scheme.needs_tensor_amax:
            found[f"{direction}_amax"] = group.amax
    return found
