"""The folder that a run will write to: does it take writes, how fast, and how much is free."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ottava.doctor.finding import Check, Facts, Finding, listed

GIB = 2.0**30
WRITTEN = 16 * 2**20
"""Bytes of the test: enough to see a slow disk, quick on a fast one."""
SLOW = 30e6
"""Bytes a second: below, a checkpoint of 100 GB takes an hour."""


def measure(options: Any) -> Facts:
    """Writes, syncs and removes a file in `options.run`, or in the nearest folder above that exists."""
    folder = Path(options.run).expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    facts: Facts = {"folder": str(folder), "needed": options.space_gib * GIB}
    space = os.statvfs(folder)
    facts["free"] = space.f_bavail * space.f_frsize
    data = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ottava-doctor-") as file:
            start = time.perf_counter()
            for _ in range(WRITTEN // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            facts["rate"] = WRITTEN / (time.perf_counter() - start)
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """Errors and too little space are problems, slowness is a warning."""
    found = []
    broken = [r for r, f in enumerate(facts) if "error" in f]
    full = [r for r, f in enumerate(facts) if f["free"] < f["needed"] and r not in broken]
    slow = [r for r, f in enumerate(facts) if f.get("rate", SLOW) < SLOW]
    for ranks, status, say in (
        (broken, "problem", lambda f: f"cannot be written to: {f['error']}"),
        (full, "problem", lambda f: f"{f['free'] / GIB:.2f} GiB free, {f['needed'] / GIB:g} are asked for (--space-gib)"),
        (slow, "warning", lambda f: f"{f['rate'] / 1e6:.0f} MB/s with {len(facts)} ranks writing at once"),
    ):  # fmt: skip
        if ranks:
            first = facts[ranks[0]]
            message = f"{listed([names[r] for r in ranks])}: {first['folder']}: {say(first)}"
            found.append(Finding("disk", status, message, tuple(ranks)))  # type: ignore[arg-type]
    if not found:
        rate, free = min(f["rate"] for f in facts), min(f["free"] for f in facts)
        found.append(
            Finding("disk", "ok", f"{facts[0]['folder']}: {free / GIB:,.0f} GiB free, {rate / 1e6:,.0f} MB/s a rank")
        )
    return found


CHECK = Check("disk", measure, judge)
