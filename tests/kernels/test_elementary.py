"""exp, sigmoid and tanh from basic operations: accuracy in float32 and behaviour at the edges."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ottava.kernels.elementary import EXP_HIGH, EXP_LOW, exp, sigmoid, tanh


def ulps(got: Tensor, want: Tensor) -> float:
    """Largest error in units of the last place of the wanted value. want: float64."""
    _, exponent = torch.frexp(want)
    return float(((got.double() - want).abs() / torch.ldexp(torch.ones_like(want), exponent - 24)).max())


def test_exp_is_within_an_ulp_or_so() -> None:
    x = torch.cat([torch.linspace(-80, 80, 200_001), torch.linspace(-1, 1, 200_001), torch.randn(10_000) * 1e-4])
    assert ulps(exp(x), x.double().exp()) < 1.5


def test_exp_at_its_edges() -> None:
    assert exp(torch.zeros(1)).tolist() == [1.0]
    x = torch.tensor([-1e30, -math.inf, 1e30, math.inf])
    low, high = exp(torch.tensor([EXP_LOW])), exp(torch.tensor([EXP_HIGH]))
    assert torch.equal(exp(x), torch.cat([low, low, high, high]))
    assert exp(torch.tensor([math.nan])).isnan().all()


def test_sigmoid_and_its_limits() -> None:
    x = torch.linspace(-79, 79, 100_001)
    assert ulps(sigmoid(x), torch.sigmoid(x.double())) < 3
    torch.testing.assert_close(sigmoid(torch.tensor([0.0, 100.0])), torch.tensor([0.5, 1.0]), rtol=0, atol=1e-7)
    assert 0 < sigmoid(torch.tensor([-1000.0])).item() < 1e-30
    assert sigmoid(torch.tensor([math.nan])).isnan().all()


def test_tanh_is_absolutely_accurate() -> None:
    x = torch.cat([torch.linspace(-20, 20, 100_001), torch.randn(10_000) * 1e-3])
    assert (tanh(x).double() - x.double().tanh()).abs().max() < 3 * 2.0**-23  # ulps of 1
    torch.testing.assert_close(
        tanh(torch.tensor([-1e30, 0.0, 1e30])), torch.tensor([-1.0, 0.0, 1.0]), rtol=0, atol=2e-7
    )
    assert tanh(torch.tensor([math.nan])).isnan().all()


def test_same_bits_for_any_number_of_threads_and_any_stride() -> None:
    x = torch.randn(1000, 300) * 5
    want = [f(x) for f in (exp, sigmoid, tanh)]
    torch.set_num_threads(1)
    assert all(torch.equal(f(x), w) for f, w in zip((exp, sigmoid, tanh), want, strict=True))
    assert all(torch.equal(f(x.t()).t(), w) for f, w in zip((exp, sigmoid, tanh), want, strict=True))
