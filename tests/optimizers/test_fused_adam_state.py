"""Saving and loading FusedAdam's state."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from optimizers.adam_cases import (
    RECIPES,
    parameters,
    quantized_linear,
    recipe_name,
    set_gradients,
)
from ottava import recipe
from ottava.optimizers import FusedAdam

SAVED = [
    {},
    {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16},
    {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float8_e5m2},
    {"master_weights": True},
    {"master_weights": True, "store_param_remainders": True},
    {"capturable": True},
]


@pytest.mark.parametrize("options", SAVED, ids=str)
def test_state_round_trips_bit_for_bit_through_a_file(options: dict) -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, lr=1e-2, **options)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"params": [p.data for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for state in loaded["optimizer"]["state"].values():
        assert all(type(value) is Tensor for value in state.values())
        assert isinstance(state["step"], Tensor)

    resumed = [nn.Parameter(p) for p in loaded["params"]]
    other = FusedAdam(resumed, lr=1.0, **options)
    other.load_state_dict(loaded["optimizer"])
    for p, q in zip(params, resumed, strict=True):
        assert optimizer.state[p].keys() == other.state[q].keys()
        for name, value in optimizer.state[p].items():
            assert value.dtype == other.state[q][name].dtype
            assert torch.equal(value, other.state[q][name]), name
    for step in range(3, 6):
        for ps, o in ((params, optimizer), (resumed, other)):
            set_gradients(ps, step)
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(params, resumed, strict=True))


@pytest.mark.parametrize("r", RECIPES, ids=recipe_name)
def test_fp8_storage_resumes_bit_for_bit(r: recipe.Recipe) -> None:
    layer = quantized_linear(r)
    optimizer = FusedAdam(layer.parameters(), exp_avg_dtype=torch.uint8)
    gradients = torch.randn(4, 64, 64).bfloat16()
    for grad in gradients[:2]:
        layer.weight.grad = grad
        optimizer.step()
    twin = quantized_linear(r)
    twin.load_state_dict(layer.state_dict())
    resumed = FusedAdam(twin.parameters(), exp_avg_dtype=torch.uint8)
    resumed.load_state_dict(optimizer.state_dict())
    for model, o in ((layer, optimizer), (twin, resumed)):
        for grad in gradients[2:]:
            model.weight.grad = grad
            o.step()
    assert torch.equal(layer.weight.rowwise_data, twin.weight.rowwise_data)
    assert torch.equal(optimizer.state[layer.weight]["master_param"], resumed.state[twin.weight]["master_param"])


def test_loaded_state_does_not_share_memory_with_the_dict() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = FusedAdam(parameters())
    other.load_state_dict(saved)
    saved["state"][0]["exp_avg"].fill_(7.0)
    assert other.state[other.param_groups[0]["params"][0]]["exp_avg"].max() != 7.0


def test_state_of_torchs_adamw_loads() -> None:
    params, ours = parameters(), parameters()
    reference = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0, foreach=False)
    for step in range(3):
        set_gradients(params, step)
        reference.step()
    for p, q in zip(params, ours, strict=True):
        q.data.copy_(p.data)
    optimizer = FusedAdam(ours)
    optimizer.load_state_dict(reference.state_dict())
    for ps, o in ((params, reference), (ours, optimizer)):
        set_gradients(ps, 3)
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(params, ours, strict=True))


def test_a_step_count_kept_by_the_group_loads() -> None:
    # TransformerEngine's state dict: one count a group, none in the state.
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["step"] = 12
    optimizer.load_state_dict(saved)
    assert all(optimizer.state[p]["step"].item() == 12 for p in params)


def test_moments_saved_in_another_dtype_are_converted() -> None:
    params = parameters()
    optimizer = FusedAdam(params, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16)
    set_gradients(params, 0)
    optimizer.step()
    other = FusedAdam(parameters())
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, other.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert other.state[q][name].dtype == torch.float32
            assert torch.equal(other.state[q][name], optimizer.get_unscaled_state(p, name))


def test_hooks_around_loading_see_the_whole_dict_and_the_loaded_state() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    other, seen = FusedAdam(parameters()), []

    def double_first(_: Any, saved: dict) -> dict:
        saved = copy.deepcopy(saved)
        saved["state"][0]["exp_avg"].mul_(2)
        return saved

    other.register_load_state_dict_pre_hook(double_first)
    other.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    other.load_state_dict(optimizer.state_dict())
    first = other.param_groups[0]["params"][0]
    assert seen == [len(params)]
    assert torch.equal(other.state[first]["exp_avg"], 2 * optimizer.state[params[0]]["exp_avg"])


def test_a_copy_of_the_optimizer_keeps_its_options() -> None:
    optimizer = FusedAdam(parameters(torch.bfloat16), master_weights=True, adam_w_mode=False)
    assert copy.deepcopy(optimizer).options == optimizer.options


def test_loading_a_state_adds_no_options_to_the_groups() -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = FusedAdam(layer.parameters())
    options = set(optimizer.param_groups[0])
    set_optimizer_state_dict(layer, optimizer, get_optimizer_state_dict(layer, optimizer))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert [set(group) for group in optimizer.param_groups] == [options] * 2
