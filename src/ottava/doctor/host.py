"""What the machine gives a process: memory, shared memory, open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from ottava.doctor.finding import Check, Facts, Finding, listed

GIB = 2.0**30
LEAST_MEMORY, LEAST_SHARED = 2 * GIB, 1 * GIB
FILES, FILES_A_RANK = 1024, 8
"""Open files that a rank needs, and for each rank of the run: sockets to it."""
SHARED_MEMORY = "/dev/shm"


def measure(options: Any) -> Facts:
    """Of this machine and process."""
    facts: Facts = {"files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    memory = Path("/proc/meminfo")
    if memory.is_file():
        values = dict(line.split(":") for line in memory.read_text().splitlines() if ":" in line)
        facts["available"] = 1024 * int(values["MemAvailable"].split()[0])
    if os.path.isdir(SHARED_MEMORY):
        found = os.statvfs(SHARED_MEMORY)
        facts["shared"] = found.f_bavail * found.f_frsize
    return facts


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """What is too little, with what to do."""
    files = FILES + FILES_A_RANK * len(facts)
    rules = (
        (
            "available",
            LEAST_MEMORY,
            GIB,
            "GiB of memory available",
            "end what else runs there, or take a larger machine",
        ),
        ("shared", LEAST_SHARED, GIB, f"GiB free in {SHARED_MEMORY}", "a container needs --shm-size or --ipc=host"),
        ("files", files, 1, "open files allowed", f"ulimit -n {files} or more, before the launcher starts"),
    )
    found = []
    for key, least, unit, what, remedy in rules:
        short = [r for r, fact in enumerate(facts) if key in fact and 0 <= fact[key] < least]
        if short:
            least_of = min(facts[r][key] for r in short) / unit
            message = (
                f"{listed([names[r] for r in short])}: {least_of:.4g} {what}, {least / unit:g} are needed: {remedy}"
            )
            found.append(Finding("host", "problem", message, tuple(short)))
    if not found:
        known = [
            f"{min(f[key] for f in facts) / unit:,.0f} {what}"
            for key, _, unit, what, _ in rules
            if all(key in f for f in facts)
        ]
        found.append(Finding("host", "ok", "at least " + ", ".join(known)))
    return found


CHECK = Check("host", measure, judge)
