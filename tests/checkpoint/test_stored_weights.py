"""Weights that are stored in FP8: bytes, scales and masters go from mesh to mesh bit for bit."""

from __future__ import annotations

from pathlib import Path

from checkpoint.stored_cases import cases
from distributed.ranks import Ranks

RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]


def test_bytes_scales_and_masters_on_1_2_and_3_ranks(tmp_path: Path) -> None:
    problems = cases(str(tmp_path), RECIPES, ["fully_shard"], [])
    with Ranks(2) as ranks:
        for found in ranks.run(cases, str(tmp_path), RECIPES, ["shard_model"], ["1-fully_shard"]):
            problems += found
    with Ranks(3) as ranks:  # uneven
        sources = ["1-fully_shard", "2-shard_model"]
        for found in ranks.run(cases, str(tmp_path), RECIPES, ["fully_shard"], sources):
            problems += found
    problems += cases(str(tmp_path), RECIPES, ["fully_shard"], ["2-shard_model", "3-fully_shard"])
    assert problems == []
