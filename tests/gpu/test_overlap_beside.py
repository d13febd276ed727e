"""FSDP2's gathers and tensor-parallel messages on one GPU: neither waits for the other, and their copies have streams of their own.

Four ranks share the GPU. Tokens go through symmetric memory, weights through gloo, since NCCL refuses ranks that share a GPU.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ottava.bench.overlap_beside import Flight, plan_of, recorded_step
from ottava.bench.overlap_ranks import start_ranks

PRODUCTS = ("gemm", "nvjet", "cutlass", "matmul", "xmma")
"""Words in the names of kernels that multiply."""


def _rank(folder: str, device: torch.device) -> int:
    trace = Path(folder) / "trace.json"
    found = recorded_step(plan_of(2, "ring", "symmetric_memory", device), device, trace, held=True)
    (Path(folder) / f"flights-{dist.get_rank()}").write_bytes(pickle.dumps(found))
    dist.barrier()
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beside")
    assert start_ranks(4, _rank, str(path)) == 0
    return path


def test_weights_are_on_their_way_while_tokens_travel(folder: Path) -> None:
    """They cannot come before: a rank of the other shard sends its part only when this block is done."""
    for rank in (0, 1):
        found: list[Flight] = pickle.loads((folder / f"flights-{rank}").read_bytes())  # our own file
        ahead = next(flight for flight in found if flight.block == "layers.1")
        assert ahead.exchanges.count("ring_all_gather") == 2, ahead


def _launched_in(events: list[dict[str, Any]], prefix: str) -> Iterator[dict[str, Any]]:
    """What the GPU ran for calls inside ranges whose names begin so, in the same thread."""
    ranges = [e for e in events if e.get("cat") == "user_annotation" and str(e["name"]).startswith(prefix)]
    calls = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and any(r["tid"] == e["tid"] and r["ts"] <= e["ts"] <= r["ts"] + r["dur"] for r in ranges)
    }
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy") and event["args"].get("correlation") in calls:
            yield event


def test_their_copies_have_streams_of_their_own(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    computing = {
        e["args"]["stream"]
        for e in events
        if e.get("cat") == "kernel" and any(word in str(e["name"]).lower() for word in PRODUCTS)
    }
    copies = [e for e in _launched_in(events, "ottava.overlap.") if e["cat"] == "gpu_memcpy"]
    tokens = {e["args"]["stream"] for e in copies} - computing
    weights = {e["args"]["stream"] for e in _launched_in(events, "FSDP::all_gather")}
    assert computing and tokens and weights
    assert not tokens & weights, (tokens, weights, computing)
