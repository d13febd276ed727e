"""The logs of a run's ranks, from its folder: `ottava logs RUN [--rank N]`, the first error of any rank first.

When one rank fails the others fail too, later and louder: their collectives time out. So what counts is who was first. Files:
    logs/rank-N.log              what every rank of `ottava train` writes itself (train/rank_log.py); the last section is this start's
    logs/**/LOCAL/stderr.log     what `torchrun --log-dir RUN/logs --redirects 3` keeps: logs/ID/attempt_A/LOCAL_RANK/stdout.log. On
                                 several machines LOCAL says little; the rank's own log knows which rank it was (or a file
                                 `rank` beside, where `ottava launch` has started it)
    error-rank-N.txt             of a start that was refused
    stalls/rank-N.txt            what a watchdog wrote
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ottava.train.rank_log import END, ERROR, START
from ottava.untrusted.files import read_tail

TAIL = 40
"""Lines of a file that are shown."""
LONGEST = 2000
"""Letters of a line."""
WHO = {"time": (int, float), "size": (int,), "pid": (int,), "host": (str,)}
"""What the first line of a section must say."""
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)?(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|NonFinite)\b.*|Traceback \(most recent call last\):)$"
)
_LAST = re.compile(r"^(?:\[[^\]]*\]:?\s*)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|NonFinite)\b.*$")
COPY_S = 1.0
"""Seconds by which other files count as later: what torchrun keeps of a rank repeats the rank's own log, and files have coarse times."""
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "DistNetworkError", "ChildFailedError",
                "Socket Timeout", "Broken pipe")  # fmt: skip
"""Words of errors that follow from another rank's end."""


@dataclass(frozen=True)
class RankLog:
    """One file of one rank."""

    rank: int
    path: Path
    attempt: int = 0
    """Restart of the launcher that wrote it."""

    @property
    def lines(self) -> list[str]:
        """All of them, or the last few megabytes; of a very long one the beginning."""
        return [line[:LONGEST] for line in read_tail(self.path).splitlines()]


@dataclass(frozen=True)
class Section:
    """The last start of a rank, in its own log."""

    log: RankLog
    who: dict[str, Any]
    """Rank, number of ranks, machine, process, time and what launched it."""
    lines: tuple[str, ...]

    @property
    def ended(self) -> bool:
        """By itself, with or without an error."""
        return END in self.lines

    @property
    def error(self) -> tuple[float, tuple[str, ...]] | None:
        """(when, the traceback) of what ended it; None: nothing has."""
        at = next((n for n, line in enumerate(self.lines) if line.startswith(ERROR)), None)
        if at is None:
            return None
        return _seconds(self.lines[at]), tuple(line for line in self.lines[at + 1 :] if line != END) or (UNSAID,)


UNSAID = "an error of which nothing was written"


def _seconds(line: str) -> float:
    """When an error was noted; 0.0 if the line is damaged."""
    try:
        return float(line.removeprefix(ERROR))
    except ValueError:
        return 0.0


def last_section(log: RankLog) -> Section | None:
    """None: no log of this kind."""
    lines = log.lines
    starts = [n for n, line in enumerate(lines) if line.startswith(START)]
    if not starts:
        return None
    who = _decoded(lines[starts[-1]].removeprefix(START))
    if any(type(who.get(key)) not in kinds for key, kinds in WHO.items()):
        return None
    return Section(log, who, tuple(lines[starts[-1] + 1 :]))


@dataclass(frozen=True)
class RankError:
    """An error in a log."""

    log: RankLog
    lines: tuple[str, ...]
    """From the traceback on."""
    time: float
    """Seconds since 1970, as far as it is known."""

    @property
    def last_line(self) -> str:
        """What happened: the last line that names an error."""
        named = [line for line in self.lines if _LAST.match(line)]
        return f"rank {self.log.rank}: {(named or list(self.lines))[-1].strip()}"

    @property
    def is_consequence(self) -> bool:
        """It says that another rank has gone."""
        return any(word in line for line in self.lines for word in CONSEQUENCES)


