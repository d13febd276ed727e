"""FSDP2's hooks, called by a program itself: `weight.fsdp_pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)`, its
own all-gathers of what comes back, then `weight.fsdp_post_all_gather(...)`.

torch looks at the number of arguments of a hook, and allows shards of different sizes only to the form with one. So Ottava's has one;
here it takes all five, and still says that it has one. What is gathered by hand is memory of its own: FSDP's stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ottava.quant.weight import Weight

_PRE, _POST = Weight.fsdp_pre_all_gather, Weight.fsdp_post_all_gather


class _ByHand(str):
    """The direction of a gather that the program does itself."""


@functools.wraps(_PRE)  # and so `inspect.signature` shows torch the form with one argument
def _pre_all_gather(self: Weight, mesh: Any, *rest: Any, **options: Any) -> tuple[tuple[Tensor, ...], str]:
    if not rest and not options:
        return _PRE(self, mesh)
    if mesh is None:
        self.memory.check_bound()  # who shares its scales is known: after a forward, or `reset_parameters`
        mesh = _OneRank() if not self.memory.shard_groups else mesh
    sent, direction = _PRE(self, mesh)
    return sent, _ByHand(direction)


class _OneRank:
    """Stands for the mesh of a weight that is not sharded."""

    def size(self) -> int:
        return 1


@functools.wraps(_POST)
def _post_all_gather(
    self: Weight, outputs: Sequence[Tensor], direction: str, param_dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    if not isinstance(direction, _ByHand):
        return _POST(self, outputs, direction, param_dtype, out=out)
    group, joined = self.memory.group, dict(self.memory.group.joined)
    try:
        return _POST(self, outputs, str(direction), param_dtype, out=out)
    finally:
        group.joined = joined


def lend_hooks() -> None:
    """`Weight`'s hooks take all arguments of torch's."""
    Weight.fsdp_pre_all_gather, Weight.fsdp_post_all_gather = _pre_all_gather, _post_all_gather  # type: ignore[method-assign]


def take_hooks_back() -> None:
    """Undoes `lend_hooks`."""
    Weight.fsdp_pre_all_gather, Weight.fsdp_post_all_gather = _PRE, _POST  # type: ignore[method-assign]
