"""What a run left on disk, made safe to draw: numbers are numbers, tables are tables. A run's folder may be a stranger's.

What is not what it has to be is left out; all text is escaped where it is shown (report.py, charts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ottava.notices import warn_once
from ottava.train.metrics import NUMBERS, is_number


def readable(read: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """What `read` makes of a file beside the metrics; {} if there is none, or it is damaged, which is said.

    >>> readable(read_json, Path("runs/debug/summary.json")).get("outcome")
    """
    if not path.is_file():
        return {}
    try:
        return read(path)
    except ValueError as error:
        warn_once(f"{error} It is passed over.")
        return {}


def plain_steps(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without what should be a number and is none.

    >>> plain_steps([{"step": 1, "loss": "<script>", "lr": 0.1}])
    [{'step': 1, 'lr': 0.1}]
    """
    kept = [{k: v for k, v in line.items() if k not in NUMBERS or v is None or is_number(v)} for line in lines]
    return [line for line in kept if "step" in line]


def plain_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration the sections."""
    sections = {name: dict(keys) for name, keys in found.items() if isinstance(keys, Mapping)}
    gate = sections.get("gate", {})
    if not is_number(gate.get("warmup_steps", 0)):
        del gate["warmup_steps"]
    return sections


def plain_summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a summary the gates that can be shown."""
    gates = found.get("gates")
    kept = [gate for gate in gates if _is_gate(gate)] if isinstance(gates, list) else []
    return {**found, "gates": kept}


def _is_gate(gate: Any) -> bool:
    return isinstance(gate, dict) and all(gate.get(k) is None or is_number(gate[k]) for k in ("value", "limit"))


def plain_looks(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of fp8.jsonl: of each look the tensors with what was measured."""
    found = []
    for line in lines:
        tensors = line.get("tensors")
        kept = {
            str(name): {key: value for key, value in measured.items() if value is None or is_number(value)}
            for name, measured in (tensors.items() if isinstance(tensors, dict) else ())
            if isinstance(measured, dict)
        }
        if is_number(line.get("step")):
            found.append({**line, "tensors": kept})
    return found
