"""`ScaleGroup`: the parameters that hold rows of one matrix, and what they share: its scheme, its amax, its scale of the tensor.

`weight_place` has [Note: one matrix]. Most matrices are one parameter, which is alone in its group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ottava.quant.delayed import DelayedState
from ottava.quant.scheme import Scheme

if TYPE_CHECKING:
    from ottava.quant.weight_memory import WeightMemory


class ScaleGroup:
    """See above. Each part has a `WeightMemory` of its own."""

    def __init__(self, scheme: Scheme | None, needs_columnwise: bool = True) -> None:
        self.scheme = scheme
        """None: no recipe is known yet, or it quantizes nothing."""
        self.needs_columnwise = needs_columnwise
        """Whether backward multiplies by the columnwise copy. (Not if the recipe's `backward_override` dequantizes.)"""
        self.parts: list[WeightMemory] = []
        self.delayed: DelayedState | None = None
        """Where delayed scaling keeps the scale, and in which column of `fwd_scale`. None: it follows from the amax."""
        self.column = 0
        self.amax = self.scale = self.scale_inv = torch.empty(0, dtype=torch.float32)
        """float32 [1], equal on all ranks that hold a part of the matrix; empty where the scheme has none."""
        self.grids: dict[str, Tensor] = {}
        """By direction, scales of all blocks of the matrix, where they are of that extent."""
        self.joined: dict[str, Tensor] = {}
        """Memory that gathered parts share, so that they are adjacent in it (`weight_gather`)."""
        self.operands: tuple[Any, dict[str, Tensor]] | None = None
        """Of whole units: what a GEMM takes, and the versions of what it was made from."""
        self._cut: weakref.WeakValueDictionary[Any, ScaleGroup] = weakref.WeakValueDictionary()

    @property
    def keeps_columnwise(self) -> bool:
        """Whether there are bytes of both directions. Where one is the transpose of the other, backward makes it from the bytes."""
        return self.scheme is not None and self.scheme.two_copies and self.needs_columnwise

    def same_scales(self, other: ScaleGroup) -> bool:
        """Whether bytes mean the same under the scales that each group's parts share."""
        mine, theirs = ({"amax": g.amax, "scale_inv": g.scale_inv} | g.grids for g in (self, other))
        return mine.keys() == theirs.keys() and all(torch.equal(t, theirs[key].to(t.device)) for key, t in mine.items())

    def cut(self, key: Any) -> ScaleGroup:
        """The group of the parts after all of them were cut in the way that `key` names: parts that belong together stay so."""
        group = self._cut.get(key)
        if group is None:
            group = self.map(lambda t: t)
            group.delayed, group.column = self.delayed, self.column
            self._cut[key] = group
        return group

    def map(self, function: Callable[[Tensor], Tensor]) -> ScaleGroup:
        """A group of no parts with `function` of these tensors."""
        other = ScaleGroup(self.scheme, self.needs_columnwise)
        other.amax, other.scale, other.scale_inv = (function(t) for t in (self.amax, self.scale, self.scale_inv))
        other.grids = {key: function(t) for key, t in self.grids.items()}
        return other
