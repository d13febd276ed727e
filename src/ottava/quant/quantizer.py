"""tensor -> `QuantizedTensor`, by a recipe and a role."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor
from ottava.recipe import DelayedScaling, Recipe

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(x: Any, what: str) -> None:
    """Raises unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{what} must be a torch.Tensor, got {type(x).__name__}.")


def check_float(x: Tensor, what: str) -> None:
    """Raises unless `x` has a dtype that FP8 can be made from."""
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{what} must be float32, bfloat16 or float16, got {x.dtype}: convert it with .to(torch.bfloat16)."
        )


def quantize_by_scheme(
    x: Tensor,
    scheme: Scheme,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
) -> QuantizedTensor:
    """x [..., K] -> QuantizedTensor; the dimensions before the last are rows."""
    check_tensor(x, "What is quantized")
    check_float(x, "The tensor to quantize")
    if x.dim() == 0:
        raise ValueError("Cannot quantize a scalar: give a tensor with at least one dimension.")
    if not (rowwise or columnwise):
        raise ValueError("Ask for a rowwise copy, a columnwise copy or both.")
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    flat = x.detach().reshape(rows, x.shape[-1])
    if not flat.is_contiguous():
        flat = flat.contiguous()
    buffers = torch.ops.ottava.quantize(flat, str(scheme), scale, amax, rowwise, columnwise)
    return QuantizedTensor.from_buffers(buffers, scheme, x.shape, x.dtype, rowwise, columnwise)


def quantize(
    x: Tensor,
    recipe: Recipe,
    role: str = "input",
    *,
    scale: Tensor | float | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
) -> QuantizedTensor:
    """Quantizes `x` as `recipe` quantizes inputs, weights or gradients.

    role: "input" | "weight" | "grad". scale: for `DelayedScaling`, the scale to use (default 1).
    The random Hadamard transform and stochastic rounding of `NVFP4BlockScaling` apply as the role says.

        >>> q = ottava.quantize(torch.randn(256, 256), recipe.Float8BlockScaling(), role="weight")
        >>> q.rowwise_scale_inv.shape
        torch.Size([2, 2])
    """
    check_tensor(x, "What is quantized")
    scheme = Scheme.of(recipe, role)
    if isinstance(recipe, DelayedScaling):
        scale = torch.ones(1, dtype=torch.float32, device=x.device) if scale is None else scale
        scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
        if scale.numel() != 1 or not bool(torch.isfinite(scale) & (scale > 0)):
            raise ValueError(f"scale must be one finite number above 0, got {scale.tolist()}.")
        scale = scale.reshape(1)
    elif scale is not None:
        raise ValueError(f"scale= is for DelayedScaling; {type(recipe).__name__} computes its own.")
    return quantize_by_scheme(x, scheme, scale, None, rowwise, columnwise)
