"""`Clock`: where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint")
"""What is measured, in the order of a step."""
ON_HOST = ("data", "checkpoint")
"""The host's work, timed there also where there is a GPU."""


class Moment:
    """A point in time: of the host, or of the GPU's stream."""

    def __init__(self, on_device: bool) -> None:
        self._seconds, self._event = 0.0, None
        if on_device:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def since(self, earlier: Moment) -> float:
        """Seconds. Waits until the GPU has come to this moment."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) * 1e-3


class Span:
    """The moments of one step, to be read when the device is done with it.

    >>> seconds, parts = span.read()
    """

    def __init__(self, begin: Moment) -> None:
        self.begin = self.end = begin
        self.parts: list[tuple[str, str | None, Moment, Moment, str]] = []
        """(part, the part around it, begin, end, what of the part it was)"""
        self.tp_bytes = 0
        """That this rank sent to the other ranks of its layers meanwhile."""

    def read(self) -> tuple[float, dict[str, float]]:
        """(seconds of the step, seconds by part). A part inside another one counts as itself alone."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, outer, begin, end, _ in self.parts:
            took = end.since(begin)
            seconds[part] += took
            if outer is not None:
                seconds[outer] -= took
        return self.end.since(self.begin), seconds

    def of(self, kind: str) -> float:
        """Seconds of what was timed as `kind`."""
        return sum(end.since(begin) for _, _, begin, end, which in self.parts if which == kind)


class Clock:
    """Seconds by part. On a GPU the work is timed where it runs, by events, and nothing waits.

    >>> clock = Clock(torch.device("cpu"))
    >>> with clock("forward"):
    ...     loss = model(x)
    >>> clock.stop().read()[1]["forward"]
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._open: list[str] = []
        self.restart()

    @contextmanager
    def __call__(self, part: str, kind: str = "") -> Iterator[None]:
        """Adds the time of the `with` block to `part`. kind: what of the part it is, see `Span.of`."""
        on_device = self._on_device and part not in ON_HOST
        outer = self._open[-1] if self._open else None
        self._open.append(part)
        begin = Moment(on_device)
        try:
            yield
        finally:
            self._open.pop()
            self._span.parts.append((part, outer, begin, Moment(on_device), kind))

    def restart(self) -> None:
        """A step begins now: what came before (an evaluation, a sample) is not part of any."""
        self._span = Span(Moment(self._on_device))

    def stop(self) -> Span:
        """The step ends now."""
        self._span.end = Moment(self._on_device)
        return self._span
