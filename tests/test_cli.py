"""The command line: help, wrong usage (exit 2), and the benchmark on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ottava.bench import BENCHMARKS
from ottava.cli.main import main


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ottava", *words], capture_output=True, text=True, timeout=120)


def test_help_and_version() -> None:
    assert "bench" in run("--help").stdout
    assert run("--version").stdout.startswith("ottava 0.")


@pytest.mark.parametrize(
    "words,message",
    [
        ([], "COMMAND"),
        (["bench"], "NAME"),
        (["bench", "leyer"], "invalid choice: 'leyer'"),
        (["bench", "layer", "--repeats", "0"], "must be at least 1, got 0"),
        (["bench", "gemm", "--shape", "3b"], "invalid choice: '3b'"),
        (["bench", "attention", "--rounds", "0"], "must be at least 1, got 0"),
        (["bench", "layer", "--recompute", "full"], "invalid choice: 'full'"),
    ],
)
def test_wrong_usage_is_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_layer_checks_measures_and_writes_its_figures(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "layer.json"
    assert main(["bench", "layer", "--repeats", "1", "--sequence", "64", "--output", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert set(figures["results"]) == {"bf16", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"}
    assert all(row["ms"] > 0 and row["relative_error"] < 0.15 for row in figures["results"].values())
    assert figures["machine"]["torch"] and figures["shape"]["sequence"] == 64
    assert "DelayedScaling" in capsys.readouterr().out


def test_every_benchmark_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in BENCHMARKS:
        with pytest.raises(SystemExit) as stopped:
            main(["bench", name, "--help"])
        assert stopped.value.code == 0 and "--output" in capsys.readouterr().out


def test_a_benchmark_without_its_packages_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_numpy(name: str) -> None:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr("ottava.cli.main.importlib.import_module", without_numpy)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "step"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "ottava bench step needs more packages: pip install 'ottava[train]'" in said
    assert "numpy" in said
