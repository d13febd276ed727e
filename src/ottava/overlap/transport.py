"""What moves bytes between the ranks of a group while something else is computed.

A method says first what it will receive, hop by hop, and gives what it sends as it has it:

    exchange = transport.exchange("name", [Hop(target=next, source=previous, into=[buffer])])
    exchange.send(0, [own])             # travels from here on
    ...                                 # a product
    exchange.wait(0)                    # `buffer` is filled (on a GPU: for what is queued after)
    exchange.finish()                   # `own` has left: its memory may be written again

All ranks open the same exchanges in the same order, and hop i of one rank matches hop i of its target: of the same sizes.
Receives are posted before anything is sent: a message that nobody expects yet does not travel.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ottava.overlap import meter
from ottava.overlap.waits import waiting


class Hop(NamedTuple):
    """One step of an exchange: to `target` goes what is sent, from `source` comes what fills `into`. Ranks of the group."""

    target: int
    source: int
    into: list[Tensor]
    """Contiguous tensors, filled in order."""


class Exchange(ABC):
    """Hops under way. Transports override what begins with an underscore."""

    def __init__(self, name: str, hops: Sequence[Hop]) -> None:
        self.name, self.hops = name, list(hops)
        self._began: float | None = None

    def send(self, hop: int, tensors: list[Tensor]) -> None:
        """Sends contiguous `tensors` to the target of `hop`; they must not be written before `finish`."""
        if self._began is None:
            self._began = time.perf_counter()
        meter.sent(self.name, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        self._send(hop, tensors)

    def wait(self, hop: int) -> None:
        """Returns when what `hop` receives is there; on a GPU the current stream waits, not the host."""
        with record_function(f"ottava.overlap.wait {self.name}"), waiting(), meter.waiting(self.name, self.device):
            self._wait(hop)

    def finish(self) -> None:
        """Returns when all that was sent has left."""
        with record_function(f"ottava.overlap.wait {self.name}"), waiting(), meter.waiting(self.name, self.device):
            self._finish()
        if self._began is not None:
            meter.in_flight(self.name, self._began, time.perf_counter())

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Goes around what is computed between sends. An error in there leaves hops unsent that other ranks wait for."""
        try:
            yield
        except BaseException as error:
            self._abandon(error)
            raise

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.hops[0].into[0].device if self.hops else torch.device("cpu")

    @abstractmethod
    def _send(self, hop: int, tensors: list[Tensor]) -> None: ...

    @abstractmethod
    def _wait(self, hop: int) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    def _abandon(self, error: BaseException) -> None:
        """What is left to do where an error has ended it. Messages of a process group need nothing: the next exchange has other tags."""
        self._began = None


class Link(NamedTuple):
    """What a transport's messages take: all ranks have the same numbers."""

    bytes_per_second: float
    latency_s: float


class Transport(ABC):
    """Opens exchanges between the ranks of one group."""

    name: str = ""
    size: int = 1
    rank: int = 0
    bulk_by_collectives: bool = False
    """The backend's own collectives carry what travels under a product as a whole better than an exchange of messages does."""

    _group: weakref.ref[Any] | None = None

    def of_group(self, group: Any) -> None:
        """Takes its ranks from a process group; None: the world. The group is not kept alive: who ends it ends what serves it too,
        and the memory that it has on a GPU."""
        group = dist.group.WORLD if group is None else group
        self._group = weakref.ref(group)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @property
    def group(self) -> Any:
        """The process group."""
        group = None if self._group is None else self._group()
        if group is None:
            raise RuntimeError(
                f"{self.name}: its process group has been destroyed: make modules anew with the new group."
            )
        return group

    @abstractmethod
    def exchange(self, name: str, hops: Sequence[Hop]) -> Exchange:
        """Posts the receives of `hops`. name: of the method, for traces and meters."""

    def link(self) -> Link | None:
        """How fast messages are, where it was found out; None: as fast as the cost model thinks. All ranks call it together."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"


Wrap = Callable[[Transport], Transport]
_wrap: list[Wrap] = []


def wrapped(transport: Transport) -> Transport:
    """`transport`, or what `wrapping` puts around it."""
    for wrap in _wrap:
        transport = wrap(transport)
    return transport


@contextmanager
def wrapping(wrap: Wrap) -> Iterator[None]:
    """Every exchange in here goes through `wrap(transport)`: a slower link, or one that fails.

    >>> with wrapping(lambda transport: VirtualLink(transport, bytes_per_second=1e9)):
    ...     y = layer(x)
    """
    kept: dict[Transport, Transport] = {}

    def once(transport: Transport) -> Transport:  # a link has a state: one for each transport
        if transport not in kept:
            kept[transport] = wrap(transport)
        return kept[transport]

    _wrap.append(once)
    try:
        yield
    finally:
        _wrap.remove(once)
