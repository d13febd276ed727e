"""The bars of `gpu/test_ranks.py` on CPU ranks, and that they are bars: a model that does not update fails them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks
from distributed.update_parity import PLANS, Trained, bar_of, check_updates, on_ranks, one_process, update_errors

WIDTH, BATCH = 128, 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


whole_run = functools.cache(one_process)


def trained(ranks: Ranks, plan: str, recipe: str, lr: float = 1e-3) -> tuple[list[Trained], Trained, float]:
    """(the ranks' runs, one process's, the bar)."""
    whole, unquantized = (whole_run(WIDTH, r, 2 if plan == "fsdp2" else 1, BATCH, "cpu") for r in (recipe, "none"))
    return ranks.run(on_ranks, plan, WIDTH, recipe, BATCH, "cpu", lr), whole, bar_of(recipe, whole, unquantized)


@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_two_ranks_update_as_one(ranks: Ranks, plan: str, recipe: str) -> None:
    spread, whole, bar = trained(ranks, plan, recipe)
    assert spread[0].losses == pytest.approx(whole.losses, rel=1e-2)
    check_updates(spread, whole, bar)


def test_a_model_that_does_not_update_fails_the_bar(ranks: Ranks) -> None:
    for plan, recipe in (("fsdp2", "none"), ("tp", "current"), ("tp with spread tokens", "none")):
        spread, whole, bar = trained(ranks, plan, recipe, lr=0.0)
        assert spread[0].losses == pytest.approx(whole.losses, rel=2e-2)  # which losses alone would not show
        assert update_errors(spread, whole)["all"] == pytest.approx(1.0, abs=1e-6)
        with pytest.raises(AssertionError, match="the update is 1 off, more than"):
            check_updates(spread, whole, bar)


def test_one_parameter_that_does_not_update_fails_the_bar(ranks: Ranks) -> None:
    spread, whole, bar = trained(ranks, "fsdp2", "none")
    small = min(whole.start, key=lambda name: whole.start[name].numel())
    for part in spread:
        for i, (name, at, start) in enumerate(part.start):
            if name == small:
                part.end[i] = (name, at, start.clone())
    with pytest.raises(AssertionError, match=f"the update of {small} is 1 off"):
        check_updates(spread, whole, bar)


def test_a_run_with_another_learning_rate_and_one_with_a_part_missing_fail(ranks: Ranks) -> None:
    spread, whole, bar = trained(ranks, "tp", "none", lr=0.9e-3)
    with pytest.raises(AssertionError, match="the update is 0.1"):
        check_updates(spread, whole, bar)
    cut = copy.copy(spread[0])
    cut.start, cut.end = cut.start[1:], cut.end[1:]
    with pytest.raises(AssertionError, match="no rank has"):
        check_updates([cut], whole, bar=2.0)
