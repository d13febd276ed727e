"""A step whose gradient scale is NaN is left out: nothing changes, not even the counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ottava.optimizers import FusedAdam


def states(optimizer: FusedAdam) -> list[torch.Tensor]:
    return [t.clone() for state in optimizer.state.values() for t in state.values()]


def left_out(device: str) -> None:
    """Also run on a GPU, by tests/gpu/test_fused_adam.py."""
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in ((300, 257), (5,), (70_000,))]
    optimizer = FusedAdam(params, lr=0.1, weight_decay=0.1, exp_avg_dtype=torch.bfloat16)
    for scale, changes in ((1.0, True), (math.nan, False), (0.5, True)):
        for p in params:
            p.grad = torch.full_like(p, math.nan if scale != scale else 0.1)
        before, kept = [p.detach().clone() for p in params], states(optimizer)
        optimizer.step(grad_scale=torch.tensor(scale, device=device))
        same = [torch.equal(a, b) for a, b in zip(before, params, strict=True)]
        assert same == [not changes] * 3
        if not changes:
            assert all(torch.equal(a, b) for a, b in zip(kept, states(optimizer), strict=True))
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_a_step_whose_scale_is_nan_is_left_out() -> None:
    left_out("cpu")


@pytest.mark.parametrize("scale", [torch.tensor(1.0), torch.tensor([1.0])])
def test_a_scale_of_one_is_an_ordinary_step(scale: torch.Tensor) -> None:
    found = []
    for options in ({}, {"grad_scale": scale}):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(7))
        p.grad = torch.randn(7)
        FusedAdam([p], lr=0.1).step(**options)
        found.append(p.detach())
    assert torch.equal(*found)
