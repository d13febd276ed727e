"""`PointToPoint`: messages over a process group. gloo moves them beside the products of a CPU, NCCL on a stream of its own.

[Note: sizes] gloo ends the process when a message is longer than the buffer that waits for it. So a message's tag depends on its
length, and ranks tell each other first, in eight bytes, how much will come: ranks with different numbers of tokens are an error that
says so. What is empty is not sent. NCCL has no such header, which would make the host wait for the GPU.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ottava import torch_private
from ottava.overlap.transport import Exchange, Hop, Link, Transport

PROBE = 1 << 19  # bytes of the message that a link is measured with
_SERIALS, _LENGTHS = (1 << 11) - 1, 1 << 20  # exchanges and lengths that a tag of 31 bits tells apart
_PROBE_TAG = (1 << 31) - 1  # no exchange has it


class RankLost(dist.DistError):
    """A rank did not answer: it ended, or did something else than this one.

    >>> raise RankLost("...")
    """


class PointToPoint(Transport):
    """Sends and receives of a process group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.of_group(group)
        self.backend = backend_of(group, device)
        self.name = f"point-to-point over {self.backend}"
        self.bulk_by_collectives = self.backend == "nccl"
        self.serial = 0
        self._link: Link | None = None

    def link(self) -> Link | None:
        """gloo: measured once, between neighbours, and agreed on: a network may be a thousand times slower than shared memory. The
        slowest link counts. NCCL: what the cost model knows, since there a choice may change the last bits of a product."""
        if self._link is None and self.backend == "gloo":
            small, large = self._seconds(64), self._seconds(PROBE)
            times = torch.tensor([small, large], dtype=torch.float32)
            dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
            latency, long = times.tolist()
            self._link = Link(PROBE / max(long - latency, PROBE * 1e-11), latency)
        return self._link

    def _seconds(self, count: int) -> float:
        """Of a message of `count` bytes around the ring, the better of two after a first: a link may let a burst pass."""
        away, here, best = torch.zeros(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8), float("inf")
        for turn in range(3):
            dist.barrier(self.group)
            began = time.perf_counter()
            exchange = self.exchange("probe", [Hop((self.rank + 1) % self.size, (self.rank - 1) % self.size, [here])])
            exchange._send(0, [away])
            exchange._wait(0)
            exchange._finish()
            seconds = time.perf_counter() - began
            best = min(best, seconds) if turn else best
        return best

    def exchange(self, name: str, hops: Sequence[Hop]) -> Exchange:
        """See `Transport`."""
        self.serial += 1
        kind = _BatchedExchange if self.backend == "nccl" else _PostedExchange
        return kind(self, name, hops)

    def global_rank(self, rank: int) -> int:
        """What the world calls rank `rank` of the group."""
        return dist.get_global_rank(self.group, rank)

    def guarded(self, peer: int, name: str, action: Callable[[], Any]) -> Any:
        """`action()`; an error of the backend becomes one that names who is gone."""
        try:
            return action()
        except RankLost:
            raise
        except RuntimeError as error:
            raise RankLost(self._obituary(peer, name, error)) from error

    def _obituary(self, peer: int, name: str, error: RuntimeError) -> str:
        gone = [rank for rank in range(self.size) if rank != self.rank and self._is_gone(rank)]
        first = torch_private.first_report(
            self.group, "ottava/overlap/gone", str(self.global_rank(gone[0] if gone else peer))
        )
        named = first if first is not None else str(self.global_rank(peer))
        others = ", ".join(str(self.global_rank(rank)) for rank in gone) or "none"
        return (
            f"{name}: rank {named} was lost while rank {self.global_rank(self.rank)} exchanged with rank {self.global_rank(peer)} "
            f"(connections closed by now: {others}). It ended, or waits elsewhere for longer than the group's timeout. The backend says: "
            f"{str(error).splitlines()[0][:300]}"
        )

    def _is_gone(self, rank: int) -> bool:
        """Whether the connection to `rank` is closed. What is posted here is never received: the exchange has failed already."""
        try:
            dist.isend(torch.zeros(1, dtype=torch.uint8), group=self.group, group_dst=rank, tag=_PROBE_TAG)
        except RuntimeError:
            return True
        return False


