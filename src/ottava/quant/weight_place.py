"""`Place`: where the rows that a rank holds of a weight lie in the matrix that one process would hold, and which scales it has of it.

[Note: one matrix] A GEMM multiplies by one matrix [M, N]. A parameter is all of it, or some of its rows where q, k and v, or gate and
up, are parameters of their own. A tensor-parallel rank has a box of the parameter, its *unit*; FSDP's rank has rows of the unit. So
whatever a rank holds is a box of the matrix (`Place`), and bytes and scales are those of the matrix, quantized by one process: the
blocks that share a scale lie on the matrix's grid, wherever ranks cut it.

[Note: extent of scales] Which scales a rank has:

    MATRIX   of the whole matrix, equal on all its ranks: one scale a tensor, and blocks that a tensor-parallel border, or the border
             between two parameters, cuts
    UNIT     of its unit, equal on the ranks among which FSDP shares the unit: square blocks, and 1-D blocks that FSDP's borders cut
    OWN      of its own rows: 1-D blocks that no border cuts. They travel with the bytes.

Scales of MATRIX and UNIT follow from an amax that is MAX-reduced over those ranks (`weight_renew`); they need not travel.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ottava.quant.scheme import Scheme

Block = tuple[int, int]
Box = tuple[int, int, int, int]
"""(top, left, rows, columns)"""


class Extent(enum.Enum):
    """[Note: extent of scales]"""

    MATRIX = enum.auto()
    UNIT = enum.auto()
    OWN = enum.auto()


@dataclass(frozen=True)
class Place:
    """A box of a matrix, see [Note: one matrix]."""

    matrix: tuple[int, int]
    part: tuple[int, int]
    """First row and number of rows of the parameter in the matrix."""
    origin: tuple[int, int]
    """Where the unit begins in the matrix."""
    unit: tuple[int, int]
    """Shape of the unit: the parameter, or a tensor-parallel rank's box of it."""
    start: int
    """First of the unit's rows that are held ..."""
    rows: int
    """... and how many are."""
    padded: int
    """Rows of memory: FSDP gives all ranks as many as the first one."""

    @staticmethod
    def whole(shape: Sequence[int]) -> Place:
        """A matrix that is one parameter, on one rank."""
        rows, columns = shape
        return Place((rows, columns), (0, rows), (0, 0), (rows, columns), 0, rows, rows)

    def among(self, rows_before: int, matrix_rows: int) -> Place:
        """The parameter becomes a part of a matrix of `matrix_rows` rows."""
        below = self.origin[0] - self.part[0] + rows_before
        return replace(
            self,
            matrix=(matrix_rows, self.matrix[1]),
            part=(rows_before, self.part[1]),
            origin=(below, self.origin[1]),
        )

    def enlarged(self, dim: int, rank: int, size: int) -> Place:
        """What was taken for a whole parameter is the box of rank `rank` of `size` along `dim`."""
        (rows, columns), (first, count), (top, left) = self.matrix, self.part, self.origin
        if dim == 0:
            first, count, rows = first * size, count * size, rows * size
            top = first + rank * self.unit[0]
        else:
            columns, left = columns * size, rank * self.unit[1]
        return replace(self, matrix=(rows, columns), part=(first, count), origin=(top, left))

    def split(self, dim: int, rank: int, size: int) -> Place:
        """The box of rank `rank` of `size` ranks that split the unit along `dim`."""
        (rows, columns), (top, left) = self.unit, self.origin
        if dim == 0:
            rows //= size
            top += rank * rows
        else:
            columns //= size
            left += rank * columns
        return replace(self, unit=(rows, columns), origin=(top, left), rows=rows, padded=rows)

    def shard(self, start: int, stop: int, padded: int) -> Place:
        """Rows [start, stop) of the unit in memory for `padded` rows."""
        return replace(self, start=start, rows=stop - start, padded=padded)

    @property
    def top(self) -> int:
        """First row that is held, in the matrix."""
        return self.origin[0] + self.start

    @property
    def left(self) -> int:
        """First column."""
        return self.origin[1]

    @property
    def world(self) -> int:
        """Ranks among which FSDP shares the unit."""
        return -(-self.unit[0] // self.padded) if self.padded else 1

    def box(self, extent: Extent) -> Box:
        """What an extent means here."""
        if extent is Extent.MATRIX:
            return 0, 0, *self.matrix
        if extent is Extent.UNIT:
            return *self.origin, *self.unit
        return self.top, self.left, self.rows, self.unit[1]

    def cut_by_units(self, block: Block) -> bool:
        """Whether a border between tensor-parallel ranks or between parameters may run through a block."""
        (first, count), (rows, columns) = self.part, self.unit
        ends_inside = (first + count) % block[0] and first + count != self.matrix[0]
        return bool(
            first % block[0]
            or ends_inside
            or (rows != count and rows % block[0])
            or (columns != self.matrix[1] and columns % block[1])
        )

    def cut_by_shards(self, block: Block) -> bool:
        """Whether a border between FSDP's ranks may."""
        return self.world > 1 and self.padded % block[0] != 0

    def cut_like(self, before: Place, after: Place) -> Place:
        """This place after it was cut as `before` was to become `after`: the same share of rows or columns, as many shards.

        Where it begins does not matter to who asks.
        """
        place = self
        if after.unit != before.unit:
            dim = 0 if after.unit[0] != before.unit[0] else 1
            place = place.split(dim, 0, before.unit[dim] // after.unit[dim])
        return replace(place, padded=-(-place.unit[0] // after.world)) if after.world > 1 else place


def extent_of(scheme: Scheme, block: Block, places: Sequence[Place]) -> Extent:
    """Equal on all ranks, since ranks have equal parts. places: of all parameters that hold rows of the matrix."""
    if any(place.cut_by_units(block) for place in places):
        return Extent.MATRIX
    if not scheme.two_copies or any(place.cut_by_shards(block) for place in places):
        return Extent.UNIT
    return Extent.OWN


def blocks_of(box: Box, block: Block) -> tuple[slice, slice]:
    """The blocks of the matrix that a box touches, down and across."""
    top, left, rows, columns = box
    down = slice(top // block[0], -(-(top + rows) // block[0]) if rows else top // block[0])
    return down, slice(left // block[1], -(-(left + columns) // block[1]) if columns else left // block[1])


def count_blocks(blocks: tuple[slice, slice]) -> tuple[int, int]:
    """Down and across."""
    return blocks[0].stop - blocks[0].start, blocks[1].stop - blocks[1].start


def within(blocks: tuple[slice, slice], outer: tuple[slice, slice]) -> tuple[slice, slice]:
    """Where blocks lie among those of a larger box."""
    down, across = (slice(b.start - o.start, b.stop - o.start) for b, o in zip(blocks, outer))
    return down, across


def grid_step(block: Block, boxes: Sequence[Box]) -> Block:
    """The largest block that divides all boxes into pieces of single blocks of the matrix; `block` where boxes begin with one."""
    step = list(block)
    for dim in (0, 1):
        if any(box[dim] % block[dim] for box in boxes):
            step[dim] = math.gcd(block[dim], *(n for box in boxes for n in (box[dim], box[dim + 2])))
        elif any(box[dim + 2] % block[dim] for box in boxes[:-1]):  # the next one begins inside of a block of the grid
            step[dim] = math.gcd(block[dim], *(box[dim + 2] for box in boxes))
    return step[0], step[1]
