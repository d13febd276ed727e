"""Sums of squares by bins, and the factor that clips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ottava.kernels.squares  # noqa: F401
from ottava.optimizers.gradient_norm import norm_and_scale


def test_sums_are_by_bin_and_in_float64() -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2, 2), 300.0, dtype=torch.bfloat16), torch.zeros(0)]
    found = torch.ops.ottava.sums_of_squares(tensors, [1, 0, 1], 2)
    assert found.tolist() == [360000.0, 12.0] and found.dtype == torch.float64


def test_the_norm_is_the_same_however_gradients_are_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradient = torch.randn(96, 50, generator=generator) * torch.rand(96, 1, generator=generator)
        norms = {
            float(norm_and_scale([(part, ()) for part in gradient.split(rows)], 1.0)[0])
            for rows in (96, 48, 32, 24, 7, 1)
        }
        assert len(norms) == 1


@pytest.mark.parametrize("size, limit", [(1.0, 0.5), (1.0, 100.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_norm_and_factor_are_those_of_torch(size: float, limit: float) -> None:
    params = [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2, 3))]
    for p in params:
        p.grad = torch.full_like(p, size)
    norm, scale = norm_and_scale([(p.grad, ()) for p in params], limit)
    before = params[0].grad[0].clone()
    expected = nn.utils.clip_grad_norm_(params, limit)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    torch.testing.assert_close(before * scale, params[0].grad[0], equal_nan=True)


def test_a_fake_tensor_gives_a_fake_norm() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        found = torch.ops.ottava.norm_and_scale(torch.ops.ottava.sums_of_squares([torch.ones(3)], [0], 1), 1.0)
    assert found.shape == (2,)
