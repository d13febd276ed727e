"""The methods hide what they say they hide: on a virtual link whose collectives are as long as the products beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks
from overlap.link import ratios


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def check(ranks: Ranks, kind: str, method: str, direction: str, bar: float) -> None:
    for best in ranks.run(ratios, kind, method, direction, 4, bar, timeout=120):
        assert best["sequential"] >= 0.97, best
        assert best["overlapped"] <= bar, best


def test_pipelined_all_gather(two: Ranks) -> None:
    check(two, "column", "pipeline", "forward", 0.70)


def test_pipelined_reduce_scatter(two: Ranks) -> None:
    check(two, "row", "pipeline", "forward", 0.70)


def test_ring_on_two_ranks(two: Ranks) -> None:
    check(two, "column", "ring", "forward", 0.85)


def test_ring_on_four_ranks(four: Ranks) -> None:
    check(four, "column", "ring", "forward", 0.75)


def test_bulk_gather_under_dgrad_and_sum_under_wgrad(two: Ranks) -> None:
    check(two, "column", "bulk", "backward", 0.78)


@pytest.mark.extra
@pytest.mark.parametrize(
    ("kind", "method", "direction", "bar"),
    [
        ("row", "ring", "backward", 0.92),  # of two products, wgrad hides nothing
        ("row", "pipeline", "backward", 0.85),
        ("column", "pipeline", "backward", 0.78),
    ],
)
def test_backward_of_other_stages(two: Ranks, kind: str, method: str, direction: str, bar: float) -> None:
    check(two, kind, method, direction, bar)


@pytest.mark.extra
def test_pipelines_on_four_ranks(four: Ranks) -> None:
    check(four, "column", "pipeline", "forward", 0.70)
    check(four, "row", "pipeline", "forward", 0.70)
