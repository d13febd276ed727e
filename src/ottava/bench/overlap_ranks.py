"""The ranks of `ottava bench overlap`: those of a launcher, or processes that the command starts itself."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=10)


def under_launcher() -> bool:
    """Whether torchrun, or something like it, has started this process as one rank of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


@contextmanager
def joined(rank: int | None = None, size: int | None = None, store: str | None = None) -> Iterator[torch.device]:
    """The process group, and this rank's device. Of a launcher's ranks where nothing is given."""
    rank = int(os.environ["RANK"]) if rank is None else rank
    local = int(os.environ.get("LOCAL_RANK", rank))
    size = int(os.environ["WORLD_SIZE"]) if size is None else size
    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local % gpus)
        torch.cuda.set_device(device)
        shared = local >= gpus or size > gpus  # NCCL refuses two ranks on one GPU
        backend = f"cpu:gloo,cuda:{'gloo' if shared else 'nccl'}"
        if shared:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    method = None if store is None else f"file://{store}"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def start_ranks(size: int, work: Callable[..., int], *args: Any) -> int:
    """`work(*args, device)` in `size` new processes. The first exit code that is not 0; a rank that fails ends the others."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ottava-bench-") as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_serve, args=(rank, size, store, work, args), daemon=True) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        running, code = list(ranks), 0
        while running and code == 0:
            wait([process.sentinel for process in running])
            ended = [process.exitcode for process in running if process.exitcode is not None]
            code = next((c for c in ended if c), 0)
            running = [process for process in running if process.exitcode is None]
        for process in running:
            process.kill()
        for process in ranks:
            process.join()
        return code


def _serve(rank: int, size: int, store: str, work: Callable[..., int], args: tuple[Any, ...]) -> None:
    with joined(rank, size, store) as device:
        code = work(*args, device)
    sys.exit(code)
