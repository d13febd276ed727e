"""Gradients over several microbatches, with one reduction over ranks: in the backward pass of the last."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def reducing(model: nn.Module, last: bool, keep_gathered: bool = False) -> AbstractContextManager[object]:
    """Goes around forward and backward of a microbatch; only the `last` one reduces gradients.

    Until then FSDP2 adds up whole gradients in its reduce type, which takes the memory of an unsharded gradient.
    keep_gathered: FSDP2 keeps weights gathered from one microbatch to the next, too, instead of gathering them for each.

        >>> for i, part in enumerate(parts):
        ...     with reducing(model, last=i == len(parts) - 1):
        ...         model.loss(part).backward()
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        if keep_gathered:
            model.set_reshard_after_backward(last)
        return nullcontext()
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()
