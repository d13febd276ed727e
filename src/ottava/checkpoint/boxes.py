"""Boxes: which part of a tensor a rank holds, a file stores, or a reader wants.

A box is (offset, shape) in the canonical tensor, the one that a single process would have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from ottava import torch_private
from ottava.untrusted.tiles import Box, Index, inside, tiling_problem

__all__ = ["Box", "Former", "Index", "Part", "inside", "local_part", "overlap", "part_of", "tiling_problem", "within"]


@dataclass(frozen=True)
class Former:
    """Where a checkpoint of an earlier version has an entry: as the box at `offset` of another entry, of shape `shape`."""

    name: str
    offset: Index
    shape: Index


@dataclass(frozen=True)
class Part:
    """What this rank holds of a tensor, where torch does not say it: an entry of a state beside tensors and DTensors.

    >>> state = {"w": Part((8, 4), torch.float32, (((2, 0), rows),))}     # rows 2 and 3 of a weight [8, 4]
    """

    shape: Index
    """Of the whole tensor."""
    dtype: torch.dtype
    views: tuple[tuple[Index, Tensor], ...]
    """(offset, memory of this rank that has the shape of the box there)"""
    writes: bool = True
    """False: loaded like any other, but not offered when the state is saved."""
    optional: bool = False
    """Whether a checkpoint without it is complete; it then keeps its value."""
    former: Former | None = None
    """Where it is looked for if it is not there by its own name. (`Former.name` begins as the entry's name does.)"""


def part_of(name: str, leaf: Tensor | Part) -> Part:
    """What this rank holds of an entry of a state, checked; boxes without elements are left out (not if the whole has none)."""
    if isinstance(leaf, Part):
        for offset, view in leaf.views:
            local_part(name, view)
            if view.dtype != leaf.dtype or not inside((offset, tuple(view.shape)), leaf.shape):
                raise ValueError(
                    f"{name}: a view {view.dtype} {tuple(view.shape)} at {offset} is no box of a {leaf.dtype} of shape {leaf.shape}."
                )
        views = tuple((o, v.detach()) for o, v in leaf.views if v.numel() or not math.prod(leaf.shape))
        return replace(leaf, views=views)
    local = local_part(name, leaf)
    shape, offset = (
        torch_private.local_box(leaf) if isinstance(leaf, DTensor) else (tuple(leaf.shape), (0,) * leaf.dim())
    )
    views = ((offset, local),) if local.numel() or not leaf.numel() else ()
    if tuple(local.shape) != shape:
        raise ValueError(f"{name}: this rank holds {tuple(local.shape)} of it, where its placements say {shape}.")
    return Part(tuple(leaf.shape), leaf.dtype, views)


def local_part(name: str, tensor: Tensor) -> Tensor:
    """The plain tensor that this rank holds of `tensor`; ValueError for what cannot be stored as it is."""
    local = torch_private.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        raise ValueError(
            f"{name}: placements {tensor.placements} hold unreduced sums: redistribute the tensor before it is saved."
        )
    if type(local) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise ValueError(
            f"{name}: a {type(local).__name__} is not a plain tensor: put its buffers into the state instead, each under its own name."
        )
    if local.layout != torch.strided or local.is_quantized or local.device.type == "meta":
        raise ValueError(
            f"{name}: expected a dense tensor with data, got layout {local.layout} on device {local.device}."
        )
    return local.detach()


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if no element."""
    start = tuple(max(p, q) for p, q in zip(a[0], b[0]))
    shape = tuple(min(p + n, q + m) - s for p, n, q, m, s in zip(a[0], a[1], b[0], b[1], start))
    return (start, shape) if all(n > 0 for n in shape) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` lies in the memory of `outer`."""
    return tuple(slice(o - p, o - p + n) for o, n, p in zip(box[0], box[1], outer[0]))
