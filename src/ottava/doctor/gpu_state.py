"""The state of each GPU, from nvidia-smi: clocks, ECC errors, what slows it down, its power cap, its free memory."""

from __future__ import annotations

import csv
import io
from typing import Any

from ottava.detect.command import run_command
from ottava.doctor.finding import Check, Facts, Finding

FIELDS = (
    "index", "uuid", "name", "clocks.sm", "clocks.max.sm", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active",
    "power.limit", "power.default_limit", "memory.free", "memory.total", "temperature.gpu",
)  # fmt: skip
SLOWED = {0x8: "hardware slowdown", 0x20: "software thermal limit", 0x40: "hardware thermal limit", 0x80: "power brake"}
"""Bits of the throttle reasons that a sound GPU does not have. Idle, application clocks and the power cap are not among them."""
LEAST_FREE = 0.9
"""Of a GPU's memory, before a run: less means that somebody else is on it."""


def parse(text: str) -> list[dict[str, str]]:
    """One dict a GPU, of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`.

    >>> parse("0, GPU-1, NVIDIA H200, 345, 1980, 0, 0x0000000000000001, 700.00, 700.00, 143000, 143771, 30")[0]["clocks.max.sm"]
    '1980'
    """
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    return [dict(zip(FIELDS, (cell.strip() for cell in row))) for row in rows if len(row) == len(FIELDS)]


def measure(options: Any) -> Facts:
    """All GPUs of this machine; the first rank of a machine speaks for it."""
    text = run_command(["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"])
    if text is None:
        return {"not here": "nvidia-smi is not here, so clocks, ECC, power and free memory are not known"}
    gpus = parse(text)
    return {"gpus": gpus} if gpus else {"not here": "nvidia-smi lists no GPU"}


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """Every GPU once, however many ranks its machine has."""
    found, seen = [], set()
    for rank, (fact, name) in enumerate(zip(facts, names)):
        host = name.partition(" on ")[2]
        for gpu in fact["gpus"]:
            if (gpu["uuid"], host) in seen:
                continue
            seen.add((gpu["uuid"], host))
            found += [
                Finding("GPU state", status, f"GPU {gpu['index']} of {host or 'this machine'}: {message}", (rank,))
                for status, message in _troubles(gpu)
            ]
    return found or [Finding("GPU state", "ok", f"{len(seen)} GPUs: no errors, nothing slows them, memory is free")]


def _troubles(gpu: dict[str, str]) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    errors = _number(gpu["ecc.errors.uncorrected.volatile.total"])
    if errors:
        found.append(("problem", f"{errors:.0f} uncorrected ECC errors since the last reset: reset it, or take it out"))
    try:
        reasons = int(gpu["clocks_throttle_reasons.active"], 16)
    except ValueError:
        reasons = 0
    slowed = [word for bit, word in SLOWED.items() if reasons & bit]
    if slowed:
        found.append(
            (
                "problem",
                f"{', '.join(slowed)} at {gpu['temperature.gpu']} C and {gpu['clocks.sm']} MHz of {gpu['clocks.max.sm']}",
            )
        )
    limit, usual = _number(gpu["power.limit"]), _number(gpu["power.default_limit"])
    if limit and usual and limit < usual:
        found.append(("warning", f"power capped at {limit:.0f} of {usual:.0f} W"))
    free, total = _number(gpu["memory.free"]), _number(gpu["memory.total"])
    if free is not None and total and free < LEAST_FREE * total:
        found.append(("warning", f"{(total - free) / 1024:.1f} of {total / 1024:.0f} GiB are in use"))
    return found


def _number(text: str) -> float | None:
    """None for "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


CHECK = Check("GPU state", measure, judge)
