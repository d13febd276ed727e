"""Ranks for the tests of a split vocabulary and of deferred initialisation: one spawn, many cases, results by file."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist


def _rank(rank: int, work: Callable[[int], dict[str, Any]], world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{os.path.join(folder, 'store')}"
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    try:
        torch.save(work(rank), os.path.join(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def run_ranks(work: Callable[[int], dict[str, Any]], world: int, folder: Path) -> list[dict[str, Any]]:
    """`work(rank)` on `world` gloo ranks; what each returned. `work` must be a function of an importable module."""
    torch.multiprocessing.spawn(_rank, args=(work, world, str(folder)), nprocs=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
