"""From the meta device to a sharded model that is stored in FP8: no rank ever holds more than its shard and one layer."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import ottava
from distributed.ranks import Ranks
from ottava import recipe

HIDDEN, INNER, LAYERS, WORLD = (
    512,
    1024,
    4,
    4,
)  # a rank's rows fill blocks of 128: thinner ones are padded to them for a moment
LAYER = 3 * HIDDEN * INNER * 4
"""Bytes of one layer's weights in float32, the type in which values are drawn."""
RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def allocations(trace: Path) -> list[int]:
    """Bytes that the CPU allocator has given (or taken back: negative), in order, from a profiler's trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    return [event["args"]["Bytes"] for event in sorted(found, key=lambda event: event["ts"])]


def build(name: str) -> nn.Sequential:
    options: dict[str, Any] = {"activation": "swiglu", "set_parallel_mode": True, "params_dtype": torch.float32}
    with ottava.quantized_model_init(recipe=RECIPES[name]):
        return nn.Sequential(*(ottava.LayerNormMLP(HIDDEN, INNER, device="meta", **options) for _ in range(LAYERS)))


def live_bytes(folder: str, names: list[str]) -> dict[str, tuple[int, int]]:
    """(peak, what is there at the end) of each recipe, in bytes, of all that this rank allocates."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    found = {}
    for name in ("current", *names):  # the first time fills caches
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            model = build(name)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for layer in model:
                layer.reset_parameters()
        path = Path(folder) / f"{torch.distributed.get_rank()}.json"
        trace.export_chrome_trace(str(path))
        totals = list(itertools.accumulate(allocations(path)))
        found[name] = (max(totals), totals[-1])
        del model
        gc.collect()  # modules are in cycles: what they free must not count as the next recipe's
    return found


def test_a_rank_holds_its_shard_and_at_most_one_layer_while_a_model_is_made(four_ranks: Ranks, tmp_path: Path) -> None:
    for answers in four_ranks.run(live_bytes, str(tmp_path), list(RECIPES)):
        for name, (peak, end) in answers.items():
            two_copies = 2 if name == "mxfp8" else 1
            packed = 2 if name == "nvfp4" else 1
            weights = LAYERS * LAYER // 4 // WORLD * two_copies // packed
            # Beside bytes: gains, biases, scales of all blocks, and the history of delayed scaling, 1,024 rows of 10 numbers a layer.
            assert weights <= end <= 1.25 * weights + LAYERS * (1024 * 10 * 4 + 16 * 1024), (name, end, weights)
            # E2M1 codes are found with 8-byte integers on a CPU, two for each element of what a rank holds of one weight.
            codes = HIDDEN * INNER // WORLD * 16 if name == "nvfp4" else 0
            assert peak - end <= LAYER + codes, (name, peak, end, LAYER)
