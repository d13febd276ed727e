"""What a CUDA graph reads of a weight stays where it is when the weight is quantized anew."""

from __future__ import annotations

import pytest
import torch

from ottava import recipe
from ottava.quant.scheme import weight_scheme
from ottava.quant.weight import Weight
from ottava.quant.weight_operands import operands, tensors_of
from ottava.quant.weight_parts import join_parts
from ottava.quant.weight_renew import renew
from ottava.quant.weight_state import note_made

RECIPES = [
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
]


def _weights(chosen: recipe.Recipe, parts: int) -> list[Weight]:
    """Parts of one matrix, 128 rows each, with masters."""
    made = [Weight.mastered(f"w{i}", torch.randn(128, 256)) for i in range(parts)]
    if parts > 1:
        join_parts(made)
    made[0].memory.group.scheme = weight_scheme(chosen)
    return made


def _renew(weights: list[Weight]) -> None:
    renew((w.master, w.memory) for w in weights)  # type: ignore[misc]
    for weight in weights:
        note_made(weight)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("chosen", RECIPES, ids=lambda r: type(r).__name__)
def test_operands_have_new_values_at_the_old_addresses(chosen: recipe.Recipe, parts: int) -> None:
    torch.manual_seed(0)
    weights = _weights(chosen, parts)
    _renew(weights)
    group = weights[0].memory.group
    before = {name: t.data_ptr() for name, t in operands(group).items()}
    for weight in weights:
        weight.master.mul_(torch.linspace(0.5, 3.0, 256))  # type: ignore[union-attr]
    _renew(weights)
    assert {name: t.data_ptr() for name, t in operands(group).items()} == before

    other = _weights(chosen, parts)
    for target, source in zip(other, weights):
        target.master.copy_(source.master)  # type: ignore[union-attr, arg-type]
    _renew(other)
    expected = operands(other[0].memory.group)
    assert all(torch.equal(t, expected[name]) for name, t in operands(group).items())


def test_scales_of_one_weight_are_no_view_of_those_of_another() -> None:
    """Else a write to one would look to autograd like a write to all."""
    a, b = _weights(RECIPES[0], 1) + _weights(RECIPES[0], 1)
    _renew([a, b])
    version = b.memory.group.scale_inv._version
    _renew([a])
    assert b.memory.group.scale_inv._version == version
    assert a.memory.group.scale_inv.data_ptr() % 16 == 0


def test_a_weight_without_a_recipe_is_its_master_alone() -> None:
    weight = Weight.mastered("w", torch.randn(128, 256))
    assert [t.data_ptr() for t in tensors_of(weight)] == [weight.master.data_ptr()]  # type: ignore[union-attr]
