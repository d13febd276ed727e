"""The table of estimates beside measurements is made of the benchmark's files."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_runs_of_the_benchmark_are_compared(tmp_path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "plan_accuracy.py"))
    ours = {"ours": True, "ms": 230.0, "allocated_gib": 33.0, "overrides": "precision.recipe=DelayedScaling"}
    document = {
        "benchmark": "step",
        "shape": "1b",
        "machine": {"device": "NVIDIA H200"},
        "results": {"delayed": ours, "torch": {"ours": False, "ms": 267.6}, "broken": {"ours": True, "failed": "no"}},
    }
    path = tmp_path / "step.json"
    path.write_text(json.dumps(document))
    (row,) = script["compared"](path)
    assert row["run"] == "1b delayed" and 150 < row["estimated_ms"] < 350 and 25 < row["estimated_gib"] < 40
    page = script["filled"]((ROOT / "docs" / "planning.md").read_text(), [row])
    assert "| 1b delayed | 33.0 |" in page and script["filled"](page, [row]) == page


def test_the_page_has_the_estimates_of_today_and_they_are_near() -> None:
    """At least ten runs of an H200: memory within 5%, a step within 8%."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "plan_accuracy.py"))
    results = ROOT / "benchmarks" / "results"
    files = [*sorted(results.glob("plan-nvidia-*.json")), *sorted(results.glob("step-nvidia-*.json"))]
    rows = [row for file in files for row in script["compared"](file)]
    assert len(rows) >= 10
    for row in rows:
        assert abs(row["estimated_gib"] / row["gib"] - 1) <= 0.05, row
        assert abs(row["estimated_ms"] / row["ms"] - 1) <= 0.08, row
    page = (ROOT / "docs" / "planning.md").read_text()
    assert script["filled"](page, rows) == page, "run benchmarks/plan_accuracy.py with --page docs/planning.md"
