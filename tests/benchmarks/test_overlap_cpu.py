"""benchmarks/overlap_cpu.py: its parts run (here without a slow link, and small), and its bars are judged as it says."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed.ranks import Ranks

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "overlap_cpu.py"
SMALL = ["--hidden", "128", "--tokens", "64", "--trials", "1", "--steps", "1", "--patience", "0"]


def names_of_the_script() -> dict[str, Any]:
    """As `python benchmarks/overlap_cpu.py` finds its neighbours. Afterwards they are not in the way of tests of the same names."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        return runpy.run_path(str(SCRIPT))
    finally:
        sys.path.remove(str(SCRIPT.parent))


def part(name: str) -> dict[str, Any]:
    script = names_of_the_script()
    return json.loads(json.dumps(script["PARTS"][name](script["parse"](SMALL))))


def all_parts() -> dict[str, dict[str, Any]]:
    return {name: part(name) for name in ("gemm", "methods", "training")}


@pytest.fixture(scope="module")
def parts() -> dict[str, dict[str, Any]]:
    with Ranks(2) as ranks:
        return ranks.run(all_parts, timeout=240)[0]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return names_of_the_script()


def test_every_method_is_measured_against_one_after_the_other(parts: dict[str, dict[str, Any]]) -> None:
    assert parts["gemm"]["seconds"] > 0
    rows = parts["methods"]["rows"]
    assert set(rows) == {
        "ring: fc1 forward, all-gather",
        "ring: fc2 dgrad, all-gather",
        "bulk: fc1 dgrad, all-gather",
        "bulk: fc1 wgrad, reduce-scatter",
        "pipeline: fc2 forward, reduce-scatter",
        "pipeline: fc1 forward, all-gather",
        "pipeline: fc2 dgrad, all-gather",
    }
    for row in rows.values():
        assert row["ratios"] == [round(row["overlapped_ms"] / row["sequential_ms"], 3)]
        assert row["communication_to_gemm"] == row["communication_ms"] / row["gemm_ms"]


def test_training_has_the_losses_of_training_without_overlap(parts: dict[str, dict[str, Any]]) -> None:
    found = parts["training"]
    assert found["losses"]["none"] == found["losses"]["pipeline"] and found["largest_difference"] == 0
    assert found["losses"]["none"][1] < found["losses"]["none"][0]
    assert found["communication_s"] > 0 and found["hidden_share"] == 1 - found["exposed_s"] / found["communication_s"]


def test_figures_become_a_table(parts: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    from ottava.bench.tables import from_file

    about = {
        "benchmark": "overlap_cpu",
        "command": "x",
        "date": "2026-01-01",
        "machine": {"device": "a CPU", "torch": "2.13"},
    }
    path = tmp_path / "overlap-cpu-x.json"
    path.write_text(json.dumps({**about, "methods": parts["methods"], "training": parts["training"]}))
    page = from_file(path, tmp_path)
    assert "| ring: fc1 forward, all-gather |" in page and 'Training two layers, `overlap="pipeline"`' in page


@pytest.mark.parametrize(
    ("method", "ratio", "communication", "wrong"),
    [
        ("ring", 0.88, 1.0, ""),
        ("ring", 0.89, 1.0, "0.890 of sequential, above 0.88"),
        ("pipeline", 0.76, 1.0, "above 0.75"),
        ("bulk", 0.81, 1.0, "above 0.8"),
        ("bulk", 0.5, 0.6, "communication is 0.60 of the product, not 0.7 to 1.4"),
        ("bulk", 0.5, 1.5, "communication is 1.50 of the product"),
    ],
)
def test_a_missed_bar_is_named(
    script: dict[str, Any], method: str, ratio: float, communication: float, wrong: str
) -> None:
    found = {"rows": {"x": {"method": method, "ratio": ratio, "communication_to_gemm": communication}}}
    said = script["judge_methods"](found)
    assert (said == []) == (wrong == "") and wrong in "".join(said)


def test_training_has_to_hide_three_fifths_and_keep_its_losses(script: dict[str, Any]) -> None:
    fine = {"hidden_share": 0.61, "largest_difference": 0.0, "losses": {"none": [6.0]}}
    assert script["judge_training"](fine) == []
    assert "59% of communication is hidden" in script["judge_training"](fine | {"hidden_share": 0.59})[0]
    assert "losses differ by 1.00e-03" in script["judge_training"](fine | {"largest_difference": 1e-3})[0]
