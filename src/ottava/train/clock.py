"""`Clock`: where the seconds of a step go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("data", "forward", "backward", "optimizer", "checkpoint")
"""What is measured, in the order of a step."""


class Clock:
    """Seconds by part. On a GPU the work is timed where it runs, by events, and nothing waits before `read`.

    >>> clock = Clock(torch.device("cpu"))
    >>> with clock("forward"):
    ...     loss = model(x)
    >>> clock.read()["forward"]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds the time of the `with` block to `part`. "data" and "checkpoint" are the host's work and timed there."""
        if self._device.type == "cuda" and part not in ("data", "checkpoint"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((part, begin, end))
            return
        before = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - before

    def pause(self) -> float:
        """Ends a step: waits for the GPU and returns the seconds since the step began."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._start

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last call. Call it after `pause`."""
        for part, begin, end in self._events:
            self._seconds[part] += begin.elapsed_time(end) * 1e-3
        found = {part: self._seconds[part] for part in PARTS}
        self._seconds.clear()
        self._events.clear()
        return found

    def restart(self) -> None:
        """A step begins now: what came before (an evaluation, a sample) is not part of any."""
        self._start = time.perf_counter()
