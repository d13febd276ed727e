"""Tables of figures in the docs are the ones that the figures' files give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ottava.bench.tables import filled, from_file

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"device": "a GPU", "torch": "2.11"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_tables_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, ROOT) == text, f"run python -m ottava.bench.tables docs/{page.name}"


def test_performance_has_its_tables() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in ("layer", "step", "kernels", "gemm", "attention"):
        assert f"<!-- table: benchmarks/results/{name}-*.json -->" in text
    assert "| DelayedScaling |" in text


def test_a_step_table_has_ratios_and_says_who_could_not_run(tmp_path: Path) -> None:
    ran = {"ms": 200.0, "tokens_per_s": 81920.0, "mfu": None, "host_ms": 20.0, "launches": 1500, "allocated_gib": 31.4}
    results = {
        "delayed": {**ran, "ours": True, "ratio_to": {"torch": 1.34}},
        "torch": {**ran, "ours": False, "ratio_to": {"torch": 1.0}},
        "te": {"ours": False, "failed": "cannot be imported"},
    }
    document = {
        "benchmark": "step",
        "command": "ottava bench step",
        "date": "2026-01-01",
        "machine": MACHINE,
        "results": results,
    }
    path = tmp_path / "step-x.json"
    path.write_text(json.dumps(document))
    table = from_file(path, tmp_path)
    assert "| delayed (ours) | 200.0 | 81,920 | - | 31.4 | 20.0 | 1,500 | 1.34 |" in table
    assert "| te | cannot be imported |" in table and "[figures](../step-x.json)" in table


def test_figures_of_an_unknown_benchmark_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"benchmark": "knitting"}))
    with pytest.raises(ValueError, match="'knitting'"):
        from_file(path, tmp_path)
