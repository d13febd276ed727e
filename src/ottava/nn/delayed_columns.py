"""The delayed-scaling state of a module as its stages see it: a scale and a history of amax for each of their tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.quant.delayed import schedule_backward_update


class DelayedTensors(NamedTuple):
    """The delayed-scaling state of a module's stages (see `DelayedState`); Nones where nothing is delayed."""

    fwd_scale: Tensor | None = None
    fwd_history: Tensor | None = None
    bwd_scale: Tensor | None = None
    bwd_history: Tensor | None = None


def input_column(stage: int) -> int:
    """The column of the forward state that belongs to the input of stage number `stage`."""
    return 3 * stage


def weight_column(stage: int) -> int:
    """The same of its weight."""
    return 3 * stage + 1


def grad_column(stage: int) -> int:
    """The column of the backward state that belongs to the gradient of its output."""
    return 2 * stage


def column_of(scale: Tensor | None, column: int) -> Tensor | None:
    """One scale [1] of the state's [n]."""
    return None if scale is None else scale.narrow(0, column, 1)


def cell_of(ops: Any, history: Tensor, column: int) -> Tensor | None:
    """Where the amax of a tensor is recorded, [1]. A kernel that quantizes with a given scale raises the amax that it is given, and returns
    it: then nothing is left to record. References, and kernels that cannot, return one of their own.

    None where the ops are the dispatcher's, which takes arguments for unchanged unless their op says otherwise.
    """
    return None if ops is torch.ops.ottava else history.as_strided((1,), (1,), history.storage_offset() + column)


def record_gradient(ops: Any, history: Tensor, column: int, cell: Tensor | None, amax: Tensor, owner: int) -> None:
    """Records the amax of a gradient, unless it is the `cell_of` it. owner: id of the state to update when the running backward ends."""
    if amax is not cell:
        ops.record_amax_(history, amax, column, owner)
    elif owner:
        schedule_backward_update(owner)
