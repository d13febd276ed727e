"""What travels: quantized bytes with their scales, about half of bfloat16's, and no fewer messages than there should be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distributed.ranks import Ranks
from ottava.overlap import measuring
from overlap.cases import Case, options, run

RECIPES = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")
GATHERS = ("ring_all_gather", "pipelined_all_gather", "bulk_all_gather")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def _gathered(kind: str, method: str) -> dict[str, int]:
    """Bytes that a rank sends in all-gathers of a step, by recipe, with bfloat16 activations."""
    found = {}
    for recipe in RECIPES:
        with measuring() as meter:
            run(Case(kind, recipe, method, tokens=1024, dtype=torch.bfloat16), options(method))
        found[recipe] = sum(flow.bytes_sent for name, flow in meter.by_name.items() if name in GATHERS)
    return found


CASES = [("column", "ring"), ("grouped column", "pipeline")]
REST = [("column", "pipeline"), ("grouped column", "ring")]


@pytest.mark.parametrize(("kind", "method"), [*CASES, *(pytest.param(*case, marks=pytest.mark.extra) for case in REST)])
def test_inputs_of_every_recipe(ranks: Ranks, kind: str, method: str) -> None:
    """x travels in forward, and again for wgrad."""
    elements = 2 * 512 * 256
    for found in ranks.run(_gathered, kind, method):
        assert found["none"] == 2 * elements
        assert found["delayed"] == found["current"] == elements
        assert all(found[recipe] <= 0.55 * found["none"] for recipe in RECIPES[1:]), found


@pytest.mark.parametrize(("kind", "method"), [("row", "pipeline"), ("grouped row", "ring")])
def test_gradients_of_every_recipe(ranks: Ranks, kind: str, method: str) -> None:
    """dY travels once where its bytes can be transposed, and once in each direction where they cannot, in bytes both times."""
    elements = 512 * 512
    for found in ranks.run(_gathered, kind, method):
        assert found["none"] == 2 * elements
        assert found["delayed"] == found["current"] == elements
        for recipe in ("block", "mxfp8"):
            assert found[recipe] <= 2 * 0.55 * found["none"], found
