"""`diagnose`: everything that can be said of a model that is wrapped, before it runs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from ottava.detect.acs import check_acs, read_bridges
from ottava.detect.cards import check_cards, read_cards
from ottava.detect.finding import Finding
from ottava.detect.machine import Machine
from ottava.detect.reduction import check_reduction
from ottava.detect.shards import check_shards
from ottava.detect.units import units_of
from ottava.detect.wrapping import check_wrapping


def diagnose(model: nn.Module, machine: Machine | None = None, *, hardware: bool | None = None) -> list[Finding]:
    """What is slow or wrong in how `model` is spread over ranks, whoever wrapped it: by `parallelize`, `fully_shard`,
    FullyShardedDataParallel or DistributedDataParallel. An empty list: nothing is.

    Call it in any rank, after wrapping, while the process group is there. Nothing is communicated and nothing changes.
    machine: where ranks sit and which of them NVLink joins; `Machine.detect()` if not given. hardware: whether this machine's PCIe
    bridges and network cards are looked at too, which takes a moment; None: where there is a GPU.

    Two of the seven failure modes show only in a run: `ottava.detect.ExposedCommunication` and
    `ottava.detect.reduction.ReductionProbe` are told its steps; `ottava train` does that by itself.

        >>> for finding in ottava.diagnose(model):
        ...     print(finding.level, finding.message)
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"diagnose takes a torch.nn.Module, wrapped for its ranks or not; got {type(model).__name__}.")
    found = check_wrapping(model)
    if dist.is_available() and dist.is_initialized():
        units = units_of(model)
        found += check_shards(units, machine or Machine.detect())
        found += check_reduction(units)
    if torch.cuda.is_available() if hardware is None else hardware:
        found += check_hardware()
    return found


def check_hardware() -> list[Finding]:
    """PCIe bridges and network cards of this machine."""
    return [*check_acs(read_bridges()), *check_cards(read_cards(), os.environ.get("NCCL_IB_HCA"))]
