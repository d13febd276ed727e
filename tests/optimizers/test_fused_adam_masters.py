"""Masters of parameters in fewer bits: bf16, fp16, and weights that are stored in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ottava
from optimizers.adam_cases import (
    DEVICES,
    RECIPES,
    parameters,
    quantized_linear,
    recipe_name,
    set_gradients,
)
from ottava import recipe
from ottava.optimizers import FusedAdam
from ottava.optimizers.adam_update import Update
from ottava.optimizers.fused_step import mark_written
from ottava.optimizers.moments import MomentFormat
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import Weight
from ottava.quant.weight_state import note_made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_masters_follow_float32_training_and_parameters_are_their_rounding(device: str, dtype: torch.dtype) -> None:
    params = parameters(dtype, device)
    optimizer = FusedAdam(params, lr=1e-4, master_weights=True)
    masters = [nn.Parameter(p.detach().float()) for p in params]
    reference = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0, **({"fused": True} if device == "cuda" else {}))
    for step in range(10):
        set_gradients(params, step)
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, master in zip(params, masters, strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], master)
        assert torch.equal(p, master.to(dtype))


def test_a_small_update_is_lost_in_bf16_and_kept_by_a_master() -> None:
    def run(master_weights: bool) -> float:
        param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = FusedAdam([param], lr=1e-4, master_weights=master_weights)
        for _ in range(60):
            param.grad = torch.ones(1, dtype=torch.bfloat16)
            optimizer.step()
        return param.item()

    assert run(master_weights=False) == 1.0
    assert run(master_weights=True) < 1.0


def test_remainders_are_the_master_in_half_the_space() -> None:
    whole, halves = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a = FusedAdam(whole, lr=1e-3, master_weights=True)
    b = FusedAdam(halves, lr=1e-3, master_weights=True, store_param_remainders=True)
    for step in range(10):
        set_gradients(whole, step)
        set_gradients(halves, step)
        a.step()
        b.step()
    for p, q in zip(whole, halves, strict=True):
        assert b.state[q]["master_param"].dtype == torch.int16
        assert torch.equal(a.state[p]["master_param"], b.get_unscaled_state(q, "master_param"))
        # The two roundings to bf16 differ on exact ties only.
        assert ((p.float() - q.float()).abs() <= p.float().abs() * 2.0**-7).all()


@pytest.mark.parametrize("r", RECIPES, ids=recipe_name)
def test_fp8_storage_is_the_quantization_of_a_float32_master(r: recipe.Recipe) -> None:
    layer = quantized_linear(r)
    weight = layer.weight
    assert isinstance(weight, QuantizedTensor)
    optimizer = FusedAdam(layer.parameters(), lr=1e-3)
    master = nn.Parameter(weight.dequantize(torch.float32))
    reference = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.0, foreach=False)
    before = weight.dequantize().clone()
    for _ in range(5):
        weight.grad = torch.randn(64, 64, dtype=torch.bfloat16)
        master.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.state[weight]["master_param"], master)
    expected = weight.detach().clone()
    expected.copy_(master.detach())
    assert torch.equal(weight.rowwise_data, expected.rowwise_data)
    assert torch.equal(weight.rowwise_scale_inv, expected.rowwise_scale_inv)
    assert torch.equal(weight.columnwise_data, expected.columnwise_data)
    assert not torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("r", RECIPES, ids=recipe_name)
def test_a_layer_stored_in_fp8_learns(r: recipe.Recipe) -> None:
    layer = quantized_linear(r)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    x, target = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with ottava.autocast(recipe=r):
            loss = ((layer(x) - target).float() ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_masters_start_from_the_preserved_value_and_free_it() -> None:
    layer = quantized_linear(recipe.Float8CurrentScaling(), preserve=True)
    initial = layer.weight.get_high_precision_init_val()
    layer.weight.grad = torch.zeros(64, 64, dtype=torch.bfloat16)
    optimizer = FusedAdam(layer.parameters())
    optimizer.step()
    master = optimizer.state[layer.weight]["master_param"]
    assert torch.equal(master, initial.float())
    assert not torch.equal(master, layer.weight.dequantize(torch.float32))
    assert layer.weight.get_high_precision_init_val() is None


def test_a_preserved_value_is_not_used_once_the_weight_was_changed() -> None:
    layer = quantized_linear(recipe.Float8CurrentScaling(), preserve=True)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 64))
    layer.weight.grad = torch.zeros(64, 64, dtype=torch.bfloat16)
    now = layer.weight.dequantize(torch.float32)
    optimizer = FusedAdam(layer.parameters())
    optimizer.step()
    assert torch.equal(optimizer.state[layer.weight]["master_param"], now)


def test_masters_can_be_seeded_by_hand_as_transformer_engine_scripts_do() -> None:
    layer = quantized_linear(recipe.DelayedScaling(), preserve=True)
    optimizer = FusedAdam(layer.parameters(), master_weights=True)
    optimizer.initialize_state(layer.weight, store_param_remainders=False)
    value = layer.weight.get_high_precision_init_val()
    assert value is not None
    optimizer.set_scaled_state(layer.weight, "master_param", 2 * value.float())
    layer.weight.clear_high_precision_init_val()
    assert torch.equal(optimizer.get_unscaled_state(layer.weight, "master_param"), 2 * value.float())
    assert optimizer.state[layer.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_stock_optimizer_on_fp8_storage_dequantizes_computes_and_quantizes(kind: Any, options: dict) -> None:
    layer = quantized_linear(recipe.Float8BlockScaling())
    plain = torch.nn.Parameter(layer.weight.detach().dequantize())
    gradient = torch.randn(64, 64).bfloat16()
    layer.weight.grad, plain.grad = gradient.clone(), gradient.clone()
    before = layer.weight.rowwise_data.clone()
    kind([layer.weight], lr=1e-2, **options).step()
    kind([plain], lr=1e-2, **options).step()
    if options.get("fused") and kind is torch.optim.SGD:  # torch's own does not step bf16 on a CPU without momentum
        return
    assert not torch.equal(layer.weight.rowwise_data, before)
    # One or two roundings to FP8 (half a step of 1/8 each): decay and update may be two ops.
    assert (layer.weight.dequantize() - plain).abs().max() <= plain.abs().max() / 8


def test_what_a_kernel_wrote_is_known_to_whoever_keeps_a_copy() -> None:
    plain, weight = nn.Parameter(torch.ones(2, 4)), nn.Parameter(Weight.mastered("w", torch.ones(2, 4)))
    note_made(weight)
    assert weight.memory.made_from
    moment, form = torch.zeros(2, 4), MomentFormat("float32")
    updates = [Update(p.detach(), torch.ones(2, 4), {"exp_avg": moment}, (form, form)) for p in (plain, weight)]
    before = plain._version, moment._version
    mark_written(updates)
    assert plain._version > before[0] and moment._version > before[1]
    assert not weight.memory.made_from
