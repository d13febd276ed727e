"""The logs of a run's ranks, from its folder: `ottava logs RUN [--rank N]`, the first error of any rank first.

When one rank fails the others fail too, later and louder: their collectives time out. So what counts is who was first. Files:
    error-rank-N.txt             what `ottava train` keeps of a rank's error
    stalls/rank-N.txt            what a watchdog wrote
    logs/**/N/stderr.log         what `torchrun --log-dir RUN/logs --redirects 3` writes: logs/ID/attempt_A/LOCAL_RANK/stdout.log; where
                                 `ottava launch` has started it, a file `rank` beside has the rank among all nodes
    logs/rank-N.log              of anything else that names its files so
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TAIL = 40
"""Lines of a file that are shown."""
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)?(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|NonFinite)\b.*|Traceback \(most recent call last\):)$"
)
_LAST = re.compile(r"^(?:\[[^\]]*\]:?\s*)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|NonFinite)\b.*$")
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
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class RankError:
    """An error in a log."""

    log: RankLog
    lines: tuple[str, ...]
    """From the traceback on."""

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
    for path in [
        *folder.glob("error-rank-*.txt"),
        *(folder / "stalls").glob("rank-*.txt"),
        *(folder / "logs").rglob("*.log"),
    ]:
        named = re.fullmatch(r"(?:error-)?rank-(\d+)", path.stem)
        number = named[1] if named else _rank_of_folder(path.parent)
        if not number.isdigit() or not path.is_file():
            continue
        attempt = re.search(r"attempt_(\d+)", str(path.parent))
        found.append(RankLog(int(number), path, int(attempt[1]) if attempt else 0))
    wanted = [log for log in found if rank is None or log.rank == rank]
    return sorted(wanted, key=lambda log: (log.attempt, log.path.stat().st_mtime, log.rank))


def _rank_of_folder(folder: Path) -> str:
    try:
        return (folder / "rank").read_text(encoding="utf-8").strip()
    except OSError:
        return folder.name


def errors(folder: Path) -> list[RankError]:
    """The first error of each file of the newest attempt, oldest first; those that follow from another rank's end last."""
    logs = find_logs(folder)
    newest = max((log.attempt for log in logs), default=0)
    found = []
    for log in (log for log in logs if log.attempt == newest or "logs" not in log.path.parts):
        lines = log.text.splitlines()
        start = next((n for n, line in enumerate(lines) if _ERROR.match(line)), None)
        if start is not None:
            found.append(RankError(log, tuple(lines[start : start + TAIL])))
    return sorted(found, key=lambda error: error.is_consequence)


def first_error(folder: Path) -> RankError | None:
    """Whose error came first, as far as files tell; None if there is none."""
    return next(iter(errors(folder)), None)


def as_text(folder: Path, rank: int | None = None, lines: int = TAIL) -> str:
    """The first error, and the end of every file."""
    logs = find_logs(folder, rank)
    if not logs:
        whose = "its ranks" if rank is None else f"rank {rank}"
        raise ValueError(
            f"{folder} has no logs of {whose}: torchrun writes them with --log-dir {folder}/logs --redirects 3; `ottava train` keeps "
            "errors in error-rank-N.txt."
        )
    parts = []
    first = first_error(folder)
    if first is not None and rank in (None, first.log.rank):
        parts.append(f"First error: {first.last_line}\n" + "\n".join(f"  {line}" for line in first.lines))
    for log in logs:
        tail = log.text.splitlines()[-lines:]
        parts.append(f"==> rank {log.rank}: {log.path.relative_to(folder)}\n" + "\n".join(tail))
    return "\n\n".join(parts)
