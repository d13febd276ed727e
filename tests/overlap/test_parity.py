"""Overlap changes when bytes travel and in how many chunks products are made, and no bit of any result.

Sums over ranks too: partial results are added in float32 and in the order of ranks, whatever moved them, so on a CPU even the
reduce-scatters are equal where numerics would allow them to be close.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from distributed.ranks import Ranks
from distributed.tp_ranks import RECIPES
from overlap.cases import Case, compare
from overlap.grouped import grouped_as_one_process

METHODS = ("bulk", "ring", "pipeline")
KINDS_OF_SCALES = ("none", "delayed", "block", "mxfp8")
"""One recipe for each kind of scale: `test_every_method_mode_recipe_and_bias` has them all."""


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def check(ranks: Ranks, cases: list[Case]) -> None:
    for rank, results in enumerate(ranks.run(compare, cases, timeout=240)):
        wrong = [(rank, case, name, error) for case, name, error, equal in results if not equal]
        assert not wrong, wrong[:6]


def steps_of(recipe: str) -> int:
    return 2 if recipe == "delayed" else 1


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_on_two_ranks(two: Ranks, kind: str, method: str) -> None:
    check(two, [Case(kind, recipe, method, bias=True, steps=steps_of(recipe)) for recipe in RECIPES])


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_scales_on_four_ranks(four: Ranks, kind: str, method: str) -> None:
    check(four, [Case(kind, recipe, method, bias=False, tokens=512) for recipe in KINDS_OF_SCALES])


@pytest.mark.parametrize("method", ["ring", "pipeline"])
def test_experts_whose_tokens_are_spread(two: Ranks, method: str) -> None:
    """Blocks are filled by one group and not by the other."""
    kinds = ("grouped column", "grouped row")
    check(two, [Case(kind, recipe, method, tokens=1024) for kind in kinds for recipe in KINDS_OF_SCALES])


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_spread_experts_are_those_of_one_process(two: Ranks, recipe: str) -> None:
    for errors in two.run(grouped_as_one_process, recipe):
        assert all(error <= 1e-6 for error in errors.values()), errors


@pytest.mark.parametrize("method", METHODS)
def test_layers_with_a_norm_an_activation_and_recomputation(two: Ranks, method: str) -> None:
    check(two, [Case("mlp", r, method, recompute=r != "delayed", steps=steps_of(r)) for r in KINDS_OF_SCALES])


@pytest.mark.parametrize("tokens", [96, 40])
def test_tokens_that_do_not_fill_chunks_or_blocks(two: Ranks, tokens: int) -> None:
    """48 or 20 tokens of a rank in 4 pieces; a block of 128 or 32 would need tokens of both ranks."""
    recipes = ("none", "current", "block", "mxfp8") if tokens % 32 == 0 else ("none", "current")
    kinds = ("column", "row")
    check(two, [Case(k, r, m, tokens=tokens) for k in kinds for r in recipes for m in ("ring", "pipeline")])


def test_bfloat16(two: Ranks) -> None:
    check(
        two,
        [Case(k, r, m, dtype=torch.bfloat16) for k in ("column", "row") for r in ("none", "block") for m in METHODS],
    )


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["column", "row", "grouped column", "grouped row"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_method_mode_recipe_and_bias(two: Ranks, four: Ranks, size: int, method: str, kind: str) -> None:
    cases = [
        Case(kind, recipe, method, bias, tokens=1024, steps=steps_of(recipe))
        for recipe, bias in itertools.product(RECIPES, (False, True))
    ]
    check(two if size == 2 else four, cases)
