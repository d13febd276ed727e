"""How fast each rank multiplies, beside its peers, all at the same time: float32 on a CPU, bf16 and FP8 on a GPU."""

from __future__ import annotations

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


def measure(device: torch.device, seconds: float) -> Facts:
    """TFLOP/s by precision."""
    size = SIZES[device.type]
    facts: Facts = {"device": device.type}
    if device.type == "cpu":
        a = torch.randn(size, size)
        facts["float32"] = _rate(lambda: torch.mm(a, a), device, size, seconds)
        return facts
    half = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    facts["bf16"] = _rate(lambda: torch.mm(half, half), device, size, seconds)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        one, eight = torch.ones(1, device=device), half.to(torch.float8_e4m3fn)
        each = torch.nn.functional.ScalingType.TensorWise

        def product() -> Any:
            return torch.nn.functional.scaled_mm(eight, eight.t(), one, each, one, each, output_dtype=torch.bfloat16)

        facts["FP8"] = _rate(product, device, size, seconds)
    return facts


def _rate(work: Callable[[], Any], device: torch.device, size: int, seconds: float) -> float:
    work()
    best = 0.0
    for _ in range(WINDOWS):
        _wait(device)
        start, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < seconds / WINDOWS:
            for _ in range(1 if device.type == "cpu" else 8):
                work()
                count += 1
            _wait(device)
        best = max(best, count / taken)
    return best * 2e-12 * size**3


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
        for n in slow:
            message = f"{names[there[n]]}: {precision} products at {rates[n]:.3g} TFLOP/s, {rates[n] / usual:.0%} of its peers' {usual:.3g}"
            found.append(Finding("speed", "problem", message, (there[n],)))
        shown.append(f"{precision} {min(rates):.3g} to {max(rates):.3g} TFLOP/s")
    return found or [Finding("speed", "ok", ", ".join(shown))]
