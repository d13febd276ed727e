"""Ring exchange: all-gather and product as one step. Each rank multiplies its own tokens first, then its neighbours' as they come.

    turn        rank r multiplies the tokens of     meanwhile it sends those on, and receives those of
    0           r                                   r - 1
    1           r - 1                               r - 2
    ...
    size - 1    r + 1                               (nothing left)

A part is passed on as it was received, so every link carries size - 1 parts, all of them under a product.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.profiler import record_function

from ottava.nn.strategy import Multiply, Operands
from ottava.overlap.chunks import Gathered, Span, place
from ottava.overlap.transport import Hop, Transport

NAME = "ring_all_gather"


def gather_multiply(
    transport: Transport, operands: Operands, multiply: Multiply, under: Callable[[], None]
) -> tuple[Tensor, Operands]:
    """(the product of all ranks' tokens, the operands of all ranks' tokens). under: called when nothing is left to be sent."""
    size, rank = transport.size, transport.rank
    rows = [operand.data.shape[0] for operand in operands]
    everything = Span((0,) * len(rows), tuple(rows))
    with record_function(f"ottava.overlap.{NAME}"):
        gathered = Gathered(operands, size, rank)
        order = [(rank - turn) % size for turn in range(size)]
        hops = [Hop((rank + 1) % size, (rank - 1) % size, gathered.tensors(part)) for part in order[1:]]
        exchange = transport.exchange(NAME, hops)
        out: Tensor | None = None
        with exchange.sending():
            for turn, part in enumerate(order):
                if turn > 0:
                    exchange.wait(turn - 1)
                if turn < size - 1:
                    exchange.send(turn, gathered.tensors(part))
                if turn == size - 2:
                    under()
                product = multiply(gathered.part(part))
                if out is None:
                    out = product.new_empty(size * product.shape[0], *product.shape[1:])
                place(out, product, rows, size, part, everything)
        exchange.finish()
        assert out is not None
        return out, gathered.whole()
