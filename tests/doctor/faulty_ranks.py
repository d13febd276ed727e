"""Ranks of `ottava doctor` in processes of their own, with faults put into some of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ottava
from ottava.doctor import Options, examine, host, places, speed, team
from ottava.train.world import Place

Fault = Callable[[], None]


def reports(
    size: int,
    faults: dict[int, list[Fault]],
    options: Options,
    silent: tuple[int, ...] = (),
    address: str = "127.0.0.1",
) -> dict[int, dict[str, Any]]:
    """Each rank's report as JSON, by rank. silent: ranks that will not give one; they are killed in the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ottava.doctor"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = {}, []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(theirs, rank, size, port, faults.get(rank, []), options, address), daemon=True
        )
        process.start()
        theirs.close()
        pipes[rank] = ours
        processes.append(process)
    found = {}
    try:
        for rank, pipe in pipes.items():
            if rank not in silent:
                assert pipe.poll(180), f"rank {rank} did not report"
                found[rank] = pipe.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _rank(pipe: Any, rank: int, size: int, port: int, faults: list[Fault], options: Options, address: str) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
    }  # fmt: skip
    for fault in faults:
        fault()
    pipe.send(examine(options, Place(rank, size, rank, size)).as_json())


# ------------------------------------------------------------------------------------------------------------------ faults


def other_version() -> None:
    ottava.__version__ = "0.0.7"


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def wrong_clock() -> None:
    real = time.time
    team.time = SimpleNamespace(time=lambda: real() + 30, monotonic=time.monotonic, sleep=time.sleep)


def wrong_local_rank() -> None:
    os.environ["LOCAL_RANK"] = "7"


def wrong_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "ib7"


def other_hca() -> None:
    os.environ["NCCL_IB_HCA"] = "mlx5_9"


def one_gpu_for_all() -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 8,
        get_device_properties=lambda index: SimpleNamespace(uuid="GPU-0000"),
    )
    places.torch = SimpleNamespace(cuda=cuda)


def busy() -> None:
    """While it multiplies, other threads of the rank loop: each call waits for its turn."""
    measure, over = speed.measure, threading.Event()

    def burn() -> None:
        while not over.is_set():
            pass

    def measure_among_them(*given: Any) -> Any:
        over.clear()
        for _ in range(4):
            threading.Thread(target=burn, daemon=True).start()
        try:
            return measure(*given)
        finally:
            over.set()

    speed.measure = measure_among_them


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def shared_memory_at(path: str) -> Fault:
    return _SharedMemory(path)


class _SharedMemory:
    """A class, because a rank gets its faults by pickle."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> None:
        host.SHARED_MEMORY = self.path


class InNamespace:
    """The rank's sockets belong to a network namespace and go through `interface`."""

    def __init__(self, name: str, interface: str) -> None:
        self.name, self.interface = name, interface

    def __call__(self) -> None:
        with open(f"/run/netns/{self.name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns to {self.name} failed")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
