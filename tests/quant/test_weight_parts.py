"""Stored weights that are parts of one matrix (gate and up, separate q, k and v): what is done to one leaves the others' values."""

from __future__ import annotations

import copy

import pytest
import torch

import ottava
from ottava import recipe
from ottava.quant.weight import Weight

RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def gated_mlp(name: str, seed: int = 0) -> ottava.LayerNormMLP:
    """Rows of gate end inside of a block of 128."""
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe=RECIPES[name]):
        return ottava.LayerNormMLP(
            64, 96, activation="swiglu", set_parallel_mode=True, params_dtype=torch.float32, device="cpu"
        )


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return ((found - wanted).norm() / wanted.norm()).item()


def values(parameter: torch.Tensor) -> torch.Tensor:
    """A copy, in high precision."""
    return parameter.dequantize().detach() if isinstance(parameter, Weight) else parameter.detach().clone()


ROUNDING = {"current": 0.04, "block": 0.04, "mxfp8": 0.04, "nvfp4": 0.15}
"""Of a second rounding: E4M3 has steps of 2^-3, E2M1 of 2^-1."""


@pytest.mark.parametrize("name", RECIPES)
def test_writing_one_part_keeps_the_values_of_the_other(name: str) -> None:
    mlp = gated_mlp(name)
    gate, up = mlp.fc1_gate_weight.dequantize(), mlp.fc1_up_weight.dequantize()
    with torch.no_grad():
        mlp.fc1_gate_weight.mul_(30.0)
    assert distance(mlp.fc1_gate_weight.dequantize(), 30 * gate) < ROUNDING[name]
    assert distance(mlp.fc1_up_weight.dequantize(), up) < ROUNDING[name]


@pytest.mark.parametrize("name", RECIPES)
def test_copying_one_part_from_another_weight_keeps_the_values_of_the_other(name: str) -> None:
    mlp, other = gated_mlp(name), gated_mlp(name, seed=1)
    with torch.no_grad():
        other.fc1_gate_weight.mul_(30.0)
        other.fc1_up_weight.mul_(30.0)
    up = mlp.fc1_up_weight.dequantize()
    with torch.no_grad():
        mlp.fc1_gate_weight.copy_(other.fc1_gate_weight)
    assert distance(mlp.fc1_gate_weight.dequantize(), other.fc1_gate_weight.dequantize()) < ROUNDING[name]
    assert distance(mlp.fc1_up_weight.dequantize(), up) < ROUNDING[name]


def test_copying_between_weights_of_equal_scales_keeps_their_bytes() -> None:
    mlp = gated_mlp("current")
    twin = copy.deepcopy(mlp)
    bytes_before = twin.state_dict()["fc1_gate_weight"].clone()
    with torch.no_grad():
        twin.fc1_gate_weight.copy_(mlp.fc1_gate_weight)
    assert torch.equal(twin.state_dict()["fc1_gate_weight"], bytes_before)


@pytest.mark.parametrize("name", RECIPES)
def test_torchs_adamw_trains_parts_as_it_trains_them_unquantized(name: str) -> None:
    mlp = gated_mlp(name)
    plain = ottava.LayerNormMLP(
        64, 96, activation="swiglu", set_parallel_mode=True, params_dtype=torch.float32, device="cpu"
    )
    wanted = {n: values(p) for n, p in mlp.named_parameters()}
    optimizers = []
    for module in (mlp, plain):
        with torch.no_grad():
            for n, p in module.named_parameters():
                p.copy_(wanted[n])
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)))
        optimizers.append(torch.optim.AdamW(module.parameters(), lr=1e-2))
    for optimizer in optimizers:
        optimizer.step()
    for n, p in plain.named_parameters():
        found = mlp.get_parameter(n)
        # A step writes twice (decay, then the moments' quotient), each time for gate and for up.
        assert distance(values(found), values(p)) < 2 * ROUNDING[name], n


def test_rows_that_are_cut_twice_are_one_part_of_their_matrix() -> None:
    """As torch cuts them where ranks are left without rows: 16 on 5 ranks."""
    with ottava.quantized_model_init(recipe=RECIPES["current"]):
        weight = ottava.Linear(32, 16, device="cpu").weight
    one, other = weight.chunk(5)[0], weight.chunk(5)[0]
    assert isinstance(one, Weight) and isinstance(other, Weight)
    assert type(one.new_empty(0)) is torch.Tensor and one.new_empty(2, dtype=torch.uint8).dtype == torch.uint8
    assert torch.equal(one, other) and other.memory.group.parts == [other.memory]
