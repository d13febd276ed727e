"""Gradients of a model on many ranks: when they are reduced, and how long they are together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ottava.distributed.whole import layout_of
from ottava.optimizers.gradient_norm import norm_and_scale, part_of

__all__ = ["clip_grad_norm_", "grad_norm_and_scale", "gradient_sync"]


@contextlib.contextmanager
def gradient_sync(model: nn.Module, on: bool, keep_gathered: bool = False) -> Iterator[None]:
    """Whether backward passes inside reduce gradients over data-parallel ranks: off for all microbatches but the last.

    Takes what `parallelize` returns; both forward and backward of a microbatch belong inside. While off, FSDP2 adds up whole gradients in
    its reduce type, which takes the memory of an unsharded gradient. keep_gathered: it keeps weights gathered from one microbatch to the
    next, too, instead of gathering them for each. Outside of it a backward pass reduces, and frees what was gathered.

        >>> for i, batch in enumerate(microbatches):
        ...     with gradient_sync(model, on=i == len(microbatches) - 1):
        ...         (model.loss(*batch) / len(microbatches)).backward()
    """
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        with contextlib.nullcontext() if on else model.no_sync():
            yield
        return
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_requires_gradient_sync(on, recurse=False)
        module.set_is_last_backward(on)
        if keep_gathered:
            module.set_reshard_after_backward(on, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_is_last_backward(True)
            if keep_gathered:
                module.set_reshard_after_backward(True, recurse=False)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients down to a 2-norm of at most `max_norm` over all ranks; returns the norm before, equal on all ranks.

    Takes what `parallelize` returns, whatever the strategy. Every rank has to call it.

        >>> norm = clip_grad_norm_(model, 1.0)
    """
    norm = _norm(model, max_norm, clips=True)
    if isinstance(norm, tuple):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm[0])
        return norm[0]
    return norm


@torch.no_grad()
def grad_norm_and_scale(model: nn.Module, max_norm: float) -> tuple[Tensor, Tensor]:
    """(the norm that `clip_grad_norm_` returns, the factor by which it scales). Gradients stay as they are, and no host waits.

    >>> norm, scale = grad_norm_and_scale(model, 1.0)
    >>> optimizer.step(grad_scale=scale)  # FusedAdam
    """
    norm = _norm(model, max_norm, clips=False)
    return norm if isinstance(norm, tuple) else (norm, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _norm(model: nn.Module, max_norm: float, clips: bool) -> Tensor | tuple[Tensor, Tensor]:
    """(norm, factor); or the norm, of gradients that torch has scaled (clips) or left alone."""
    if max_norm <= 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm!r} (math.inf: only the norm).")
    held = list(_gradients(model))
    split = any(group for _, group in held)
    if isinstance(model, FullyShardedDataParallel) and not split:
        return model.clip_grad_norm_(max_norm if clips else math.inf)
    in_parts = split and not any(isinstance(gradient, DTensor) for gradient, _ in held)
    devices = {gradient.device.type for gradient, _ in held}
    if in_parts or devices == {"cpu"} or (devices == {"cuda"} and not clips):
        shards = (model.process_group,) if isinstance(model, FullyShardedDataParallel) else ()
        found = norm_and_scale([part_of(gradient, group, shards) for gradient, group in held], max_norm)
        return found[0], found[1]
    if clips:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    else:
        norm = nn.utils.get_total_norm([gradient for gradient, _ in held])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _gradients(model: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """(gradient, the tensor-parallel group over which it is split, or None) of every parameter, tied ones once."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                layout, size = layout_of(module, name)
                yield parameter.grad, getattr(module, "tp_group", None) if layout.dim is not None and size > 1 else None
