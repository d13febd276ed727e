"""`ottava::bias_residual`: residual + (x + bias), in float32 and rounded once, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.kernels.registry import define


def _bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """x, residual [..., n], bias [n]; the result is contiguous, in the dtype of the residual."""
    work = torch.promote_types(x.dtype, torch.float32)
    return (residual.to(work) + (x.to(work) + bias.to(work))).to(residual.dtype).contiguous()


def _bias_residual_fake(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


def _bias_residual_cuda(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    if x.dtype is torch.float64:
        return _bias_residual(x, bias, residual)
    from ottava.kernels import residual_triton

    return residual_triton.bias_residual(x, bias, residual)


bias_residual = define("bias_residual", _bias_residual, _bias_residual_fake, _bias_residual_cuda)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.dtypes = [tensor.dtype for tensor in inputs]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, residual = ctx.dtypes
    dbias = None
    if ctx.needs_input_grad[1]:
        dbias = torch.ops.ottava.column_sum(grad.reshape(-1, grad.shape[-1])).to(bias)
    return grad.to(x), dbias, grad.to(residual)


torch.library.register_autograd("ottava::bias_residual", _backward, setup_context=_setup)
