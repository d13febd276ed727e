"""`torch.distributed` where there is no GPU: what scripts for NCCL ask for beside naming the backend answers for gloo.

A script names its backend in strings, and asserts `is_nccl_available()` or binds its ranks to devices beside that. Whoever changes the
strings need not change the calls; and a "nccl" that was forgotten means gloo.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_LOG = logging.getLogger(__name__)
_MAKERS = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")


@functools.cache
def _say(message: str) -> None:
    _LOG.warning("No GPU: %s", message)


def without_gpu(backend: Any) -> Any:
    """`backend` as ranks without GPUs can have it: nccl becomes gloo, also where it is named for a kind of device.

    >>> without_gpu("cpu:gloo,cuda:nccl")
    'cpu:gloo,cuda:gloo'
    """
    if not isinstance(backend, str) or "nccl" not in backend.lower():
        return backend
    _say(f"process groups are asked for by the backend {backend!r}, and made of gloo.")
    return ",".join(part.lower().replace("nccl", "gloo") for part in backend.split(","))


def _made_of_gloo(make: Callable) -> Callable:
    @functools.wraps(make)
    def on_cpu(*args: Any, **options: Any) -> Any:
        if make.__name__ == "init_process_group" and args:  # its first argument; the others take ranks there
            args = (without_gpu(args[0]), *args[1:])
        if "backend" in options:
            options["backend"] = without_gpu(options["backend"])
        if options.get("device_id") is not None:
            _say(f"process groups are not bound to a device (device_id={options.pop('device_id')!r}).")
        return make(*args, **options)

    return on_cpu


def _nccl_available() -> bool:
    _say("torch.distributed.is_nccl_available answers for gloo.")
    return dist.is_gloo_available()


def make_groups_of_gloo() -> None:
    """Replaces the functions, for the rest of the process; nothing where there is a GPU."""
    if torch.cuda.is_available() or dist.is_nccl_available is _nccl_available:
        return
    dist.is_nccl_available = _nccl_available
    for name in _MAKERS:
        made = _made_of_gloo(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, made)