class _PostedExchange(Exchange):
    """gloo: all receives are posted at once, each send when it is given."""

    def __init__(self, transport: PointToPoint, name: str, hops: Sequence[Hop]) -> None:
        super().__init__(name, hops)
        self.transport = transport
        self.serial = transport.serial  # others may be opened before this one has sent all
        self.receives = [[self._receive(hop.source, tensor) for tensor in hop.into if tensor.numel()] for hop in hops]
        self.sends: list[tuple[int, Any, Tensor]] = []  # peer, work, what must stay alive
        self.lengths = self._announce()

    def _announce(self) -> dict[int, tuple[Any, Tensor, int]]:
        """[Note: sizes]: by source, the header that comes, and what it should say."""
        outgoing: dict[int, int] = {}
        incoming: dict[int, int] = {}
        for hop in self.hops:
            count = sum(_bytes(tensor).numel() for tensor in hop.into)
            outgoing[hop.target] = outgoing.get(hop.target, 0) + count
            incoming[hop.source] = incoming.get(hop.source, 0) + count
        expected = {}
        for source, count in incoming.items():
            header = torch.empty(8, dtype=torch.uint8)
            expected[source] = (self._receive(source, header, header=True), header, count)
        for target, count in outgoing.items():
            self._post(target, torch.tensor([count], dtype=torch.int64).view(torch.uint8), header=True)
        return expected

    def _receive(self, source: int, tensor: Tensor, header: bool = False) -> Any:
        raw, group = _bytes(tensor), self.transport.group
        tag = self._tag(None if header else raw.numel())
        return self.transport.guarded(
            source, self.name, lambda: dist.irecv(raw, group=group, group_src=source, tag=tag)
        )

    def _post(self, target: int, tensor: Tensor, header: bool = False) -> None:
        raw, group = _bytes(tensor), self.transport.group
        tag = self._tag(None if header else raw.numel())
        work = self.transport.guarded(
            target, self.name, lambda: dist.isend(raw, group=group, group_dst=target, tag=tag)
        )
        self.sends.append((target, work, tensor))

    def _tag(self, length: int | None) -> int:
        """Of a message of `length` bytes; None: a header, whose tag no length has."""
        kind = _LENGTHS - 1 if length is None else zlib.crc32(length.to_bytes(8, "little")) % (_LENGTHS - 1)
        return (self.serial % _SERIALS) * _LENGTHS + kind

    def _send(self, hop: int, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():  # an expert without tokens
                self._post(self.hops[hop].target, tensor)

    def _check_length(self, source: int) -> None:
        if source not in self.lengths:
            return
        work, header, expected = self.lengths.pop(source)
        self.transport.guarded(source, self.name, work.wait)
        coming = int(header.view(torch.int64))
        if coming != expected:
            name = self.transport.global_rank
            raise ValueError(
                f"{self.name}: rank {name(source)} sends {coming} bytes where rank {name(self.transport.rank)} has {expected}: the "
                "ranks hold different numbers of tokens. Sequence parallelism needs the same number on each: pad the sequences."
            )

    def _wait(self, hop: int) -> None:
        source = self.hops[hop].source
        self._check_length(source)
        for work in self.receives[hop]:
            self.transport.guarded(source, self.name, work.wait)

    def _finish(self) -> None:
        for source in list(self.lengths):
            self._check_length(source)
        for target, work, _ in self.sends:
            self.transport.guarded(target, self.name, work.wait)
        self.sends.clear()


class _BatchedExchange(Exchange):
    """NCCL: the sends and receives of a hop are one group of calls, in the same order on all ranks; singly they could lock each other."""

    def __init__(self, transport: PointToPoint, name: str, hops: Sequence[Hop]) -> None:
        super().__init__(name, hops)
        self.transport = transport
        self.works: dict[int, list[Any]] = {}
        self.alive: list[Tensor] = []

    def _send(self, hop: int, tensors: list[Tensor]) -> None:
        target, source, into = self.hops[hop]
        group = self.transport.group
        calls = [dist.P2POp(dist.irecv, _bytes(t), group=group, group_peer=source) for t in into if t.numel()]
        calls += [dist.P2POp(dist.isend, _bytes(t), group=group, group_peer=target) for t in tensors if t.numel()]
        if calls:
            self.works[hop] = self.transport.guarded(source, self.name, lambda: dist.batch_isend_irecv(calls))
        self.alive += tensors

    def _wait(self, hop: int) -> None:
        for work in self.works.pop(hop, []):
            work.wait()

    def _finish(self) -> None:
        for hop in list(self.works):
            self._wait(hop)
        self.alive.clear()


def backend_of(group: Any, device: torch.device) -> str:
    """The backend that a group has for `device`: "gloo", "nccl", ..."""
    configured = dist.get_backend_config(group)
    for pair in str(configured).split(","):
        kind, _, backend = pair.rpartition(":")
        if kind in ("", device.type):
            return backend
    return str(configured)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
