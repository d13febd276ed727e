"""Milliseconds of a step on the device and on the host, and its memory."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def wait() -> None:
    """Until the GPU, if there is one, is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_times(step: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of each of `count` calls, one after another without a pause: on a GPU by its own clock."""
    wait()
    if not torch.cuda.is_available():
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    wait()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


class Waits:
    """Seconds that the host has spent waiting for the GPU inside `counting()`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Times every read of a number from the device and every synchronization that Python asks for."""
        places: list[tuple[Any, str]] = [
            (torch.Tensor, "item"), (torch.Tensor, "tolist"), (torch.Tensor, "__float__"), (torch.Tensor, "__bool__"),
            (torch.Tensor, "__int__"), (torch.Tensor, "cpu"), (torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize"),
        ]  # fmt: skip
        kept = [(where, name, vars(where).get(name)) for where, name in places]
        for where, name in places:
            setattr(where, name, self._timed(getattr(where, name)))
        try:
            yield
        finally:
            for where, name, own in kept:
                if own is None:
                    delattr(where, name)  # it was its parent's
                else:
                    setattr(where, name, own)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def host_times(step: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds that Python needs for each of `count` calls, without what it waits for the GPU. On a CPU: of the whole call."""
    times = []
    for _ in range(count):
        waits = Waits()
        wait()
        with waits.counting():
            begin = time.perf_counter()
            step()
            took = time.perf_counter() - begin
        times.append((took - (waits.seconds if torch.cuda.is_available() else 0.0)) * 1e3)
    wait()
    return times


def reset_memory() -> None:
    """Peaks count from here."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, float]:
    """Peaks since `reset_memory`, in GiB; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def median(values: list[float]) -> float:
    """Of at least one value."""
    return statistics.median(values)
