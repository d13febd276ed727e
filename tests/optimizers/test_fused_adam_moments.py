"""Moments that are kept in fewer bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ottava
from optimizers.adam_cases import (
    parameters,
    set_gradients,
    train,
)
from ottava import recipe
from ottava.optimizers import FusedAdam
from ottava.optimizers.moments import MomentFormat


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.float8_e5m2], ids=str)
def test_moments_are_stored_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=1e-3, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    set_gradients(params, 0)
    optimizer.step()
    fp8 = dtype in (torch.uint8, torch.float8_e5m2)
    for p in params:
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == (torch.uint8 if fp8 else dtype)
        for name, exact in (("exp_avg", 0.1 * p.grad), ("exp_avg_sq", 0.001 * p.grad**2)):
            got = optimizer.get_unscaled_state(p, name)
            epsilon = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.uint8: 2**-4}.get(dtype, 2**-3)
            floor = exact.abs().max() * 2.0**-17  # below it a format's values are subnormal
            assert ((got - exact).abs() <= exact.abs() * epsilon * 1.01 + floor).all()


def test_fp8_moments_follow_the_current_scaling_rule_to_the_byte() -> None:
    param = nn.Parameter(torch.randn(32, 48))
    param.grad = torch.randn(32, 48)
    optimizer = FusedAdam([param], exp_avg_dtype=torch.uint8)
    optimizer.step()
    exact = torch.zeros(32, 48).lerp_(param.grad, 1 - 0.9)
    expected = ottava.quantize(exact, recipe.Float8CurrentScaling(), role="input", columnwise=False)
    assert torch.equal(optimizer.state[param]["exp_avg"], expected.rowwise_data)
    assert torch.equal(optimizer.state[param]["exp_avg_scale_inv"], expected.rowwise_scale_inv)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e5m2, torch.float16], ids=str)
def test_a_positive_second_moment_never_becomes_zero(dtype: torch.dtype) -> None:
    # Zero would divide by eps alone: a step of 1e5 instead of 1e-3.
    param = nn.Parameter(torch.zeros(4))
    optimizer = FusedAdam([param], lr=1e-3, exp_avg_sq_dtype=dtype)
    for _ in range(3):
        param.grad = torch.tensor([1.0, 1e-4, 1e-6, 0.0])
        optimizer.step()
    stored = optimizer.get_unscaled_state(param, "exp_avg_sq")
    assert (stored[:3] > 0).all() and stored[3] == 0
    assert param.abs().max() < 4e-3


def test_moments_in_bfloat16_and_float16_train_as_float32_does() -> None:
    exact = train(lambda p: FusedAdam(p, lr=1e-3, betas=(0.9, 0.95)), steps=50)
    for dtype in (torch.bfloat16, torch.float16):
        make = lambda p, d=dtype: FusedAdam(p, lr=1e-3, betas=(0.9, 0.95), exp_avg_dtype=d, exp_avg_sq_dtype=d)  # noqa: E731
        for a, b in zip(train(make, steps=50), exact, strict=True):
            assert (a - b).abs().max() < 1e-3  # one step of fifty


@pytest.mark.parametrize(
    "dtype, slow, fast",
    [
        (torch.bfloat16, 1.46, 1.0),
        (torch.uint8, 0.87, 1.0),
        pytest.param(torch.float16, 1.00, 1.0, marks=pytest.mark.extra),
        pytest.param(torch.float8_e5m2, 1.30, 1.1, marks=pytest.mark.extra),
    ],
    ids=str,
)
def test_drift_of_the_second_moment_is_what_the_docs_say(dtype: torch.dtype, slow: float, fast: float) -> None:
    """slow, fast: the median ratio to float32 after 4,000 steps with beta2 = 0.999 and 0.95."""

    def moment(kept: torch.dtype, beta2: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.zeros(512))
        optimizer = FusedAdam([param], lr=0.0, betas=(0.9, beta2), exp_avg_sq_dtype=kept)
        for _ in range(4000):
            param.grad = torch.randn(512, generator=generator) * torch.logspace(-2, 0, 512)
            optimizer.step()
        return optimizer.get_unscaled_state(param, "exp_avg_sq")

    for beta2, expected in ((0.999, slow), (0.95, fast)):
        ratio = (moment(dtype, beta2) / moment(torch.float32, beta2)).median().item()
        assert abs(ratio - expected) < 0.05, ratio


def test_an_empty_tensor_and_nan_pass_through_every_format() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        form = MomentFormat.of(dtype, "dtype")
        for value in (torch.zeros(0, 4), torch.tensor([[1.0, float("nan"), -2.0]])):
            stored, scale_inv = form.zeros(value.shape, value.device)
            form.encode_(value, stored, scale_inv)
            torch.testing.assert_close(form.decode(stored, scale_inv), value, equal_nan=True)
