"""Bars that a benchmark's figures must reach: `--gate tokens_per_s=82000`."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

GATE_FAILED = 3
"""Exit code of a run that misses one."""
AT_LEAST = ("tokens_per_s", "mfu", "ratio_to_")
AT_MOST = ("ms", "host_ms", "allocated_gib", "reserved_gib")


@dataclass(frozen=True)
class Gate:
    """One bar: `figure` of `contender` (None: the fastest of ours) must be at least or at most `value`."""

    contender: str | None
    figure: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """From the command line.

        >>> Gate.parse("delayed:ratio_to_torchao=1.18")
        Gate(contender='delayed', figure='ratio_to_torchao', value=1.18)
        """
        words, equals, value = text.rpartition("=")
        contender, _, figure = words.rpartition(":")
        known = figure in AT_MOST or figure.startswith(AT_LEAST)
        try:
            number = float(value)
        except ValueError:
            known = False
        if not equals or not known:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not [NAME:]FIGURE=VALUE with one of {', '.join((*AT_LEAST, *AT_MOST))} (ratio_to_PEER)"
            )
        return cls(contender or None, figure, number)

    @property
    def at_most(self) -> bool:
        """Whether less is better."""
        return self.figure in AT_MOST


@dataclass(frozen=True)
class Verdict:
    """A gate and what was found; None: there is no such figure, which fails."""

    gate: Gate
    contender: str | None
    found: float | None

    @property
    def passed(self) -> bool:
        """Whether the bar is reached."""
        if self.found is None:
            return False
        return self.found <= self.gate.value if self.gate.at_most else self.found >= self.gate.value

    def row(self) -> dict[str, Any]:
        """For the JSON."""
        return {**asdict(self.gate), "contender": self.contender, "found": self.found, "passed": self.passed}

    def __str__(self) -> str:
        sign = "at most" if self.gate.at_most else "at least"
        found = "nothing" if self.found is None else f"{self.found:g}"
        outcome = "reached" if self.passed else "MISSED"
        return f"gate {self.gate.figure} of {self.contender or 'ours'}: {found}, wanted {sign} {self.gate.value:g}: {outcome}"


def judge(gates: list[Gate], results: dict[str, dict[str, Any]]) -> list[Verdict]:
    """results: {contender: figures}, with "ours" and, where it ran, "ms"."""
    ran = {name: row for name, row in results.items() if "ms" in row}
    ours = {name: row for name, row in ran.items() if row.get("ours")}
    verdicts = []
    for gate in gates:
        name = gate.contender or min(ours, key=lambda n: ours[n]["ms"], default=None)
        row = ran.get(name, {}) if name is not None else {}
        if gate.figure.startswith("ratio_to_"):
            found = row.get("ratio_to", {}).get(gate.figure.removeprefix("ratio_to_"))
        else:
            found = row.get(gate.figure)
        verdicts.append(Verdict(gate, name, found))
    return verdicts
