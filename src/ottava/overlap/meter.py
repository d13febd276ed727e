"""How much is sent, how long it travels, and how long computing waits for it.

    with measuring() as meter:
        loss = model(tokens, targets); loss.backward()
    meter.bytes_sent, meter.exposed_s, meter.by_name["ring_all_gather"]

Seconds of the host on a CPU; on a GPU the time between events around each wait, read when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Flow:
    """What one method has moved."""

    bytes_sent: int = 0
    messages: int = 0
    in_flight_s: float = 0.0
    """From the first send of an exchange until everything of it was waited for, of all exchanges together."""
    host_waits_s: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)
    """Of a GPU: before and after each wait."""

    @property
    def exposed_s(self) -> float:
        """Time that computing waited."""
        if self.events:
            self.events[-1][1].synchronize()
            self.host_waits_s += sum(before.elapsed_time(after) for before, after in self.events) / 1e3
            self.events.clear()
        return self.host_waits_s


class Meter:
    """What was moved while it was open. waits: whether the time that computing waits is taken too; on a GPU that is two events a wait."""

    def __init__(self, waits: bool = True) -> None:
        self.waits = waits
        self.by_name: dict[str, Flow] = {}
        """By the name of the method: "ring_all_gather", "pipelined_all_gather", "pipelined_reduce_scatter", "bulk_..."."""
        self.collectives: dict[str, int] = {}
        """Bytes that this rank sent in collectives of tensor parallelism that no method carried, by name."""

    def flow(self, name: str) -> Flow:
        """That of the method `name`."""
        return self.by_name.setdefault(name, Flow())

    @property
    def bytes_sent(self) -> int:
        """By this rank."""
        return sum(flow.bytes_sent for flow in self.by_name.values())

    @property
    def all_bytes_sent(self) -> int:
        """By this rank, in collectives that no method carried too."""
        return self.bytes_sent + sum(self.collectives.values())

    @property
    def in_flight_s(self) -> float:
        """Of all methods."""
        return sum(flow.in_flight_s for flow in self.by_name.values())

    @property
    def exposed_s(self) -> float:
        """Of all methods."""
        return sum(flow.exposed_s for flow in self.by_name.values())

    def __repr__(self) -> str:
        return f"Meter({self.bytes_sent} bytes sent, {self.in_flight_s:.4f} s in flight, {self.exposed_s:.4f} s waited for)"


_open: list[Meter] = []


@contextmanager
def measuring(waits: bool = True) -> Iterator[Meter]:
    """A meter of everything that is moved in here, in all threads: backward passes have their own. waits: see `Meter`."""
    meter = Meter(waits)
    _open.append(meter)
    try:
        yield meter
    finally:
        _open.remove(meter)


def sent(name: str, count: int) -> None:
    """`count` bytes set out."""
    for meter in _open:
        flow = meter.flow(name)
        flow.bytes_sent += count
        flow.messages += 1


def collective(name: str, count: float) -> None:
    """`count` bytes set out in a collective of the process group."""
    if _open and not torch.compiler.is_compiling():
        for meter in _open:
            meter.collectives[name] = meter.collectives.get(name, 0) + int(count)


def in_flight(name: str, began: float, ended: float) -> None:
    """An exchange was under way from `began` to `ended`, in seconds of `time.perf_counter`."""
    for meter in _open:
        meter.flow(name).in_flight_s += ended - began


def waiting(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Goes around a wait of the method `name`."""
    return _measured_wait(name, device) if any(meter.waits for meter in _open) else nullcontext()


@contextmanager
def _measured_wait(name: str, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        began = time.perf_counter()
        try:
            yield
        finally:
            for meter in _timed():
                meter.flow(name).host_waits_s += time.perf_counter() - began
        return
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    yield
    after.record()
    for meter in _timed():
        meter.flow(name).events.append((before, after))


def _timed() -> list[Meter]:
    return [meter for meter in _open if meter.waits]
