"""`Unit`: what a wrapped part of a model communicates, read from the model itself, whoever wrapped it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ottava import torch_private


@dataclass(frozen=True)
class Unit:
    """One call of fully_shard, FullyShardedDataParallel or DistributedDataParallel."""

    name: str
    """Of its module; "" is the root."""
    kind: Literal["FSDP2", "FSDP1", "DDP"]
    shard: tuple[int, ...]
    """Ranks, in the whole run, over which its weights are gathered. One: they are not."""
    replicas: int
    """Copies of these shards, whose gradients are summed too."""
    reduce_dtype: torch.dtype | None
    """In which gradients travel and are summed; None: none are."""

    @property
    def ranks(self) -> int:
        """Whose gradients are summed."""
        return len(self.shard) * self.replicas


def units_of(model: nn.Module) -> list[Unit]:
    """All units of `model`. Needs the process group that they were made with.

    >>> [unit.reduce_dtype for unit in units_of(fully_shard(model))]
    [torch.float32]
    """
    return [unit for name, module in model.named_modules() for unit in _units(name, module)]


def _units(name: str, module: nn.Module) -> Iterator[Unit]:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # here: they are slow to import

    if isinstance(module, FSDPModule):
        for shard, replicas, dtype in torch_private.fsdp2_groups(module):
            yield Unit(name, "FSDP2", shard, replicas, dtype)
    elif isinstance(module, FullyShardedDataParallel):
        yield _fsdp1(name, module)
    elif isinstance(module, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(module.process_group)
        yield Unit(name, "DDP", (dist.get_rank(),), len(ranks), _ddp_dtype(module))


def _fsdp1(name: str, unit: Any) -> Unit:
    from torch.distributed.fsdp import ShardingStrategy

    ranks = tuple(dist.get_process_group_ranks(unit.process_group))
    between = torch_private.fsdp1_replicas(unit)
    replicas = 1 if between is None else between.size()
    if unit.sharding_strategy == ShardingStrategy.NO_SHARD:
        ranks, replicas = (dist.get_rank(),), len(ranks)
    policy = unit.mixed_precision
    own = {p.dtype for p in unit.parameters(recurse=False) if p.requires_grad} or _dtypes(unit)
    dtype = policy.reduce_dtype or policy.param_dtype or _narrowest(own)
    return Unit(name, "FSDP1", ranks, replicas, dtype if own else None)


def _ddp_dtype(module: DistributedDataParallel) -> torch.dtype | None:
    """Of the gradients; a hook that compresses them for the wire sums them so."""
    narrow = [torch_private.ddp_hook_dtype(module)]
    found = _narrowest(_dtypes(module))
    return next((dtype for dtype in narrow if dtype is not None), found)


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters() if p.requires_grad}


def _narrowest(dtypes: set[torch.dtype]) -> torch.dtype | None:
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
