"""`HybridScaling`: forward's products by one recipe, backward's by another. Compared with modules under each of the two alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe
from quant_cases import all_same, gradients, relative, same

CURRENT, BLOCK, MX = recipe.Float8CurrentScaling(), recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()
PAIRS = {
    "mx-current": (MX, CURRENT),
    "current-mx": (CURRENT, MX),
    "block-mx": (BLOCK, MX),
    "current-block": (CURRENT, BLOCK),
}
MODULES: dict[str, Any] = {
    "Linear": lambda **options: ottava.Linear(128, 256, **options),
    "LayerNormLinear": lambda **options: ottava.LayerNormLinear(128, 256, **options),
    "LayerNormMLP": lambda **options: ottava.LayerNormMLP(128, 256, activation="swiglu", **options),
    "GroupedLinear": lambda **options: ottava.GroupedLinear(2, 128, 256, **options),
    "TransformerLayer": lambda **options: ottava.TransformerLayer(
        128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal", **options
    ),
}


def build(module: str, chosen: recipe.Recipe, stored: bool) -> Any:
    torch.manual_seed(0)
    with ottava.quantized_model_init(enabled=stored, recipe=chosen):
        return MODULES[module](device="cpu")


def step(layer: Any, chosen: recipe.Recipe) -> tuple[Tensor, Tensor]:
    """Output and input gradient; the output's gradient does not depend on the output."""
    generator = torch.Generator().manual_seed(1)
    shape = (128, 1, 128) if isinstance(layer, ottava.TransformerLayer) else (128, 128)
    x = torch.randn(shape, generator=generator).requires_grad_()
    with ottava.autocast(recipe=chosen):
        y = layer(x, [64, 64]) if isinstance(layer, ottava.GroupedLinear) else layer(x)
    y.backward(torch.randn(y.shape, generator=generator))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.strict
@pytest.mark.parametrize("stored", [False, True], ids=["masters", "stored"])
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "GroupedLinear"])
@pytest.mark.parametrize("pair", PAIRS)
def test_one_product_each_way_is_that_of_its_recipe(pair: str, module: str, stored: bool) -> None:
    forward, backward = PAIRS[pair]
    chosen = recipe.HybridScaling(forward, backward)
    layer, ahead, back = (build(module, each, stored) for each in (chosen, forward, backward))
    (y, dx), (expected, _), (_, expected_dx) = step(layer, chosen), step(ahead, forward), step(back, backward)
    assert same(y, expected) and same(dx, expected_dx)
    assert all_same(gradients(layer), gradients(back))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("module", ["LayerNormMLP", "TransformerLayer"])
def test_layers_train(module: str, pair: str) -> None:
    chosen = recipe.HybridScaling(*PAIRS[pair])
    y, dx = step(build(module, chosen, False), chosen)
    expected, _ = step(build(module, PAIRS[pair][0], False), PAIRS[pair][0])
    stored, stored_dx = step(build(module, chosen, True), chosen)
    assert same(y, expected) and same(stored, y) and same(stored_dx, dx)
    plain, plain_dx = step(build(module, chosen, False), recipe.Float8CurrentScaling())
    assert relative(dx, plain_dx) < 0.15 and relative(y, plain) < 0.15


@pytest.mark.strict
@pytest.mark.parametrize("pair", PAIRS)
def test_recompute_gives_the_same_bits(pair: str) -> None:
    chosen = recipe.HybridScaling(*PAIRS[pair])
    found = []
    for recompute in ("none", "selective"):
        torch.manual_seed(0)
        layer = ottava.LayerNormMLP(128, 256, activation="swiglu", recompute=recompute, device="cpu")
        found.append((*step(layer, chosen), *gradients(layer)))
    assert all_same(*found)


@pytest.mark.strict
@pytest.mark.parametrize("pair", PAIRS)
def test_a_state_dict_has_both_formats_and_loads(pair: str) -> None:
    chosen = recipe.HybridScaling(*PAIRS[pair])
    layer, other = build("LayerNormMLP", chosen, True), build("LayerNormMLP", chosen, True)
    with torch.no_grad():
        layer.fc1_weight.mul_(3.0)
    before, _ = step(layer, chosen)
    state = layer.state_dict()
    assert {type(entry) for entry in state.values()} == {Tensor}
    other.load_state_dict(state)
    after, _ = step(other, chosen)
    assert same(before, after)
    plain = ottava.LayerNormMLP(128, 256, activation="swiglu", device="cpu")
    plain.load_state_dict(state)  # whose weights are in high precision: the values of rows
    assert torch.equal(plain.fc2_weight, layer.fc2_weight.dequantize())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, ottava.optimizers.FusedAdam])
@pytest.mark.parametrize("pair", PAIRS)
def test_optimizers_write_both_copies(pair: str, optimizer: Any) -> None:
    chosen = recipe.HybridScaling(*PAIRS[pair])
    layer = build("Linear", chosen, True)
    step(layer, chosen)
    optimizer(layer.parameters(), lr=0.1).step()
    y, dx = step(layer, chosen)
    fresh = build("Linear", chosen, True)
    _, dx_before = step(fresh, chosen)
    with torch.no_grad():
        fresh.weight.copy_(layer.weight.dequantize())
        fresh.bias.copy_(layer.bias)
    again, dx_again = step(fresh, chosen)
    # Backward multiplies by columns, which were rounded from the optimizer's values here and from rounded rows there.
    assert relative(again, y) < 1e-6 and relative(dx_again, dx) < 0.05 < relative(dx_before, dx)


def test_a_compiled_layer_gives_the_same_bits() -> None:
    chosen = recipe.HybridScaling(MX, CURRENT)
    layer = build("LayerNormLinear", chosen, False)
    eager = step(layer, chosen)
    layer.zero_grad()
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert all_same(step(compiled, chosen), eager)


def test_what_two_recipes_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="forward must be a Float8CurrentScaling.*got DelayedScaling"):
        recipe.HybridScaling(recipe.DelayedScaling(), CURRENT)
    with pytest.raises(ValueError, match="backward must be .*got NVFP4BlockScaling"):
        recipe.HybridScaling(MX, recipe.NVFP4BlockScaling())
    with pytest.raises(ValueError, match="both have one scale a tensor"):
        recipe.HybridScaling(CURRENT, recipe.Float8CurrentScaling(use_power_2_scales=True))
    with pytest.raises(ValueError, match="backward_override, fp8_dpa and fp8_mha of backward must be left"):
        recipe.HybridScaling(MX, recipe.Float8CurrentScaling(backward_override="dequantized"))
    layer = build("Linear", recipe.HybridScaling(MX, CURRENT), True)
    with pytest.raises(
        ValueError, match=r"holds its weight as e4m3:1x32/e4m3:tensor, but the recipe .* needs e4m3:1x32"
    ):
        step(layer, MX)
