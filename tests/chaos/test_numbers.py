"""Faults of numbers do what they say, and nothing else."""

from __future__ import annotations

import gc
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ottava
from ottava import recipe
from ottava.chaos import strike
from ottava.chaos.numbers import at_gradient, at_output, flip_bit, memory_of, module_named, poison
from ottava.chaos.plan import Fault
from ottava.chaos.strike import _flip_high_bit


@pytest.mark.parametrize("dtype, top", [(torch.float32, 31), (torch.bfloat16, 15), (torch.float64, 63)])
def test_a_flipped_bit_is_one_bit_and_flipping_it_again_brings_it_back(dtype, top):
    x = torch.randn(5, 7).to(dtype).t()  # not contiguous
    for bit in (0, top // 2, top - 1, top):
        before = x.clone()
        was, now = flip_bit(x, 11, bit)
        changed = (x != before) | (x.isnan() != before.isnan())
        assert int(changed.sum()) == 1 and float(before[changed]) == was and changed.flatten()[11]
        assert float(x.flatten()[11]) == now or math.isnan(now)
        flip_bit(x, 11, bit)
        assert torch.equal(x, before)


def test_bytes_can_be_flipped_and_places_that_are_not_there_are_refused():
    x = torch.zeros(4, dtype=torch.uint8)
    assert flip_bit(x, 2, 7) == (0.0, 128.0) and x.tolist() == [0, 0, 128, 0]
    for index, bit in ((4, 0), (0, 8), (-1, 0)):
        with pytest.raises(ValueError, match="flip_bit: element"):
            flip_bit(x, index, bit)
    with pytest.raises(ValueError, match="element 4 of a tensor of 4"):
        poison(x, 1.0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, None])
def test_a_high_bit_of_any_weight_flips_as_hardware_does_it(dtype):
    """None: of a weight that is stored as bytes, which notices what is written to it by hand."""
    if dtype is None:
        with ottava.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
            weight = ottava.Linear(32, 32, device="cpu").weight
        with pytest.raises(ValueError, match="stored in FP8 has bytes"):
            poison(weight, math.nan)
    else:
        weight = torch.randn(8, 8).to(dtype)
    for seed in range(20):
        before = memory_of(weight).view(torch.uint8).clone()
        _flip_high_bit(weight, random.Random(seed))
        changed = before ^ memory_of(weight).view(torch.uint8)
        assert int((changed != 0).sum()) == 1 and int(changed.max()).bit_count() == 1


def test_hooks_change_what_passes_a_module_by_its_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with at_output(model, "0", lambda t: poison(t, math.inf), times=1) as calls:
        assert not model(x).isfinite().all()
        assert model(x).isfinite().all() and calls == [2]
    with at_gradient(model, "1", lambda t: poison(t, math.nan)):
        model(x).sum().backward()
    assert model[0].weight.grad.isnan().any() and model(x).isfinite().all()
    with pytest.raises(ValueError, match=r"no module '2'; there are \['0', '1'\]"):
        module_named(model, "2")


@pytest.mark.parametrize("kind", ["nan", "bit-flip"])
def test_a_fault_of_a_pass_stays_until_the_pass_comes_and_acts_once(kind, monkeypatch):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    monkeypatch.setattr(strike, "_loop", lambda: SimpleNamespace(model=SimpleNamespace(module=model)))
    told: list[int] = []
    x = torch.randn(2, 3)

    def gradients() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        y = model.layers[1](model.layers[0](x))
        y.sum().backward()
        return y.detach().clone(), model.layers[0].weight.grad.clone()

    before = gradients()
    strike.strike(Fault(0, kind, "forward", 1, 0, seed=3), Path(), 0, lambda: told.append(1))
    gc.collect()
    assert told == []  # not yet
    struck = gradients()
    assert told == [1] and not all(torch.equal(a, b) for a, b in zip(before, struck))
    assert struck[1].isnan().any() or kind != "nan"
    assert told == [1] and all(torch.equal(a, b) for a, b in zip(before, gradients()))
