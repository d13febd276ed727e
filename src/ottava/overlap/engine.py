"""`Engine`: what tensor-parallel strategies ask to run a collective beside a product.

    engine = Engine(group, Schedule.of("ring"))
    y, whole = engine.gather_multiply(operands, multiply, features)   # y = all_gather(x) @ w.T, and all_gather(x)
    y = engine.multiply_scatter(operands, multiply, features)(bias)   # reduce_scatter(x @ w.T) + bias
    operands = engine.begin_gather(operands); ...; operands()         # under whatever stands in between
    dx = engine.begin_scatter(y, groups); ...; dx()

Each returns None where it does not overlap: the strategy does then what it does without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ottava import torch_private
from ottava.nn.operand import token_dims
from ottava.nn.strategy import Multiply, Operands, nothing
from ottava.notices import leads, warn_once
from ottava.overlap import bulk, pipeline, ring
from ottava.overlap.bits import exact_chunks
from ottava.overlap.cost import Choice, Product, choose, machine_of
from ottava.overlap.schedule import Schedule
from ottava.overlap.transport import Transport
from ottava.overlap.transports import transport_of


class Engine:
    """The methods of one stage over one group."""

    def __init__(self, group: Any, schedule: Schedule) -> None:
        self.group, self.schedule = group, schedule
        self.size = dist.get_world_size(group)

    def transport(self, tensor: Tensor) -> Transport | None:
        """What carries messages of tensors like this one; None: nothing does."""
        if torch_private.is_fake(tensor) or tensor.device.type == "meta":
            return None
        return transport_of(self.group, self.schedule.transport, tensor.device)

    def gather_multiply(
        self, operands: Operands, multiply: Multiply, features: int, under: Callable[[], None] = nothing
    ) -> tuple[Tensor, Operands] | None:
        """(the product of all ranks' tokens, their operands) from this rank's. features: columns of the product.

        under: starts what may travel under the products; called when nothing that they need is left to be sent.
        """
        transport = self.transport(operands[0].data) if self.schedule.gather != "none" else None
        if transport is None or not _tokens(operands):
            return None
        choice = self.choose_gather(operands, features)
        if choice.method == "ring":
            return ring.gather_multiply(transport, operands, multiply, under)
        if choice.method == "pipeline":
            return pipeline.gather_multiply(transport, operands, multiply, under, self.schedule.splits)
        return None

    def multiply_scatter(
        self,
        operands: Operands,
        multiply: Multiply,
        features: int,
        dtype: torch.dtype = torch.bfloat16,
        dgrad: bool = False,
    ) -> Callable[[Tensor | None], Tensor] | None:
        """What gives this rank's tokens of the sum over ranks of the product, plus a bias. operands: of all tokens.

        dtype: of the product, in which it travels. dgrad: it is that of a column's dgrad.
        """
        method = self.schedule.scatter_dgrad if dgrad else self.schedule.scatter
        if method in ("none", "bulk"):
            return None
        transport = self.transport(operands[0].data)
        if transport is None or not _tokens(operands) or any(operand.data.shape[0] % self.size for operand in operands):
            return None
        if not self.choose_scatter(operands, features, dtype, dgrad).overlaps:
            return None
        return pipeline.multiply_scatter(transport, operands, multiply, self.schedule.splits)

    def begin_gather(self, operands: Operands) -> Callable[[], Operands] | None:
        """What gives the operands of all ranks' tokens."""
        transport = self.transport(operands[0].data) if self.schedule.gather_wgrad == "bulk" else None
        if transport is None or transport.bulk_by_collectives:
            return None
        return bulk.begin_gather(transport, operands)

    def begin_scatter(self, y: Tensor, groups: Sequence[int]) -> Callable[[Tensor | None], Tensor] | None:
        """What gives this rank's tokens of the sum over ranks of y. groups: rows of y in each group."""
        # "auto", and a pipeline that had too few tokens: a product that is not cut costs nothing.
        transport = self.transport(y) if self.schedule.scatter_dgrad in ("bulk", "auto", "pipeline") else None
        if transport is None or transport.bulk_by_collectives or any(rows % self.size for rows in groups):
            return None
        return bulk.begin_scatter(transport, y, groups)

    # ------------------------------------------------------------------------------------------------------------- choices

    def choose_gather(self, operands: Operands, features: int) -> Choice:
        """How the gather of these operands goes with their product."""
        product = gathered_product(operands, features, self.size)
        return self._choose("gather", self.schedule.gather, product, operands[0].data.device)

    def choose_scatter(self, operands: Operands, features: int, dtype: torch.dtype, dgrad: bool = False) -> Choice:
        """How the sum of the product of these operands goes with it."""
        product = scattered_product(operands, features, dtype)
        method = self.schedule.scatter_dgrad if dgrad else self.schedule.scatter
        if dgrad and method == "auto":
            return Choice("none", 0.0, 0.0, "the sum goes under wgrad as a whole")
        return self._choose("scatter", method, product, operands[0].data.device)

    def _choose(self, collective: str, method: str, product: Product, device: torch.device) -> Choice:
        s = self.schedule
        transport = transport_of(self.group, s.transport, device) if s.minimum_tokens is None else None
        machine = machine_of(device.type, None if transport is None else transport.link())
        choice = choose(collective, method, product, self.size, machine, s.splits, s.minimum_tokens)
        if not choice.overlaps and s.requested:
            _warn_of_first(s.requested, f"a {collective} is not overlapped", choice.why)
        if choice.inexact is not None:
            _warn_of_first(
                s.requested or ("overlap_minimum_tokens",),
                f"a {collective} is cut as ordered, and the last bits may differ from those without overlap",
                choice.inexact,
            )
        return choice


_warned: set[tuple[tuple[str, ...], str]] = set()


def _warn_of_first(requested: tuple[str, ...], what: str, why: str) -> None:
    """Once for each thing that is said, with the first numbers that were met."""
    if (requested, what) not in _warned and leads():
        _warned.add((requested, what))
        warn_once(f"ottava: {', '.join(requested)}: {what}: {why}.")


def gathered_product(operands: Operands, features: int, size: int) -> Product:
    """The sizes of a product of all ranks' tokens, and of what travels for it. operands: of this rank's."""
    return Product(
        size * _tokens(operands),
        _contraction(operands),
        features,
        size * travelling_bytes(operands),
        operands[0].scheme is not None,
        exact_chunks(operands),
    )


def scattered_product(operands: Operands, features: int, dtype: torch.dtype) -> Product:
    """The sizes of a product of all tokens whose result, in `dtype`, is summed over ranks."""
    tokens = _tokens(operands)
    travelling = tokens * features * dtype.itemsize
    return Product(tokens, _contraction(operands), features, travelling, operands[0].scheme is not None)


def travelling_bytes(operands: Operands) -> int:
    """Bytes that each other rank gets of these operands: data, and the scales where they belong to tokens."""
    count = 0
    for operand in operands:
        count += operand.data.numel() * operand.data.element_size()
        if token_dims(operand).scale is not None and operand.scale_inv is not None:
            count += operand.scale_inv.numel() * operand.scale_inv.element_size()
    return count


def _tokens(operands: Operands) -> int:
    return sum(operand.data.shape[0] for operand in operands)


def _contraction(operands: Operands) -> int:
    operand = operands[0]
    return operand.data.shape[1] * (1 if operand.scheme is None else operand.scheme.elements_per_byte)


__all__ = ["Engine", "gathered_product", "scattered_product", "travelling_bytes"]
