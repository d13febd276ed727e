"""Which transport serves a group: chosen once, the same on all ranks, and said in the log."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ottava.notices import leads, log, warn_once_on_rank0
from ottava.overlap.point_to_point import PointToPoint, backend_of
from ottava.overlap.symmetric_memory import SymmetricMemory, missing_because
from ottava.overlap.transport import Transport, wrapped

_made: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Transport | None]] = weakref.WeakKeyDictionary()


def transport_of(group: Any, requested: str, device: torch.device) -> Transport | None:
    """The transport of a group for tensors on `device`; None where nothing can carry messages there. All ranks call it together.

    requested: "auto", "point_to_point" or "symmetric_memory".
    """
    group = dist.group.WORLD if group is None else group
    made = _made.setdefault(group, {})
    key = (requested, device.type)
    if key not in made:
        made[key] = _choose(group, requested, device)
    found = made[key]
    return None if found is None else wrapped(found)


def _choose(group: Any, requested: str, device: torch.device) -> Transport | None:
    if requested != "point_to_point":
        why = missing_because(group, device)
        if why is None:
            return _said(SymmetricMemory(group, device))
        if requested == "symmetric_memory" or device.type == "cuda":
            warn_once_on_rank0(
                f"ottava: overlap: no symmetric memory, because {why}; messages go over the process group instead."
            )
    backend = backend_of(group, device)
    if backend == "nccl" or (backend == "gloo" and device.type == "cpu"):
        made = _made.setdefault(group, {})
        key = ("point_to_point", device.type)
        if made.get(key) is None:
            made[key] = _said(PointToPoint(group, device))
        return made[key]
    if backend != "fake":
        warn_once_on_rank0(
            f"ottava: overlap: nothing is overlapped, because the group's backend for {device.type} tensors, {backend!r}, has no sends and "
            "receives that run beside a product: use NCCL, or gloo with tensors of the CPU."
        )
    return None


def _said(transport: Transport) -> Transport:
    if leads():
        log.info("ottava: overlap of %d tensor-parallel ranks: %s.", transport.size, transport.name)
    return transport
