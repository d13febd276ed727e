"""Gates: what a run must reach, judged over its steps after a warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ottava.train.config import GateSection


@dataclass(frozen=True)
class Gate:
    """One gate and what was measured.

    >>> Gate("min_mfu", limit=0.40, value=0.37).passed
    False
    """

    name: str
    limit: float
    value: float | None
    """None: nothing was measured, which is a failure too."""

    @property
    def passed(self) -> bool:
        """Whether the run may go through."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.name.startswith("min_") else self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it."""
        return {**asdict(self), "passed": self.passed}

    def row(self) -> tuple[str, str, str, str]:
        """(gate, limit, measured, by how much it failed)."""
        form = ".1%" if self.name == "min_mfu" else ".3f"
        if self.value is None:
            return self.name, format(self.limit, form), "nothing", "FAILED"
        gap = f"FAILED by {abs(self.value - self.limit):{form}}"
        return self.name, format(self.limit, form), format(self.value, form), "passed" if self.passed else gap


def judge(section: GateSection, steps: Sequence[dict[str, Any]]) -> list[Gate]:
    """The gates that are set, over lines of metrics.jsonl.

    >>> judge(GateSection(min_mfu=0.4, warmup_steps=0), [{"step": 1, "mfu": 0.45}])
    [Gate(name='min_mfu', limit=0.4, value=0.45)]
    """
    after = [line for line in steps if line["step"] > section.warmup_steps]

    def values(key: str) -> list[float]:
        return [line[key] for line in after if line.get(key) is not None]

    gates = []
    if section.min_mfu is not None:
        gates.append(Gate("min_mfu", section.min_mfu, statistics.median(values("mfu")) if values("mfu") else None))
    if section.max_reserved_gib is not None:
        gates.append(Gate("max_reserved_gib", section.max_reserved_gib, max(values("peak_reserved_gib"), default=None)))
    return gates
