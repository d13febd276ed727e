"""Boxes: which part of a tensor a rank holds, a file stores, or a reader wants.

A box is (offset, shape) in the canonical tensor, the one that a single process would have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from ottava import torch_private

Index = tuple[int, ...]
Box = tuple[Index, Index]
"""(offset, shape)"""
MOST_CUTS = 6
"""Dimensions of one tensor that boxes may cut: a mesh cuts one or two. Each doubles the work of looking at a box."""


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


def inside(box: Box, shape: Index) -> bool:
    """Whether a box lies in a tensor of this shape."""
    offset, size = box
    return len(offset) == len(size) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= m for o, n, m in zip(offset, size, shape)
    )


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if no element."""
    start = tuple(max(p, q) for p, q in zip(a[0], b[0]))
    shape = tuple(min(p + n, q + m) - s for p, n, q, m, s in zip(a[0], a[1], b[0], b[1], start))
    return (start, shape) if all(n > 0 for n in shape) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` lies in the memory of `outer`."""
    return tuple(slice(o - p, o - p + n) for o, n, p in zip(box[0], box[1], outer[0]))


def tiling_problem(shape: Index, boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of this shape exactly once; None if they do."""
    for box in boxes:
        if not inside(box, shape):
            return f"box {box} lies outside of shape {shape}"
    total, covered = math.prod(shape), sum(math.prod(size) for _, size in boxes)
    if covered != total:
        return f"boxes have {covered} of {total} elements of shape {shape}"
    # Inside, and as many elements as the tensor: what is left to exclude is an overlap with a gap elsewhere. Each box is the sum of
    # steps at its corners (+1 where it begins, -1 where it ends, in each dimension). Boxes cover the tensor once if and only if their
    # steps add up to those of the whole: one look at each box, however they lie. Dimensions that nobody cuts have no part in it.
    cut = [d for d, n in enumerate(shape) if any(size[d] != n for _, size in boxes)]
    if len(cut) > MOST_CUTS:
        return f"boxes cut {len(cut)} dimensions of shape {shape}; at most {MOST_CUTS} are understood"
    steps = Counter[Index]()
    for box, factor in [(((0,) * len(shape), shape), -1), *((box, 1) for box in boxes)]:
        for point, sign in _corners(box, cut):
            steps[point] += factor * sign
    wrong = min((point for point, step in steps.items() if step), default=None)
    if wrong is None:
        return None
    where = ", ".join(f"{at} of dimension {d}" for d, at in zip(cut, wrong))
    return f"boxes overlap, or leave a gap, at {where} of shape {shape}"


def _corners(box: Box, cut: Sequence[int]) -> Iterator[tuple[Index, int]]:
    """(point, sign) of the steps that a box consists of, in the dimensions `cut`."""
    if math.prod(box[1]):
        for ends in product((0, 1), repeat=len(cut)):
            yield tuple(box[0][d] + end * box[1][d] for d, end in zip(cut, ends)), (-1) ** sum(ends)