def find_logs(folder: Path, rank: int | None = None) -> list[RankLog]:
    """The files of all ranks, or of one, oldest first.

    >>> [log.path.name for log in find_logs(Path("runs/debug"), rank=1)]
    """
    found = []
    known = _launched(folder)
    for path in [
        *folder.glob("error-rank-*.txt"),
        *(folder / "stalls").glob("rank-*.txt"),
        *(folder / "logs").rglob("*.log"),
    ]:
        named = re.fullmatch(r"(?:error-)?rank-(\d+)", path.stem)
        number = named[1] if named else known.get(path.parent.parts[-3:], _rank_of_folder(path.parent))
        if not number.isdigit() or not path.is_file():
            continue
        attempt = re.search(r"attempt_(\d+)", str(path.parent))
        found.append(RankLog(int(number), path, int(attempt[1]) if attempt else 0))
    wanted = [log for log in found if rank is None or log.rank == rank]
    return sorted(wanted, key=lambda log: (log.attempt, log.path.stat().st_mtime, log.rank))


def _launched(folder: Path) -> dict[tuple[str, ...], str]:
    """The rank, by the last parts (run, attempt, number on its machine) of the folder where a launcher keeps what it prints."""
    found = {}
    for path in (folder / "logs").glob("rank-*.log"):
        for line in read_tail(path).splitlines() if path.is_file() else ():
            beside = _decoded(line.removeprefix(START)).get("launcher") if line.startswith(START) else None
            if isinstance(beside, str):
                found[Path(beside).parts[-3:]] = path.stem.removeprefix("rank-")
    return found


def _decoded(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rank_of_folder(folder: Path) -> str:
    try:
        return read_tail(folder / "rank", 100).strip()
    except ValueError:  # there is none
        return folder.name


def errors(folder: Path) -> list[RankError]:
    """The first error of each file of the newest start, oldest first; those that follow from another rank's end last."""
    logs = find_logs(folder)
    sections = [section for log in logs if log.path.parent == folder / "logs" and (section := last_section(log))]
    own = {section.log.path for section in sections}
    newest = max(sections, key=lambda s: s.who["time"], default=None)
    if newest is not None:  # ranks that this start does not have are of an earlier, larger one
        sections = [section for section in sections if section.log.rank < newest.who["size"]]
    since = {section.log.rank: section.who["time"] for section in sections}
    found = [RankError(s.log, s.error[1], s.error[0]) for s in sections if s.error is not None]
    attempt = max((log.attempt for log in logs), default=0)
    for log in logs:
        beside = log.path.parent == folder / "logs" or "logs" not in log.path.parts[:-1]
        when = log.path.stat().st_mtime
        if log.path in own or (log.attempt != attempt and not beside) or when < since.get(log.rank, 0.0):
            continue
        lines = log.lines
        start = next((n for n, line in enumerate(lines) if _ERROR.match(line)), None)
        if start is not None:
            found.append(RankError(log, tuple(lines[start : start + TAIL]), when + COPY_S))
    if found and all(error.is_consequence for error in found):
        found += [_gone(section) for section in sections if not section.ended]
    return sorted(found, key=lambda error: (error.is_consequence, error.time))


def _gone(section: Section) -> RankError:
    """A rank that has not ended while others miss it."""
    who = section.who
    line = f"KilledError: process {who['pid']} on {who['host']} ended without a word: killed (out of memory?), or its machine is gone"
    return RankError(section.log, (line,), section.log.path.stat().st_mtime)


def first_error(folder: Path) -> RankError | None:
    """Whose error came first, as far as files tell; None if there is none."""
    return next(iter(errors(folder)), None)


def as_text(folder: Path, rank: int | None = None, lines: int = TAIL) -> str:
    """The first error, and the end of every file."""
    logs = find_logs(folder, rank)
    if not logs:
        whose = "its ranks" if rank is None else f"rank {rank}"
        raise ValueError(
            f"{folder} has no logs of {whose}: ranks of `ottava train` write logs/rank-N.log when they begin; what they print is kept by "
            f"torchrun --log-dir {folder}/logs --redirects 3."
        )
    parts = []
    first = first_error(folder)
    if first is not None and rank in (None, first.log.rank):
        parts.append(f"First error: {first.last_line}\n" + "\n".join(f"  {line}" for line in first.lines))
    for log in sorted(logs, key=lambda log: (log.attempt, log.rank)):  # of one rank the oldest first
        tail = log.lines[-lines:]
        parts.append(f"==> rank {log.rank}: {log.path.relative_to(folder)}\n" + "\n".join(tail))
    return "\n\n".join(parts)
