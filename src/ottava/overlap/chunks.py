"""Operands cut by tokens: what a rank holds, what travels, and the pieces that are multiplied one by one.

Tokens of a rank are the rows of its rowwise operands. A stage may have several operands, one for each group of rows with a weight of
its own (experts): a chunk has rows of each of them then, and a product of it has the groups' rows under one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.nn.operand import Operand, rows_of, token_dims
from ottava.nn.strategy import Operands


class Span(NamedTuple):
    """Rows [start, stop) of each group, of the tokens of one rank."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def rows(self) -> list[int]:
        """Of each group."""
        return [stop - start for start, stop in zip(self.start, self.stop)]


def spans(rows: Sequence[int], pieces: int, multiple: int = 1) -> list[Span]:
    """`rows` of each group in at most `pieces` pieces that are as equal as can be and begin at a multiple of `multiple`.

    >>> spans([10], 4)
    [Span(start=(0,), stop=(2,)), Span(start=(2,), stop=(5,)), Span(start=(5,), stop=(7,)), Span(start=(7,), stop=(10,))]
    """
    bounds = [
        tuple(count if i == pieces else count * i // pieces // multiple * multiple for count in rows)
        for i in range(pieces + 1)
    ]
    cut = [Span(start, stop) for start, stop in pairwise(bounds)]
    return [span for span in cut if any(span.rows)]


CUT_AT = 16  # a GPU's FP8 products want rows in multiples of 8 or 16, and fewer are not worth a product


def row_multiple(operands: Operands) -> int:
    """Rows at whose multiples the operands are cut."""
    return max(CUT_AT, *(1 if operand.scheme is None else operand.scheme.row_multiple for operand in operands))


class Gathered:
    """Room for the operands of all ranks' tokens, this rank's already in it.

    Buffers are [size, ...], a rank's part contiguous: the part of each rank arrives in its place.
    """

    def __init__(self, operands: Operands, size: int, rank: int) -> None:
        self.operands, self.size, self.rank = operands, size, rank
        self.data = [_room(operand.data, size, rank) for operand in operands]
        self.scales = [
            None if token_dims(operand).scale is None else _room(_scale(operand), size, rank) for operand in operands
        ]

    def tensors(self, rank: int) -> list[Tensor]:
        """What travels of the tokens of `rank`: the bytes and scales of each group."""
        travelling = [*self.data, *(scale for scale in self.scales if scale is not None)]
        return [buffer[rank] for buffer in travelling]

    def piece(self, rank: int, span: Span) -> list[Tensor]:
        """The same of some of its tokens; rowwise operands only."""
        part = [rows_of(operand, *bounds) for operand, *bounds in zip(self.part(rank), span.start, span.stop)]
        scales = [operand.scale_inv for operand, scale in zip(part, self.scales) if scale is not None]
        return [
            tensor for tensor in [*(operand.data for operand in part), *scales] if tensor is not None and tensor.numel()
        ]

    def part(self, rank: int, span: Span | None = None) -> Operands:
        """The operands of the tokens of `rank`, or of some of them."""
        whole = [
            operand._replace(data=data[rank], scale_inv=operand.scale_inv if scale is None else scale[rank])
            for operand, data, scale in zip(self.operands, self.data, self.scales)
        ]
        if span is None:
            return whole
        return [rows_of(operand, *bounds) for operand, *bounds in zip(whole, span.start, span.stop)]

    def whole(self) -> Operands:
        """The operands of all tokens."""
        joined = []
        for operand, data, scale in zip(self.operands, self.data, self.scales):
            dims = token_dims(operand)
            scale_inv = operand.scale_inv if scale is None or dims.scale is None else _joined(scale, dims.scale)
            joined.append(operand._replace(data=_joined(data, dims.data), scale_inv=scale_inv))
        return joined


def place(out: Tensor, part: Tensor, groups: Sequence[int], size: int, rank: int, span: Span) -> None:
    """Writes the product of a chunk [sum of span.rows, N] where it belongs in `out` [size * sum(groups), N].

    groups: rows of each group on one rank. In `out` a group's rows lie together, in the order of ranks.
    """
    base = 0
    for rows, start, chunk in zip(groups, span.start, part.split(span.rows)):
        first = base + rank * rows + start
        out[first : first + chunk.shape[0]] = chunk
        base += size * rows


def _scale(operand: Operand) -> Tensor:
    assert operand.scale_inv is not None
    return operand.scale_inv


def _room(part: Tensor, size: int, rank: int) -> Tensor:
    whole = torch.empty((size, *part.shape), dtype=part.dtype, device=part.device)
    whole[rank].copy_(part)
    return whole


def _joined(whole: Tensor, dim: int) -> Tensor:
    """[size, ...] -> the parts concatenated along `dim`."""
    return whole.flatten(0, 1) if dim == 0 else whole.movedim(0, dim).flatten(dim, dim + 1)
