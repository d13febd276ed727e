"""`Ranks`: real processes with a gloo group between them, for tests.

    with Ranks(4) as ranks:                      # starts 4 processes once
        losses = ranks.run(train, plan)          # train(plan) in every rank: a list, one result a rank
        ranks.run(other_case)                    # a new process group in the same processes: milliseconds

The function has to be importable (module level), as for any spawned process, and its results picklable. Inside it
`torch.distributed` is ready. An error in a rank is raised here with the rank's traceback in its notes; a rank that hangs is
killed after `timeout` seconds. After either the processes are started anew for the next run.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute, debug

# Other ranks get this long to finish after one has failed. They may wait in a collective that will never complete.
GRACE_SECONDS = 1.0
# Sent when every rank is done: a connection that closes while another rank still opens or reads it fails that rank. And sent back
# when a rank's group is closed: the next run's group must not meet the connections of this one.
LEAVE, LEAVE_AND_FORGET = b"leave", b"leave and forget"


class RankTimeout(AssertionError):
    """Some ranks did not finish in time."""


class RankDied(AssertionError):
    """A rank's process ended without an answer."""


class Ranks:
    """`world_size` processes that run functions with a process group between them."""

    def __init__(self, world_size: int, backend: str = "gloo", threads: int = 1, *, same_meshes: bool = False) -> None:
        """same_meshes: every run makes the same meshes in the same order, so what DTensor remembers of them stays true."""
        self.world_size, self.backend, self.threads = world_size, backend, threads
        self._leaving = LEAVE if same_meshes else LEAVE_AND_FORGET
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ottava-ranks-")
        self._runs = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes."""
        self._stop()
        self._folder.cleanup()

    def run(self, function: Callable, *args: Any, timeout: float = 60.0) -> list[Any]:
        """`function(*args)` in every rank: the results in order of rank. timeout: seconds, starting processes not counted."""
        if not self._processes:
            self._start()
        self._runs += 1
        store = Path(self._folder.name) / f"store-{self._runs}"
        for pipe in self._pipes:
            # Pickled here, not by the pipe: it would pass tensors as shared memory, which ends with the process.
            pipe.send_bytes(pickle.dumps((function, args, str(store))))
        answers: dict[int, Any] = {}
        try:
            self._collect(answers, time.monotonic() + timeout)
        except BaseException:
            self._stop()
            raise
        if len(answers) < self.world_size:
            self._stop()
            missing = [rank for rank in range(self.world_size) if rank not in answers]
            raise RankTimeout(f"{function.__name__}: ranks {missing} did not finish in {timeout} s and were killed.")
        self._leave()
        return [answers[rank] for rank in range(self.world_size)]

    def _leave(self) -> None:
        """Ranks close their groups, together."""
        for pipe in self._pipes:
            pipe.send_bytes(self._leaving)
        for pipe in self._pipes:
            pipe.recv_bytes()

    def _collect(self, answers: dict[int, Any], deadline: float) -> None:
        """Fills `answers` by rank until all are there or the time is over. Raises the error that came first."""
        first_error: BaseException | None = None
        while len(answers) < self.world_size and (left := deadline - time.monotonic()) > 0:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            for pipe in wait(waiting, timeout=left):
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                answers[rank], error = self._receive(rank)
                if error is not None and first_error is None:
                    first_error = error
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if first_error is not None:
            raise first_error

    def _receive(self, rank: int) -> tuple[Any, BaseException | None]:
        try:
            result, error, text = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join(timeout=GRACE_SECONDS)
            return None, RankDied(f"rank {rank} died with exit code {self._processes[rank].exitcode}.")
        if text is None:
            return result, None
        error = error if isinstance(error, BaseException) else AssertionError(f"rank {rank} failed.")
        error.add_note(f"in rank {rank} of {self.world_size}:\n{text}")
        return None, error

    def _start(self) -> None:
        # Forked from a process that has imported all this and started no thread: a new rank costs milliseconds, not seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "ottava.models"])
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, self.backend, self.threads), daemon=True
            )
            process.start()
            theirs.close()  # so that the pipe ends when the process does
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):  # "ready": the time a run may take starts after the imports
            if not pipe.poll(120):
                self._stop()
                raise RankTimeout(f"rank {rank} did not start in 120 s.")
            pipe.recv()

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=0.2)  # idle ranks leave by themselves when their pipe closes
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def run_ranks(function: Callable, world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """`function(*args)` once in `world_size` new ranks. Several cases share one start with `Ranks`."""
    with Ranks(world_size) as ranks:
        return ranks.run(function, *args, timeout=timeout)


def _serve(pipe: Connection, rank: int, world_size: int, backend: str, threads: int) -> None:
    """One rank: runs what comes through the pipe until it closes."""
    torch.set_num_threads(threads)
    pipe.send("ready")
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # threads of a broken group may never end
        if request in (LEAVE, LEAVE_AND_FORGET):
            leave_group(forget=request == LEAVE_AND_FORGET)
            pipe.send_bytes(request)
            continue
        answer: tuple[Any, BaseException | None, str | None]
        try:
            function, args, store = pickle.loads(request)
            torch.manual_seed(0)
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=120),
            )
            answer = (function(*args), None, None)
        except BaseException as error:
            answer = (None, error, traceback.format_exc())
        _send(pipe, answer)


def leave_group(forget: bool) -> None:
    """Closes this rank's group. forget: what DTensor remembers of meshes, since equal ones of the next run may have other groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if forget:
        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()


def _send(pipe: Connection, answer: tuple[Any, BaseException | None, str | None]) -> None:
    try:
        message = pickle.dumps(answer)
        if answer[1] is not None:
            pickle.loads(message)  # some errors can be written and not read
    except Exception as error:
        message = pickle.dumps((None, None, (answer[2] or "") + f"\nthe answer could not be sent: {error!r}"))
    try:
        pipe.send_bytes(message)
    except OSError:  # the test has given up on this rank
        os._exit(0)
