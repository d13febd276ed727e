"""Whether boxes cover a tensor exactly once, known by one look at each: a stranger's file may say that there are thousands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

Index = tuple[int, ...]
Box = tuple[Index, Index]
"""(offset, shape)"""
MOST_CUTS = 6
"""Dimensions of one tensor that boxes may cut: a mesh cuts one or two. Each doubles the work of looking at a box."""


def inside(box: Box, shape: Index) -> bool:
    """Whether a box lies in a tensor of this shape."""
    offset, size = box
    return len(offset) == len(size) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= m for o, n, m in zip(offset, size, shape)
    )


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
