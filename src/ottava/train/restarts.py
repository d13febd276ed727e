"""RUN/restarts.jsonl: every restart of a run, what it cost, and the share of the time that went into steps that count.

    lost = down + redone       seconds without a step, from the last line of metrics to the start of the next step;
                               seconds of steps that are done again
    effective training time ratio = seconds of steps that count / (the same + lost)

`modelled_ratio` is the same for a job that nobody has run: of so many hours between interruptions, steps of so many seconds.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ottava.notices import warn_once
from ottava.train.metrics import FILE as METRICS
from ottava.train.metrics import read_metrics
from ottava.untrusted.files import open_to_append, read_json, read_regular

FILE = "restarts.jsonl"
SUMMARY = "summary.json"
MOST_BYTES = 16 << 20
"""Of the file: some 60,000 restarts."""


@dataclass(frozen=True)
class Restart:
    """One of them."""

    attempt: int
    cause: str
    in_place: bool
    """Whether the other ranks kept their processes."""
    planned: bool
    """Whether the run had been asked to stop: the time until somebody started it again is nobody's loss."""
    step_before: int
    """Steps that were done before."""
    step: int
    """Steps that are done after."""
    down_s: float
    redone_s: float

    @property
    def lost_s(self) -> float:
        """Seconds."""
        return self.down_s + self.redone_s


def note_restart(folder: Path, attempt: int, done: int, cause: str = "", in_place: bool = False) -> Restart | None:
    """Before the lines of steps that will be done again are dropped: writes what the restart costs. None: there is nothing to restart.

    A disk that cannot be written to is no reason not to go on.
    """
    path = folder / METRICS
    if not attempt or not path.is_file():
        return None
    lines = list(read_metrics(path))
    last = lines[-1]["step"] if lines else 0
    changed = path.stat().st_mtime
    planned = not in_place and _ended_well(folder, changed)
    down = 0.0 if planned else max(_now(folder / FILE) - changed, 0.0)
    redone = math.fsum(float(line.get("step_s") or 0.0) for line in lines if line["step"] > done)
    found = Restart(
        attempt, cause or ("started again" if not planned else "continued"), in_place, planned, last, done, down, redone
    )
    try:
        with open_to_append(folder / FILE) as file:
            file.write(json.dumps(asdict(found)) + "\n")
    except OSError as error:
        warn_once(f"{folder / FILE} cannot be written: {error.strerror}.")
    return found


def _now(path: Path) -> float:
    """By the clock that stamps the files of the run, which may be a file server's, hours from ours; ours where nothing can be written."""
    try:
        with open_to_append(path) as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _ended_well(folder: Path, changed: float) -> bool:
    """Whether the attempt before wrote its summary: it was done, or stopped by a signal."""
    try:
        summary = folder / SUMMARY
        outcome = str(read_json(summary).get("outcome"))
        return summary.stat().st_mtime >= changed - 1.0 and outcome.startswith(("done", "stopped"))
    except (OSError, ValueError):  # there is none, or it is damaged
        return False


def read_restarts(folder: Path) -> list[Restart]:
    """All that a run has noted. What is damaged is passed over: the folder may be a stranger's."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        lines = read_regular(path, MOST_BYTES, "a list of restarts").splitlines()
    except (OSError, ValueError) as error:
        warn_once(f"{path} cannot be read, and is passed over: {error}")
        return []
    found = [_decode(line) for line in lines]
    if None in found:
        warn_once(f"{path} has a damaged line, which is passed over.")
    return [restart for restart in found if restart is not None]


def _decode(line: bytes) -> Restart | None:
    try:
        restart = Restart(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = {"cause": str, "in_place": bool, "planned": bool, "down_s": float, "redone_s": float}
    sound = all(type(value) is kinds.get(key, int) for key, value in vars(restart).items())
    return restart if sound and math.isfinite(restart.lost_s) else None


def effective_ratio(lines: Sequence[dict[str, Any]], restarts: Sequence[Restart]) -> float | None:
    """Share of the time that went into steps that count; None without any step.

    >>> effective_ratio([{"step": 1, "step_s": 99.0}], [])
    1.0
    """
    counted = sum(line.get("step_s") or 0.0 for line in lines)
    return counted / (counted + sum(restart.lost_s for restart in restarts)) if counted else None


def modelled_ratio(
    interval_s: float,
    step_s: float,
    state_every_s: float,
    recovery_s: float,
    overhead: float = 0.0,
) -> float:
    """The effective training time ratio of a job that is interrupted every interval_s seconds, on average.

    Each time it loses recovery_s, and what was done since the last state that is left: half the time between two of them (state_every_s:
    checkpoints, or copies in memory), and half a step, which is over nowhere. overhead: share of the time that making states takes.

        >>> modelled_ratio(3 * 3600, step_s=60, state_every_s=60, recovery_s=63, overhead=0.01) > 0.98
        True
    """
    # Of a state after every step there is nothing between but the step itself.
    since = max(state_every_s - step_s, 0.0) / 2 + step_s / 2
    return max(1.0 - (recovery_s + since) / interval_s, 0.0) * (1.0 - overhead)
