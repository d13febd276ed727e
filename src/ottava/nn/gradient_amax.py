"""The amax of a gradient, from the kernel that made it to the one that quantizes it.

Between the two lies autograd, which passes tensors on and nothing else: it may view them in another shape, add to them, or hand out a copy.
So the amax of the last gradient that has one is kept here beside what tells that gradient from any other: its memory, and that nothing has
been written to it since.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ottava import torch_private


class _Noted(NamedTuple):
    memory: Any
    """A weak reference: the gradient is freed when autograd is done with it, and no other memory is taken for it."""
    version: int
    elements: int
    amax: Tensor


_LAST: list[_Noted | None] = [None]


def note(gradient: Tensor, amax: Tensor) -> None:
    """amax [1] is that of `gradient`, which is contiguous and the whole of its memory."""
    _LAST[0] = _Noted(torch_private.weak_storage(gradient), gradient._version, gradient.numel(), amax)


def find(gradient: Tensor) -> Tensor | None:
    """The amax of `gradient`, if it is the last one that was noted, as it was then."""
    last = _LAST[0]
    if (
        last is None
        or gradient.numel() != last.elements
        or gradient._version != last.version
        or not torch_private.is_storage_of(last.memory, gradient)
        or not gradient.is_contiguous()
    ):
        return None
    return last.amax
