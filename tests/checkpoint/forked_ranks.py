"""Ranks that may be killed: forked from one process that has imported everything, so that a case costs milliseconds.

with Forge() as forge:
    results = forge.run(case, 2, folder, "argument")     # case(rank, folder, "argument") in 2 ranks of a gloo group
    results[0]                                           # what it returned, or Ended(signal) if the rank was killed
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ended:
    """A rank that gave no answer. signal: what ended it."""

    signal: int


class Forge:
    """A process that forks ranks."""

    def __enter__(self) -> Forge:
        context = multiprocessing.get_context("spawn")  # not forked from here: a test process has threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()

    def run(self, case: Callable, ranks: int, *args: Any, seconds: float = 30.0) -> list[Any]:
        """Results by rank. AssertionError if a rank raises or takes longer."""
        self._pipe.send((case, ranks, args, seconds))
        assert self._pipe.poll(seconds + 60), "the forge does not answer"
        results = self._pipe.recv()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    _import_everything()
    while True:
        try:
            case, ranks, args, seconds = pipe.recv()
        except EOFError:
            os._exit(0)  # torch's threads may wait for something that was forked away
        with tempfile.TemporaryDirectory() as folder:
            pipe.send(_run(case, ranks, args, seconds, Path(folder)))


def _import_everything() -> None:
    """What ranks will need, torch's lazy imports included: they are most of the time of a small case. Starts no thread."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ottava.checkpoint

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    local = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)], src_data_rank=None).to_local()
    dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = ottava.checkpoint.Checkpoints(folder)
        checkpoints.save(1, {"w": local})
        checkpoints.load({"w": local})


def _run(case: Callable, ranks: int, args: tuple, seconds: float, folder: Path) -> list[Any]:
    children = [_fork(case, rank, ranks, args, folder) for rank in range(ranks)]
    deadline, results = time.monotonic() + seconds, []
    for rank, child in enumerate(children):
        status = None
        while status is None and time.monotonic() < deadline:
            pid, code = os.waitpid(child, os.WNOHANG)
            status = code if pid else time.sleep(0.005)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            results.append(AssertionError(f"rank {rank} hung for {seconds} s"))
        elif os.WIFSIGNALED(status):
            results.append(Ended(os.WTERMSIG(status)))
        else:
            results.append(pickle.loads((folder / str(rank)).read_bytes()))
    return results


def _fork(case: Callable, rank: int, ranks: int, args: tuple, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if ranks > 1:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=timedelta(seconds=20))
        answer = case(rank, *args)
    except BaseException:
        answer = AssertionError(f"rank {rank}:\n{traceback.format_exc()}")
    (folder / f"{rank}.part").write_bytes(pickle.dumps(answer))
    os.rename(folder / f"{rank}.part", folder / str(rank))
    os._exit(0)
