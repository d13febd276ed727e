"""What this rank holds of a parameter, or of a tensor that is spread as one: a parameter may be a DTensor or plain."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ottava import torch_private
from ottava.nn.draw import is_dtensor
from ottava.nn.strategy import like_dtensor


def held(parameter: Any) -> Any:
    """What this rank holds of a parameter: that of a DTensor (the object itself), or the parameter."""
    return torch_private.local_tensor(parameter) if is_dtensor(parameter) else parameter


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. Every rank has to call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def cut_to(parameter: Any, whole: Tensor) -> Tensor:
    """What this rank holds of `whole`, a tensor of the parameter's full shape."""
    if not is_dtensor(parameter):
        return whole
    shape, offset = torch_private.local_box(parameter)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))]


def own_part(target: Any, source: Tensor) -> Tensor:
    """What this rank holds of an entry: of a DTensor what it has, of a whole tensor what the target's place says."""
    return held(source) if is_dtensor(source) else cut_to(target, source)


def placed_like(parameter: Any, value: Tensor) -> Tensor:
    """A plain tensor of a parameter's full shape, spread as the parameter is."""
    if not is_dtensor(parameter) or is_dtensor(value):
        return value
    return like_dtensor(parameter, cut_to(parameter, value).to(parameter.device), tuple(value.shape))
