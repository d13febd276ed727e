"""The benchmarks run on a GPU, small: their checks hold there, and every contender that is installed runs."""

from __future__ import annotations

import importlib.util
import json

import pytest

from ottava.bench import attention, gemm, kernels
from ottava.cli.main import main


def test_all_contenders_of_a_step_agree_with_the_plain_model(tmp_path) -> None:
    path = tmp_path / "step.json"
    words = ["--shape", "tiny", "--contenders", "bf16,current,delayed,block,torch-eager,torch,torchao,torchao-gather"]
    quick = ["--steps", "2", "--warmup", "1", "--visits", "2", "--profile", "--output", str(path)]
    assert main(["bench", "step", *words, *quick]) == 0
    results = json.loads(path.read_text())["results"]
    known = {"torchao", "torchao-gather"} if importlib.util.find_spec("torchao") is None else set()
    assert {name: row["failed"] for name, row in results.items() if "failed" in row}.keys() == known
    for name in ("bf16", "current", "torch"):
        row = results[name]
        assert row["allocated_gib"] > 0 and row["launches"] > 0 and row["profile"]["kinds"]["gemm"]["ms"] > 0
        assert row["allocated_before_gib"] < 0.3  # workspaces of libraries, but nothing of those who came before


@pytest.mark.parametrize(
    "case", [*kernels.cases(kernels.Sizes(hidden=256, ffn=512, heads=4, kv_heads=2))], ids=lambda c: c.name
)
def test_kernels_give_the_bytes_of_their_references(case: kernels.Case) -> None:
    kernels.check(case, "cuda")
    row = kernels.measure(case, 512, copy=4e12, rounds=2, device="cuda")
    assert row["bytes"] > 0 and row["ms"] > 0


@pytest.mark.parametrize("kind", gemm.KINDS)
def test_products_are_those_of_their_operands(kind: str) -> None:
    assert gemm.check(kind, "cuda") < 0.01


def test_attention_by_backend_is_near_float64(tmp_path) -> None:
    path = tmp_path / "attention.json"
    assert main(["bench", "attention", "--shape", "1b", "--rounds", "2", "--output", str(path)]) == 0
    row = json.loads(path.read_text())["results"]["ottava"]
    assert row["relative_error"] < attention.LIMIT and row["forward_ms"] > 0


def test_layer_peers_agree_with_the_plain_layers(tmp_path, monkeypatch) -> None:
    from ottava.bench import layer

    monkeypatch.setattr(layer, "Shape", lambda **sizes: layer.SMALL)
    path = tmp_path / "layer.json"
    assert main(["bench", "layer", "--repeats", "2", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    assert "ms" in document["peers"]["torch"] and "ms" in document["peers"]["torch-compile"]
    assert document["results"]["DelayedScaling"]["peak_gib_selective"] > 0
