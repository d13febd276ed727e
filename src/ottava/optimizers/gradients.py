"""Where the gradient of a parameter is: in `grad`, `decoupled_grad` or `main_grad`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ottava.optimizers.masters import local_of
from ottava.quant.quantizer import FLOAT_DTYPES


def gradient_of(param: Any, decoupled: bool) -> Tensor | None:
    """What a step reads, checked. decoupled: see `use_decoupled_grad` of `FusedAdam`."""
    grad = param.grad
    if decoupled:
        if hasattr(param, "decoupled_grad"):
            grad = param.decoupled_grad
        elif getattr(param, "main_grad", None) is not None and not _reduced_by_fsdp(param):
            grad = param.main_grad
    elif grad is None and getattr(param, "grad_added_to_main_grad", False):
        raise ValueError(
            f"FusedAdam: the gradient of a parameter of shape {tuple(param.shape)} is in main_grad, not in grad "
            "(fuse_wgrad_accumulation=True): make the optimizer with use_decoupled_grad=True."
        )
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise ValueError(f"FusedAdam does not take sparse gradients, got {grad.layout} for shape {tuple(param.shape)}.")
    if grad.dtype not in FLOAT_DTYPES:
        raise ValueError(f"FusedAdam: a gradient must be float32, bfloat16 or float16, got {grad.dtype}.")
    if grad.shape != param.shape or local_of(grad).shape != local_of(param).shape:
        raise ValueError(
            f"FusedAdam: gradient of shape {tuple(grad.shape)} for a parameter of shape {tuple(param.shape)}, of which this rank holds "
            f"{tuple(local_of(param).shape)}."
        )
    return grad


def _reduced_by_fsdp(param: Any) -> bool:
    """Whether the gradient of a sharded parameter is in `grad`, and `main_grad` was made before FSDP2 has sharded it."""
    sharded, whole = hasattr(param, "to_local"), not hasattr(param.main_grad, "to_local")
    return sharded and whole and param.grad is not None


def zero_decoupled(params: Iterable[Any], set_to_none: bool) -> None:
    """What `zero_grad` does with gradients that are not in `grad`. `main_grad` buffers are always zeroed."""
    for param in params:
        if not hasattr(param, "decoupled_grad"):
            if getattr(param, "main_grad", None) is not None:
                param.main_grad.zero_()
        elif set_to_none:
            param.decoupled_grad = None
        elif param.decoupled_grad is not None:
            param.decoupled_grad.zero_()
