"""Pipelines: every rank sends to every other one directly, in pieces; products of pieces run while others travel.

All-gather: the own tokens are multiplied first, then the pieces of other ranks in the order in which they come. Reduce-scatter: pieces
that other ranks wait for are multiplied first and sent at once, the own tokens LAST, under which the last pieces travel. What a rank
receives is added in float32 and in the order of ranks (`sums.py`), whatever came first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from ottava.nn.operand import rows_of
from ottava.nn.strategy import Multiply, Operands
from ottava.overlap.chunks import Gathered, Span, place, row_multiple, spans
from ottava.overlap.sums import sum_by_halves
from ottava.overlap.transport import Hop, Transport

GATHER, SCATTER = "pipelined_all_gather", "pipelined_reduce_scatter"


def pieces_of(splits: int, size: int) -> int:
    """Pieces that the tokens of one rank are cut into, for `splits` pieces of all other ranks' tokens: at least one."""
    return -(-splits // (size - 1))


def gather_multiply(
    transport: Transport, operands: Operands, multiply: Multiply, under: Callable[[], None], splits: int
) -> tuple[Tensor, Operands]:
    """(the product of all ranks' tokens, the operands of all ranks' tokens). under: called when nothing is left to be sent."""
    size, rank = transport.size, transport.rank
    rows = [operand.data.shape[0] for operand in operands]
    with record_function(f"ottava.overlap.{GATHER}"):
        gathered = Gathered(operands, size, rank)
        cut = spans(rows, pieces_of(splits, size), row_multiple(operands))
        steps = [(distance, span) for distance in range(1, size) for span in cut]
        hops = [Hop((rank + d) % size, (rank - d) % size, gathered.piece((rank - d) % size, span)) for d, span in steps]
        exchange = transport.exchange(GATHER, hops)
        with exchange.sending():
            for hop, (_, span) in enumerate(steps):
                exchange.send(hop, gathered.piece(rank, span))
            under()
            own = multiply(gathered.part(rank))
            out = own.new_empty(size * own.shape[0], *own.shape[1:])
            place(out, own, rows, size, rank, Span((0,) * len(rows), tuple(rows)))
            for hop, (distance, span) in enumerate(steps):
                source = (rank - distance) % size
                exchange.wait(hop)
                place(out, multiply(gathered.part(source, span)), rows, size, source, span)
        exchange.finish()
        return out, gathered.whole()


class _Piece(NamedTuple):
    """Partial results of one piece of this rank's tokens."""

    span: Span
    parts: Tensor
    """[size, rows of the span, N]: from each rank, this one's included."""


def multiply_scatter(
    transport: Transport, operands: Operands, multiply: Multiply, splits: int
) -> Callable[[Tensor | None], Tensor]:
    """What gives this rank's tokens of the sum over ranks of the product, plus a bias. Until it is called, the last pieces travel.

    operands: of all ranks' tokens; of each group the tokens of rank 0, then of rank 1, ...
    """
    size, rank = transport.size, transport.rank
    rows = [operand.data.shape[0] // size for operand in operands]
    cut = spans(rows, pieces_of(splits, size), row_multiple(operands))

    def chunk(of: int, span: Span) -> Operands:
        return [
            rows_of(operand, of * count + start, of * count + stop)
            for operand, count, start, stop in zip(operands, rows, span.start, span.stop)
        ]

    with record_function(f"ottava.overlap.{SCATTER}"):
        steps = [(distance, j) for distance in range(1, size) for j in range(len(cut))]
        first = multiply(chunk((rank + 1) % size, cut[0]))  # the result's width and type are the product's to know
        pieces = [_Piece(span, first.new_empty(size, sum(span.rows), *first.shape[1:])) for span in cut]
        hops = [Hop((rank + d) % size, (rank - d) % size, [pieces[j].parts[(rank - d) % size]]) for d, j in steps]
        exchange = transport.exchange(SCATTER, hops)
        with exchange.sending():
            for hop, (distance, j) in enumerate(steps):
                product = first if hop == 0 else multiply(chunk((rank + distance) % size, cut[j]))
                exchange.send(hop, [product])
            own = multiply(chunk(rank, Span((0,) * len(rows), tuple(rows)))).split(rows)
        for piece in pieces:
            mine = [part[start:stop] for part, start, stop in zip(own, piece.span.start, piece.span.stop)]
            piece.parts[rank] = mine[0] if len(mine) == 1 else torch.cat(mine)

    def finish(bias: Tensor | None = None) -> Tensor:
        with record_function(f"ottava.overlap.{SCATTER}"):
            total = first.new_empty(sum(rows), *first.shape[1:])
            for hop in range(len(steps)):
                exchange.wait(hop)
            for piece in pieces:
                place(total, sum_by_halves(piece.parts, bias), rows, 1, 0, piece.span)
            exchange.finish()
            return total

    return finish
