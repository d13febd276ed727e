"""Boxes that cover a tensor once are known from those that do not, by one look at each."""

from __future__ import annotations

import random
from itertools import product

import pytest

from ottava.untrusted.tiles import MOST_CUTS, Box, Index, tiling_problem


def covers(shape: Index, boxes: list[Box]) -> bool:
    """The same, element by element."""
    seen: dict[Index, int] = {}
    for offset, size in boxes:
        if any(o < 0 or o + n > m for o, n, m in zip(offset, size, shape)):
            return False
        for point in product(*(range(o, o + n) for o, n in zip(offset, size))):
            seen[point] = seen.get(point, 0) + 1
    return all(seen.get(point) == 1 for point in product(*map(range, shape)))


def cut(box: Box, times: int, draw: random.Random) -> list[Box]:
    offset, size = box
    if times == 0 or max(size, default=0) < 2:
        return [box]
    dim = draw.choice([d for d, n in enumerate(size) if n > 1])
    at = draw.randrange(1, size[dim])
    low = (offset, (*size[:dim], at, *size[dim + 1 :]))
    high = ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :]))
    return cut(low, times - 1, draw) + cut(high, times - 1, draw)


def spoilt(boxes: list[Box], draw: random.Random) -> list[Box]:
    """One box moved, grown, left out or there twice."""
    i = draw.randrange(len(boxes))
    offset, size = boxes[i]
    way = draw.randrange(4)
    if way == 0:
        return [*boxes[:i], *boxes[i + 1 :]]
    if way == 1 or not size:
        return [*boxes, boxes[i]]
    dim, by = draw.randrange(len(size)), draw.choice((-1, 1))
    moved = (*offset[:dim], offset[dim] + by * (way == 2), *offset[dim + 1 :])
    grown = (*size[:dim], max(size[dim] + by * (way == 3), 0), *size[dim + 1 :])
    return [*boxes[:i], (moved, grown), *boxes[i + 1 :]]


def test_it_is_what_counting_elements_says():
    draw, verdicts = random.Random(0), []
    for _ in range(3000):
        shape = tuple(draw.randrange(6) for _ in range(draw.randrange(4)))
        boxes = cut(((0,) * len(shape), shape), draw.randrange(4), draw)
        for _ in range(draw.choice((0, 0, 1, 2))):
            boxes = spoilt(boxes, draw) if boxes else boxes
        verdicts.append(covers(shape, boxes))
        assert (tiling_problem(shape, boxes) is None) == verdicts[-1], (shape, boxes)
    assert 500 < sum(verdicts) < 2500


def test_rows_above_columns_take_no_longer_than_rows():
    """Sorted by any one dimension, half of these begin together: comparing neighbours is quadratic."""
    count = 20_000
    rows = [((i, 0), (1, count)) for i in range(count // 2)]
    columns = [((count // 2, j), (count // 2, 1)) for j in range(count)]
    assert tiling_problem((count, count), rows + columns) is None
    problem = tiling_problem((count, count), [*rows, *columns[:-1], columns[0]])
    assert problem is not None and problem.startswith(
        "boxes overlap, or leave a gap, at 10000 of dimension 0, 0 of dimension 1"
    )


@pytest.mark.parametrize("dims", [MOST_CUTS, MOST_CUTS + 1])
def test_more_cuts_than_anybody_makes_are_not_understood(dims):
    boxes = [(at, (1,) * dims) for at in product((0, 1), repeat=dims)]
    problem = tiling_problem((2,) * dims, boxes)
    assert problem is None if dims == MOST_CUTS else f"at most {MOST_CUTS} are understood" in str(problem)
    whole = ((0,) * 40, (2,) * 40)  # a dimension that nobody cuts costs nothing
    assert tiling_problem((2,) * 40, [whole]) is None
