"""`LayerNorm` and `RMSNorm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.nn.base import default_device
from ottava.nn.core import refuse_double_backward
from ottava.nn.draw import check_local
from ottava.nn.forward_only import forward_only
from ottava.nn.strategy import ALONE, REPLICATED, Strategy, backend, local
from ottava.notices import warn_once
from ottava.quant.quantizer import check_float

ops = torch.ops.ottava


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool
    ) -> Tensor:  # fmt: skip
        if residual is None:
            mean, rstd, _ = ops.norm_stats(x, gamma, beta, kind, eps, zero_centered, False)
        else:
            x, mean, rstd, _ = ops.norm_add_stats(x, residual, gamma, beta, kind, eps, zero_centered, False)
        ctx.save_for_backward(x, gamma, mean, rstd)
        ctx.zero_centered, ctx.has_beta, ctx.adds = zero_centered, beta is not None, residual is not None
        return ops.norm_apply(x, gamma, beta, mean, rstd, zero_centered, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_double_backward()
        x, gamma, mean, rstd = ctx.saved_tensors
        dx, dgamma, dbeta = ops.norm_backward(dy.contiguous(), x, gamma, mean, rstd, ctx.zero_centered, ctx.has_beta)
        return dx, dx if ctx.adds else None, dgamma, dbeta if ctx.has_beta else None, None, None, None


class _Norm(nn.Module):
    kind: str
    has_bias: bool

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...] | list[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str | None = None,
        tp_mesh: Any = None,
        weight_mesh: Any = None,
        *,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None:
            raise ValueError(f"{type(self).__name__} needs normalized_shape, the size of the dimension to normalize.")
        if normalized_shape is not None and hidden_size is not None:
            raise ValueError(
                f"{type(self).__name__}: hidden_size is an older name of normalized_shape, got {hidden_size} and {normalized_shape}."
            )
        if params_dtype is not None and dtype is not None:
            raise ValueError(
                f"{type(self).__name__}: params_dtype is an older name of dtype, got {params_dtype} and {dtype}."
            )
        if sm_margin:
            warn_once(f"ottava: {type(self).__name__}: sm_margin has no effect: kernels take all multiprocessors.")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        self.normalized_shape = sizes
        self.features = int(torch.Size(sizes).numel())
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self.spreads_heads = False
        """Whether tensor-parallel ranks normalize different heads, so that each has a part of the gradient."""
        self._strategy: Strategy = ALONE
        options: dict[str, Any] = {
            "dtype": dtype or params_dtype or torch.get_default_dtype(),
            "device": default_device(device),
        }
        self.weight = nn.Parameter(torch.empty(sizes, **options))
        self.bias = nn.Parameter(torch.empty(sizes, **options)) if self.has_bias else None
        self.reset_parameters(defer_init=self.weight.is_meta)
        self.set_device_mesh(tp_mesh, weight_mesh)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The ranks over which tokens are spread (`sequence_parallel`): gradients are summed over them."""
        self._strategy = backend().strategy("column", tp_group, self.sequence_parallel)

    def set_device_mesh(self, tp_mesh: Any = None, weight_mesh: Any = None) -> None:
        """Makes the parameters DTensors, whole on every rank of `tp_mesh`. weight_mesh: nothing is quantized here."""
        if tp_mesh is None:
            return
        group = backend().group_of(tp_mesh)
        for name, _ in list(self.named_parameters(recurse=False)):
            backend().distribute(self, name, REPLICATED, tp_mesh, already_cut=False)
        self.set_tensor_parallel_group(group)

    def _parameter(self, parameter: Tensor | None) -> Tensor | None:
        """What this rank multiplies with, flat."""
        if parameter is None:
            return None
        value = local(parameter).reshape(-1)
        return self._strategy.replicated(value) if self.sequence_parallel or self.spreads_heads else value

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Gain 1 (stored as 0 if zero-centered), bias 0. Parameters on the meta device get memory, also where they are shards."""
        if defer_init:
            return
        if self.weight.is_meta:
            from ottava.nn.initialize import materialize_  # which knows this module

            materialize_(self)
            return
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, inp: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalizes over the last dimension(s). inp [..., *normalized_shape]. residual, like inp: is added to it before."""
        count = len(self.normalized_shape)
        if tuple(inp.shape[-count:]) != self.normalized_shape:
            raise ValueError(
                f"{type(self).__name__} expects last dimension(s) {self.normalized_shape}, got an input of shape {tuple(inp.shape)}."
            )
        if inp.device != self.weight.device:
            raise ValueError(
                f"{type(self).__name__} is on {self.weight.device} but its input is on {inp.device}: move one of them."
            )
        check_local(inp, f"The input of {type(self).__name__}")
        check_float(inp, f"The input of {type(self).__name__}")
        if torch.is_autocast_enabled(inp.device.type):
            inp, residual = _autocasted(inp), None if residual is None else _autocasted(residual)
        rows, added = inp.reshape(-1, self.features), None
        if rows.stride(-1) != 1:
            rows = rows.contiguous()  # on a CPU the order of sums would follow strides
        if residual is not None:
            if residual.shape != inp.shape or residual.dtype != inp.dtype or residual.device != inp.device:
                raise ValueError(
                    f"The residual of {type(self).__name__} must be like its input, {tuple(inp.shape)} {inp.dtype} on {inp.device}; got "
                    f"{tuple(residual.shape)} {residual.dtype} on {residual.device}."
                )
            added = residual.reshape(-1, self.features)
        gamma, beta = self._parameter(self.weight), self._parameter(self.bias)
        y = _NormFunction.apply(rows, added, gamma, beta, self.kind, self.eps, self.zero_centered_gamma)
        if torch_private.is_exporting():
            forward_only(y, (rows, added, gamma, beta))
        return torch_private.reshaped(y, inp.shape)

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _autocasted(tensor: Tensor) -> Tensor:
    """In the dtype of `torch.autocast`, as TransformerEngine's norms have it (torch's own compute in float32 there)."""
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


class LayerNorm(_Norm):
    """Layer normalization over the last dimension(s), computed in float32.

    >>> ottava.LayerNorm(128)(torch.randn(4, 128)).shape
    torch.Size([4, 128])
    """

    kind = "LayerNorm"
    has_bias = True


class RMSNorm(_Norm):
    """Root-mean-square normalization over the last dimension(s), computed in float32.

    >>> ottava.RMSNorm(128)(torch.randn(4, 128)).shape
    torch.Size([4, 128])
    """

    kind = "RMSNorm"
    has_bias = False
