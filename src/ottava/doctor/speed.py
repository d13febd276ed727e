"""How fast each rank multiplies, beside its peers, all at the same time: float32 on a CPU, bf16 and FP8 on a GPU.

[Note: whose slowness]
On a CPU a rank is slow because its core is, because something else runs there, because it is limited (cpulimit, cgroups), or because the
whole machine has more work than cores. The last says nothing about the rank. Which it is shows in how much of the time ranks run: where
the peers have their cores to themselves and one rank is slow, that rank has a problem; where the peers, too, wait for cores, it is a doubt.
The load average cannot tell them apart: it counts all cores together, and follows a minute late.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ottava.doctor.finding import Facts, Finding, slower

WINDOWS = 4
"""The best of these counts: a neighbour's burst is not this rank's fault, a slow core is slow in all of them."""
SIZES = {"cpu": 256, "cuda": 8192}
SLOW = {"cpu": 0.5, "cuda": 0.85}
"""Of the usual rate: cores are shared, GPUs are not."""
RUNS = 0.8
"""Share of the time: a process that runs as much has its cores to itself."""


def measure(device: torch.device, seconds: float) -> Facts:
    """TFLOP/s by precision; on a CPU also the share of the time that this process runs, see [Note: whose slowness]."""
    size = SIZES[device.type]
    facts: Facts = {"device": device.type}
    if device.type == "cpu":
        a = torch.randn(size, size, dtype=torch.float32)
        facts["float32"], facts["runs"] = _rate(lambda: torch.mm(a, a), device, size, seconds)
        return facts
    half = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    facts["bf16"], _ = _rate(lambda: torch.mm(half, half), device, size, seconds)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        one, eight = torch.ones(1, dtype=torch.float32, device=device), half.to(torch.float8_e4m3fn)
        each = torch.nn.functional.ScalingType.TensorWise

        def product() -> Any:
            return torch.nn.functional.scaled_mm(eight, eight.t(), one, each, one, each, output_dtype=torch.bfloat16)

        facts["FP8"], _ = _rate(product, device, size, seconds)
    return facts


def _rate(work: Callable[[], Any], device: torch.device, size: int, seconds: float) -> tuple[float, float]:
    """(TFLOP/s of the best window, share of the usual window that the threads of this process ran)."""
    work()
    best, runs = 0.0, []
    for _ in range(WINDOWS):
        _wait(device)
        start, ran, count = time.perf_counter(), time.process_time(), 0
        while (taken := time.perf_counter() - start) < seconds / WINDOWS:
            for _ in range(1 if device.type == "cpu" else 8):
                work()
                count += 1
            _wait(device)
        runs.append((time.process_time() - ran) / taken / torch.get_num_threads())
        best = max(best, count / taken)
    return best * 2e-12 * size**3, statistics.median(runs)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def better(known: Facts, new: Facts) -> Facts:
    """The higher rates of two measurements of one rank; what is no rate is the newer's.

    >>> better({"device": "cpu", "float32": 2.0}, {"device": "cpu", "float32": 1.0})
    {'device': 'cpu', 'float32': 2.0}
    """
    return {key: max(value, known.get(key, value)) if isinstance(value, float) else value for key, value in new.items()}


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """The slow ones, by name."""
    found, shown = [], []
    for precision in ("float32", "bf16", "FP8"):
        there = [rank for rank, fact in enumerate(facts) if precision in fact]
        if not there:
            continue
        rates = [facts[rank][precision] for rank in there]
        usual, slow = slower(rates, SLOW[facts[there[0]]["device"]])
        peers = [facts[rank].get("runs", 1.0) for n, rank in enumerate(there) if n not in slow]
        for n in slow:
            message = f"{names[there[n]]}: {precision} products at {rates[n]:.3g} TFLOP/s, {rates[n] / usual:.0%} of its peers' {usual:.3g}"
            found.append(_blamed(message, there[n], facts[there[n]].get("runs"), statistics.median(peers)))
        shown.append(f"{precision} {min(rates):.3g} to {max(rates):.3g} TFLOP/s")
    return found or [Finding("speed", "ok", ", ".join(shown))]


def _blamed(message: str, rank: int, runs: float | None, peers: float) -> Finding:
    """runs: share of the time that the slow rank does; None on a GPU. peers: the same of those that are not slow."""
    if runs is None:
        return Finding("speed", "problem", message, (rank,))
    if peers < RUNS:
        doubt = f" (machines are busy, its peers run {peers:.0%} of the time, too: look again when they are not)"
        return Finding("speed", "warning", message + doubt, (rank,))
    slow = "its cores are slow, or threads of its own are in its way"
    why = "something else has its cores, or it is limited" if runs < RUNS else slow
    return Finding("speed", "problem", f"{message}; it runs {min(runs, 1.0):.0%} of the time: {why}", (rank,))
