"""Bulk: a whole collective under a product that needs nothing of it. Every rank sends its part to every other one, and waits later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from ottava.nn.strategy import Operands
from ottava.overlap.chunks import Gathered
from ottava.overlap.sums import sum_by_halves
from ottava.overlap.transport import Hop, Transport

GATHER, SCATTER = "bulk_all_gather", "bulk_reduce_scatter"


def begin_gather(transport: Transport, operands: Operands) -> Callable[[], Operands]:
    """What gives the operands of all ranks' tokens, in either direction; they travel until it is called."""
    size, rank = transport.size, transport.rank
    with record_function(f"ottava.overlap.{GATHER}"):
        gathered = Gathered(operands, size, rank)
        sources = [(rank - distance) % size for distance in range(1, size)]
        hops = [Hop((rank + d) % size, source, gathered.tensors(source)) for d, source in enumerate(sources, 1)]
        exchange = transport.exchange(GATHER, hops)
        for hop in range(len(hops)):
            exchange.send(hop, gathered.tensors(rank))

    def finish() -> Operands:
        with record_function(f"ottava.overlap.{GATHER}"):
            for hop in range(len(hops)):
                exchange.wait(hop)
            exchange.finish()
            return gathered.whole()

    return finish


def begin_scatter(transport: Transport, y: Tensor, groups: Sequence[int]) -> Callable[[Tensor | None], Tensor]:
    """What gives this rank's tokens of the sum over ranks of y [M, N], plus a bias; they travel until it is called.

    groups: rows of y that belong to each group, of which a rank gets its part of each.
    """
    size, rank = transport.size, transport.rank
    with record_function(f"ottava.overlap.{SCATTER}"):
        parts = parts_of_ranks(y, groups, size)
        received = torch.empty_like(parts)
        received[rank] = parts[rank]
        steps = [((rank + d) % size, (rank - d) % size) for d in range(1, size)]
        exchange = transport.exchange(SCATTER, [Hop(target, source, [received[source]]) for target, source in steps])
        for hop, (target, _) in enumerate(steps):
            exchange.send(hop, [parts[target]])

    def finish(bias: Tensor | None = None) -> Tensor:
        with record_function(f"ottava.overlap.{SCATTER}"):
            for hop in range(len(steps)):
                exchange.wait(hop)
            exchange.finish()
            return sum_by_halves(received, bias)

    return finish


def parts_of_ranks(y: Tensor, groups: Sequence[int], size: int) -> Tensor:
    """y [M, N], each group's rows in the order of ranks, as [size, M/size, N], each rank's rows in the order of groups."""
    y = y.contiguous()
    if len(groups) == 1:
        return y.unflatten(0, (size, -1))
    return torch.cat([group.unflatten(0, (size, -1)) for group in y.split(list(groups))], dim=1)
