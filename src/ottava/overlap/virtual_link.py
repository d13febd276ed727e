"""`VirtualLink`: a real transport that seems to have a known bandwidth. It proves a schedule on any machine, loaded or not.

A hop arrives when the real one has, and not before the bytes that this rank sent in it would have passed a link that carries one
message after the other. Ranks do the same things at the same time, so what a rank sends stands for what it receives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from ottava.overlap.transport import Exchange, Hop, Link, Transport


class VirtualLink(Transport):
    """`inner` at `bytes_per_second`.

    >>> slow = VirtualLink(PointToPoint(group, device), bytes_per_second=30e6)
    """

    def __init__(self, inner: Transport, bytes_per_second: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"VirtualLink: bytes_per_second must be above 0, got {bytes_per_second}.")
        self.inner, self.bytes_per_second = inner, bytes_per_second
        self.name, self.size, self.rank = f"virtual link over {inner.name}", inner.size, inner.rank
        self.free_at = 0.0
        """When the last message that was given to the link has passed it, in seconds of `time.perf_counter`."""

    def exchange(self, name: str, hops: Sequence[Hop]) -> Exchange:
        """See `Transport`."""
        return _Delayed(self, name, hops)

    def link(self) -> Link:
        """See `Transport`."""
        return Link(self.bytes_per_second, 0.0)

    def pass_through(self, count: int) -> float:
        """When `count` bytes that are given to the link now have passed it."""
        self.free_at = max(time.perf_counter(), self.free_at) + count / self.bytes_per_second
        return self.free_at


class _Delayed(Exchange):
    def __init__(self, link: VirtualLink, name: str, hops: Sequence[Hop]) -> None:
        super().__init__(name, hops)
        self.link, self.inner = link, link.inner.exchange(name, hops)
        self.due: dict[int, float] = {}

    def _send(self, hop: int, tensors: list[Tensor]) -> None:
        self.inner._send(hop, tensors)
        self.due[hop] = self.link.pass_through(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def _wait(self, hop: int) -> None:
        self.inner._wait(hop)
        _sleep_until(self.due[hop])

    def _finish(self) -> None:
        self.inner._finish()
        _sleep_until(max(self.due.values(), default=0.0))

    def _abandon(self, error: BaseException) -> None:
        self.inner._abandon(error)


def _sleep_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > 0:
        time.sleep(left)
