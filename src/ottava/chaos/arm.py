"""`arm`: in every rank of a job under faults, makes the faults strike when the run comes to their places."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ottava.chaos.plan import BEATS, LAUNCHER, Fault, read
from ottava.chaos.strike import SLOW_TIMES, pause, strike
from ottava.train import watchdog

PLAN, LAUNCHER_FILE = "faults.json", "launcher"


def struck(folder: Path, number: int) -> Path:
    """The file that says that a fault has struck: when, and at which step."""
    return folder / f"struck-{number}.json"


def changed(folder: Path, number: int) -> Path:
    """The file that says that a fault of numbers has changed one."""
    return folder / f"changed-{number}"


class Armed:
    """The faults of a run, in one rank. folder: where plan and marks lie, on a disk that no fault touches; run: the run's folder."""

    def __init__(self, folder: Path, run: Path, rank: int) -> None:
        self._folder, self._run, self._rank = folder, run, rank
        self._faults = read(folder / PLAN)
        self._next = 0
        self._slow = 0

    def __call__(self, step: int, phase: str) -> None:
        """With every beat of the watchdog."""
        if self._slow:
            self._slow -= 1
            pause()
        fault = self._pending()
        if fault is None or BEATS.get(fault.phase, fault.phase) != phase or step < fault.step:
            return
        if self._rank == max(fault.rank, 0) and self._mark(fault, step):
            self._slow = SLOW_TIMES if fault.kind == "slow" else 0
            launcher = self._launcher() if fault.rank == LAUNCHER else 0
            strike(fault, self._run, launcher, changed(self._folder, fault.number).touch)

    def _pending(self) -> Fault | None:
        """The first that has not struck yet."""
        while self._next < len(self._faults) and struck(self._folder, self._next).exists():
            self._next += 1
        return self._faults[self._next] if self._next < len(self._faults) else None

    def _mark(self, fault: Fault, step: int) -> bool:
        """Whether it strikes now: once, whatever comes of it."""
        try:
            file = os.open(struck(self._folder, fault.number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(file, json.dumps({"time": time.time(), "step": step, "phase": fault.phase}).encode())
        os.close(file)
        return True

    def _launcher(self) -> int:
        while not (path := self._folder / LAUNCHER_FILE).is_file():
            time.sleep(0.01)
        return int(path.read_text())


def arm(folder: str, run: str, rank: int) -> None:
    """In a rank, before anything else: faults of the start strike now, the others when their place comes."""
    armed = Armed(Path(folder), Path(run), rank)
    watchdog.observers.append(armed)
    armed(0, "start")
