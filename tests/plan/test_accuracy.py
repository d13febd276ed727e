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
