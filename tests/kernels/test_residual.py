"""`ottava::bias_residual`: one rounding, and its gradients."""

from __future__ import annotations

import torch

from ottava.kernels.residual import bias_residual


def test_rounds_once() -> None:
    x, bias, residual = torch.randn(5, 3, 16).bfloat16(), torch.randn(16).bfloat16(), torch.randn(5, 3, 16).bfloat16()
    # Sums of three bfloat16 of like size are exact in float64.
    want = (residual.double() + x.double() + bias.double()).to(torch.bfloat16)
    got = bias_residual(x, bias, residual)
    assert (got != want).float().mean() < 0.01  # float32 rounds before bfloat16 does, which rarely shows
    assert torch.equal(bias_residual(x[:0], bias, residual[:0]), residual[:0])


def test_gradients() -> None:
    x, bias, residual = (torch.randn(shape, requires_grad=True) for shape in ((4, 6), (6,), (4, 6)))
    bias_residual(x, bias, residual).backward(grad := torch.randn(4, 6))
    assert torch.equal(x.grad, grad) and torch.equal(residual.grad, grad)
    torch.testing.assert_close(bias.grad, grad.sum(0))


def test_noncontiguous_and_opcheck() -> None:
    x, residual = torch.randn(6, 4).t(), torch.randn(6, 4).t()
    assert torch.equal(bias_residual(x, torch.zeros(6), residual), x + residual)
    args = (
        torch.randn(4, 6, requires_grad=True),
        torch.randn(6, requires_grad=True),
        torch.randn(4, 6, requires_grad=True),
    )
    torch.library.opcheck(torch.ops.ottava.bias_residual.default, args)
