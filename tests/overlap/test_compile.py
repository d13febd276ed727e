"""A compiled block takes a gather and its product as one op, and gives the bits of the block as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks
from overlap.compiled import compiled_equals_eager


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def check(ranks: Ranks, method: str, recipe: str, moved: list[str]) -> None:
    for found in ranks.run(compiled_equals_eager, method, recipe, timeout=240):
        assert found.pop("moved") == moved
        assert all(found.values()), found


def test_a_ring_in_a_compiled_block(ranks: Ranks) -> None:
    flows = ["bulk_all_gather", "bulk_reduce_scatter", "pipelined_reduce_scatter", "ring_all_gather"]
    check(ranks, "ring", "current", flows)


@pytest.mark.extra
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "mxfp8"])
@pytest.mark.parametrize("method", ["none", "bulk", "pipeline"])
def test_every_method_in_a_compiled_block(ranks: Ranks, method: str, recipe: str) -> None:
    flows = {
        "none": [],
        "bulk": ["bulk_all_gather", "bulk_reduce_scatter"],
        "pipeline": ["bulk_all_gather", "pipelined_all_gather", "pipelined_reduce_scatter"],
    }
    check(ranks, method, recipe, flows[method])
