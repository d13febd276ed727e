"""What a check says, and all of it together: as a table, as JSON, as an exit code."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ottava.train.summary import table

Status = Literal["ok", "not here", "warning", "problem"]
Facts = dict[str, Any]
"""What one rank has measured: plain values, since they travel as JSON."""


@dataclass(frozen=True)
class Finding:
    """One line.

    >>> Finding("host", "problem", "rank 3 on node-1: 64 MiB of shared memory; a container needs --shm-size", (3,))
    """

    check: str
    status: Status
    message: str
    ranks: tuple[int, ...] = ()
    """Those it is about; none for all."""


@dataclass(frozen=True)
class Check:
    """Something to look at: every rank measures for itself, and then all that was measured is judged together.

    `judge` gets the facts of all ranks in order, and what each is called ("rank 3 on node-1"). Facts with the key "not here" say why
    there is nothing to measure; those with "failed" say that measuring raised.
    """

    name: str
    measure: Callable[..., Facts]
    judge: Callable[[list[Facts], list[str]], list[Finding]]

    def findings(self, facts: list[Facts], names: list[str]) -> list[Finding]:
        """What `judge` says of the ranks that could measure, and a line for those that could not."""
        found = []
        for key, status in (("failed", "problem"), ("not here", "not here")):
            for reason in sorted({str(f[key]) for f in facts if key in f}):
                ranks = tuple(rank for rank, f in enumerate(facts) if str(f.get(key)) == reason)
                where = "" if len(ranks) == len(facts) else f"{listed([names[r] for r in ranks])}: "
                found.append(Finding(self.name, status, where + reason, ranks))  # type: ignore[arg-type]
        there = [rank for rank, f in enumerate(facts) if "failed" not in f and "not here" not in f]
        if there:
            judged = self.judge([facts[rank] for rank in there], [names[rank] for rank in there])
            # judge numbers the ranks that it was given
            found += [Finding(f.check, f.status, f.message, tuple(there[r] for r in f.ranks)) for f in judged]
        return found


def counted(count: int, noun: str) -> str:
    """
    >>> counted(2, "rank")
    '2 ranks'
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Report:
    """All findings of an examination."""

    ranks: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def sound(self) -> bool:
        """Nothing is a problem."""
        return all(finding.status != "problem" for finding in self.findings)

    def as_text(self) -> str:
        """A table, problems last, where they are seen."""
        order = {"not here": 0, "ok": 1, "warning": 2, "problem": 3}
        rows = [(f.check, f.status, f.message) for f in sorted(self.findings, key=lambda f: order[f.status])]
        problems = sum(f.status == "problem" for f in self.findings)
        warnings = sum(f.status == "warning" for f in self.findings)
        wrong = f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
        verdict = wrong if problems or warnings else "sound"
        return f"{table(rows)}\n\n{counted(self.ranks, 'rank')}, {self.seconds:.1f} s: {verdict}."

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "sound": self.sound,
            "ranks": self.ranks,
            "seconds": round(self.seconds, 2),
            "findings": [asdict(finding) for finding in self.findings],
        }


def listed(names: Sequence[str], most: int = 4) -> str:
    """A few names in one line.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c, d and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def differing(values: Sequence[Any], names: Sequence[str]) -> tuple[Any, dict[Any, list[int]]]:
    """(what most have, the others with their ranks). Of equally many, the first rank's counts.

    >>> differing(["2.11", "2.11", "2.10"], ["rank 0", "rank 1", "rank 2"])
    ('2.11', {'2.10': [2]})
    """
    usual = statistics.mode(values)
    odd: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        if value != usual:
            odd.setdefault(value, []).append(rank)
    return usual, odd


def slower(rates: Sequence[float], share: float) -> tuple[float, list[int]]:
    """(the usual rate, those that have less than `share` of it). Of two, the faster is the usual."""
    usual = statistics.median_high(rates)
    return usual, [n for n, rate in enumerate(rates) if rate < share * usual]
