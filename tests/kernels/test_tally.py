"""What is not finite is counted where it is quantized, by module, stage and operand."""

from __future__ import annotations

import math

import pytest
import torch

import ottava
from ottava import recipe as recipes
from ottava.guard.witness import Slots
from ottava.kernels import tally

CPU = torch.device("cpu")
RECIPES = [getattr(recipes, name)() for name in (
    "Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling",
)]  # fmt: skip


def one_step(model: torch.nn.Module, x: torch.Tensor, recipe: recipes.Recipe, gradient: float = 1.0) -> torch.Tensor:
    with ottava.autocast(recipe=recipe):
        y = model(x)
    g = torch.ones_like(y)
    g[0, 0] = gradient
    y.backward(g)
    return y


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_an_operand_that_is_not_finite_is_named_by_its_slot(recipe):
    mlp = ottava.LayerNormMLP(32, 64, device="cpu")
    slots = Slots(mlp)
    x = torch.randn(32, 32)

    def found(**change: float):
        tally.reset(CPU)
        y = one_step(mlp, x, recipe, **change)
        return slots.first(tally.counts(CPU, slots.count).tolist()), y

    assert found()[0] is None
    named, y = found(gradient=math.inf)
    assert (named.operand, named.direction) == ("fc2.gradient", "backward") and y.isfinite().all()
    with torch.no_grad():
        mlp.fc2_weight[3, 3] = math.inf
    named, y = found()
    assert (named.operand, named.direction, named.value) == ("fc2.weight", "forward", "1 number")
    # Hidden: it saturates. (Only the scale of an MXFP8 block reaches so far that the product overflows.)
    assert y.isfinite().all() or isinstance(recipe, recipes.MXFP8BlockScaling)


def test_both_loops_count_into_the_same_slots():
    """The straight one of one rank, and the general one, which a watcher of products makes it take."""
    from ottava.nn.product import watching

    mlp, x = ottava.LayerNormMLP(32, 64, device="cpu"), torch.randn(32, 32)
    x[2, 3] = math.nan
    slots, counts = Slots(mlp), []
    for general in (False, True):
        tally.reset(CPU)
        if general:
            with watching(lambda a, b: None):
                one_step(mlp, x, recipes.Float8CurrentScaling())
        else:
            one_step(mlp, x, recipes.Float8CurrentScaling())
        counts.append(tally.counts(CPU, slots.count).tolist())
    assert counts[0] == counts[1] and counts[0][tally.FIRST] == 32  # the row is normalized


def test_weights_that_are_quantized_together_count_infinite_amax():
    tally.reset(CPU)
    torch.ops.ottava.amax_many([torch.ones(4, 4), torch.full((4, 4), math.inf)], [], [0, 0, 0, 0])
    assert tally.counts(CPU, 4).tolist() == [0, 1, 0, 0]
    tally.reset(CPU, weights=False)
    assert tally.counts(CPU, 4).tolist() == [0, 1, 0, 0]
    tally.reset(CPU)
    assert not tally.counts(CPU).any()
