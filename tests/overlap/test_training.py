"""Runs with overlap have the losses and weights of runs without, bit for bit, whatever shards and recomputes around the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distributed.ranks import Ranks
from overlap.training import differs

EVERY = ["bulk", "ring", "pipeline", "auto"]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def check(ranks: Ranks, *arguments: Any) -> None:
    for wrong in ranks.run(differs, *arguments, timeout=400):
        assert not wrong, wrong[:4]


def test_two_layers_with_two_ranks_and_microbatches(two: Ranks) -> None:
    check(two, {"tp": 2}, ["current"], ["ring", "pipeline"], 2)


def test_fsdp2_outside_and_recomputed_activations(four_ranks: Ranks) -> None:
    check(four_ranks, {"tp": 2, "dp_shard": 2, "recompute": "selective"}, ["block"], ["ring"])


@pytest.mark.extra
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 4},
        {"tp": 2, "dp_shard": 2},
        {"tp": 2, "dp_replicate": 2, "dp_shard": 1},
        {"tp": 2, "dp_shard": 2, "reshard_after_forward": False, "prefetch": 2},
    ],
    ids=str,
)
def test_every_mesh_recipe_and_recomputation(
    four_ranks: Ranks, sizes: dict[str, Any], recompute: str, recipe: str
) -> None:
    check(four_ranks, {**sizes, "recompute": recompute}, [recipe], EVERY, 2)


@pytest.mark.extra
def test_hsdp_outside() -> None:
    with Ranks(8) as ranks:
        check(ranks, {"tp": 2, "dp_shard": 2, "dp_replicate": 2}, ["current", "mxfp8"], ["ring", "pipeline"])
