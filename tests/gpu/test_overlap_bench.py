"""`ottava bench overlap` with two ranks on one GPU: outputs agree, figures are there, and copies run beside the products."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ottava.cli.main import main

PRODUCTS = ("gemm", "nvjet", "cutlass", "matmul", "xmma")
"""Words in the names of kernels that multiply."""


@pytest.mark.parametrize("recipe", ["none", "Float8CurrentScaling", "Float8BlockScaling"])
def test_two_ranks_on_one_gpu_are_measured(tmp_path: Path, recipe: str) -> None:
    path, trace = tmp_path / "overlap.json", tmp_path / "trace.json"
    words = ["--ranks", "2", "--shape", "small", "--repeats", "2", "--sweep", "1024", "--recipe", recipe]
    assert main(["bench", "overlap", *words, "--trace", str(trace), "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(document["results"]) == 12 and document["transport"].startswith("symmetric memory")
    for row in document["results"]:
        assert row["gemm_ms"] > 0 and (not row["collective"] or row["overlapped_ms"] > 0)
    assert {row["tokens"] for row in document["crossing"]} == {1024, 2048}
    events = json.loads(trace.read_text())["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert {
        "ottava.overlap.ring_all_gather",
        "ottava.overlap.pipelined_reduce_scatter",
        "qkv forward: all-gather, ring",
    } <= names
    # Copies to the other rank are queued on streams on which nothing is multiplied.
    on_gpu = [
        (event["cat"], str(event["name"]).lower(), event["args"]["stream"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy")
    ]
    products = {stream for kind, name, stream in on_gpu if kind == "kernel" and any(word in name for word in PRODUCTS)}
    copies = {stream for kind, _, stream in on_gpu if kind == "gpu_memcpy"}
    assert products and copies - products
