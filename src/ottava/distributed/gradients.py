"""Gradients of a model on many ranks: when they are reduced, and how long they are together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ottava.distributed.whole import layout_of

__all__ = ["clip_grad_norm_", "gradient_sync"]


@contextlib.contextmanager
def gradient_sync(model: nn.Module, on: bool, keep_gathered: bool = False) -> Iterator[None]:
    """Whether backward passes inside reduce gradients over data-parallel ranks: off for all microbatches but the last.

    Takes what `parallelize` returns; both forward and backward of a microbatch belong inside. While off, FSDP2 adds up whole gradients in
    its reduce type, which takes the memory of an unsharded gradient. keep_gathered: it keeps weights gathered from one microbatch to the
    next, too, instead of gathering them for each.

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


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients down to a 2-norm of at most `max_norm` over all ranks; returns the norm before, equal on all ranks.

    Takes what `parallelize` returns, whatever the strategy. Every rank has to call it.

        >>> norm = clip_grad_norm_(model, 1.0)
    """
    if max_norm <= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be above 0, got {max_norm!r} (math.inf: only the norm).")
    held = list(_gradients(model))
    split = any(group for _, group in held)
    if isinstance(model, FullyShardedDataParallel) and not split:
        return model.clip_grad_norm_(max_norm)
    if split and not any(isinstance(gradient, DTensor) for gradient, _ in held):
        norm = _norm_of_parts(held, model.process_group if isinstance(model, FullyShardedDataParallel) else None)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _gradients(model: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """(gradient, the tensor-parallel group over which it is split, or None) of every parameter, tied ones once."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                layout, size = layout_of(module, name)
                yield parameter.grad, getattr(module, "tp_group", None) if layout.dim is not None and size > 1 else None


def _norm_of_parts(held: list[tuple[Tensor, Any]], shard_group: Any) -> Tensor:
    """Of plain gradients, some of which tensor-parallel ranks hold parts of; FSDP1's ranks hold parts of all of them."""
    tp_group = next(group for _, group in held if group is not None)
    squares = held[0][0].new_zeros(2, dtype=torch.float32)  # of gradients that every tp rank has, and of parts
    for gradient, group in held:
        squares[int(group is not None)] += gradient.float().square().sum()
    if shard_group is not None:
        dist.all_reduce(squares, group=shard_group)
    dist.all_reduce(squares[1], group=tp_group)
    return squares.sum().sqrt()
