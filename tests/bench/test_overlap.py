"""`ottava bench overlap` on CPU ranks: all twelve products, checked before they are timed; the crossing; the trace; the model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.ranks import Ranks
from ottava.bench import overlap
from ottava.bench.overlap_products import Case
from ottava.cli.main import main

WORDS = ["--shape", "tiny", "--repeats", "1", "--tokens", "128"]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    overlap.add_arguments(parser)
    return parser.parse_args([*WORDS, *words])


def measured(folder: str) -> None:
    """Every method, recipes with one copy and with two, a virtual link; the files of each."""
    cases = {
        "ring": (),
        "pipeline": ("--method", "pipeline", "--recipe", "Float8CurrentScaling"),
        "auto": ("--method", "auto", "--recipe", "MXFP8BlockScaling"),
        "bulk": ("--method", "bulk", "--link", "500"),
    }
    for name, words in cases.items():
        trace = ("--trace", f"{folder}/trace.json") if name == "ring" else ()
        sweep = [64] if name == "ring" else []
        assert (
            overlap.measure(options(*words, *trace, "--output", f"{folder}/{name}.json"), sweep, torch.device("cpu"))
            == 0
        )
    with pytest.raises(SystemExit, match="qkv forward is wrong: relative error 1.0000"):
        wrong = [torch.zeros(2)]
        overlap.check(
            Case("qkv", "forward", "all-gather", "ring", object, object, lambda: [torch.ones(2)], lambda: wrong)
        )


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("overlap")
    with Ranks(2) as ranks:
        ranks.run(measured, str(folder), timeout=240)
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


@pytest.mark.parametrize("method", ["ring", "pipeline", "auto", "bulk"])
def test_every_product_has_its_figures(figures: dict[str, Any], method: str) -> None:
    rows = {f"{row['product']} {row['direction']}": row for row in figures[method]["results"]}
    assert len(rows) == 12 and figures[method]["ranks"] == 2
    for name, row in rows.items():
        if row["collective"]:
            assert row["bound_ms"] == max(row["communication_ms"], row["gemm_ms"]) and row["hidden_share"] <= 1.0, name
            assert row["bytes_sent"] > 0 and row["relative_error"] <= 1e-2, name
        else:
            assert "sequential_ms" not in row and row["gemm_ms"] > 0, name
    without = {name for name, row in rows.items() if not row["collective"]}
    assert without == {"proj wgrad", "fc2 wgrad"} | ({"qkv wgrad", "fc1 wgrad"} if method == "pipeline" else set())


def test_methods_serve_the_products_of_the_documented_table(figures: dict[str, Any]) -> None:
    found = {
        (row["product"], row["direction"]): (row["collective"], row["method"]) for row in figures["ring"]["results"]
    }
    for product in ("qkv", "fc1"):
        assert found[product, "forward"] == ("all-gather", "ring")
        assert found[product, "dgrad"] == ("all-gather", "bulk")
        assert found[product, "wgrad"] == ("reduce-scatter", "bulk")
    for product in ("proj", "fc2"):
        assert found[product, "forward"] == ("reduce-scatter", "pipeline")
        assert found[product, "dgrad"] == ("all-gather", "ring")
        assert found[product, "wgrad"] == ("", "")


def test_fp8_gathers_have_half_the_bytes(figures: dict[str, Any]) -> None:
    def sent(name: str) -> int:
        return next(
            row["bytes_sent"]
            for row in figures[name]["results"]
            if row["product"] == "qkv" and row["direction"] == "forward"
        )

    assert sent("ring") == 64 * 64 * 4  # float32 on a CPU
    assert sent("pipeline") == 64 * 64
    assert sent("auto") == 64 * 64 + 64 * 64 // 32


def test_the_crossing_says_what_the_engine_chooses_at_each_size(figures: dict[str, Any]) -> None:
    rows = figures["ring"]["crossing"]
    assert {row["tokens"] for row in rows} == {64, 128} and {row["product"] for row in rows} == {
        "qkv",
        "proj",
        "fc1",
        "fc2",
    }
    for row in rows:
        cut = row["estimated_crossing"] is not None and row["tokens"] >= row["estimated_crossing"]
        assert (row["chosen"] != "none") == cut
    assert figures["bulk"]["crossing"] == []


def test_the_trace_has_named_ranges(figures: dict[str, Any]) -> None:
    names = {event.get("name") for event in figures["trace"]["traceEvents"]}
    assert {"qkv forward: all-gather, ring", "proj forward: reduce-scatter, pipeline"} <= names
    assert {
        "ottava.overlap.ring_all_gather",
        "ottava.overlap.wait ring_all_gather",
        "ottava.overlap.bulk_reduce_scatter",
    } <= names


def test_a_launcher_must_start_ranks_for_every_shard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "overlap", "--beside-fsdp", "--ranks", "2"]) == 2
    assert "needs 2 x --ranks processes" in capsys.readouterr().err


def test_the_model_needs_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", "--model", "h200", "--ranks", "8"]) == 0
    shown = capsys.readouterr().out
    assert "8 x NVIDIA H200, 8b, 8192 tokens, bf16" in shown and "| all ten |" in shown and "of communication" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "one rank has no collectives"),
        (["--ranks", "2", "--tokens", "100"], "100 tokens cannot be cut for 2 ranks: take a multiple of 64"),
        (["--sweep", "64,65"], "65 tokens cannot be cut"),
        (["--model", "h300"], "There is no GPU 'h300'"),
        (["--model", "a100", "--recipe", "DelayedScaling"], "no rate of DelayedScaling on NVIDIA A100"),
    ],
)
def test_wrong_usage_is_exit_code_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", *words]) == 2
    assert message in capsys.readouterr().err


def test_figures_become_a_table(figures: dict[str, Any], tmp_path: Path) -> None:
    from ottava.bench.tables import from_file

    path = tmp_path / "overlap-x.json"
    path.write_text(json.dumps(figures["ring"]))
    page = from_file(path, tmp_path)
    assert "| qkv forward | all-gather | ring |" in page
