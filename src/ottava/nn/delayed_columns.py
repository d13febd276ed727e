"""The delayed-scaling state of a module as its stages see it: a scale and a history of amax for each of their tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
    return None if scale is None else scale[column : column + 1]
