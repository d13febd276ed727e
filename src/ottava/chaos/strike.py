"""A fault, as it comes: in a process of the job, at the place that was drawn."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ottava.chaos.plan import LAUNCHER, Fault

SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
    "sigstop": signal.SIGSTOP,
    "sigsegv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
}
FREEZE, THAW = 0xC0045877, 0xC0045878
"""FIFREEZE and FITHAW of <linux/fs.h>."""
FILLER = ".chaos-filler"
SLOW_S, SLOW_TIMES = 0.1, 20
FOREVER_S = 10**6
_in_place = ExitStack()
"""Hooks that change what passes a module. They are held here: one that nobody holds is removed before it has changed anything."""


class ChaosError(RuntimeError):
    """The exception that is thrown into ranks and threads."""


def strike(fault: Fault, folder: Path, launcher: int, changed: Callable[[], None] = lambda: None) -> None:
    """What `fault` does, in the rank it comes to; the launcher's comes from rank 0. folder: of the run.

    changed: called when a number has been changed, which may be in a later pass.
    """
    if fault.kind in SIGNALS:
        os.kill(launcher if fault.rank == LAUNCHER else os.getpid(), SIGNALS[fault.kind])
        return
    work: dict[str, Any] = {
        "exception": _raise,
        "thread": lambda: throw_into_thread(random.Random(fault.seed)),
        "gil": lambda: ctypes.PyDLL(None).sleep(FOREVER_S),
        "memory": exhaust_memory,
        "disk-full": lambda: fill(own_disk(folder)),
        "disk-frozen": lambda: freeze(own_disk(folder)),
        "network": lambda: loopback(up=False),
        "slow": lambda: None,  # `SLOW_TIMES` places, see arm.py
        "bit-flip": lambda: flip(fault, changed),
        "nan": lambda: poison_gradient(fault, changed),
    }
    work[fault.kind]()


def _raise() -> None:
    raise ChaosError("an exception on purpose")


def throw_into_thread(chance: random.Random) -> str:
    """A ChaosError in one of Ottava's threads, wherever it is. Its name."""
    threads = [t for t in threading.enumerate() if t.name.startswith("ottava") and t.is_alive()]
    victim = chance.choice(sorted(threads, key=lambda t: t.name))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(victim.ident or 0), ctypes.py_object(ChaosError))
    return victim.name


def exhaust_memory() -> None:
    """No more memory for this process than it has; then it asks for some."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
    hoard = [bytearray(1 << 28) for _ in range(64)]
    raise AssertionError(f"There was memory for {len(hoard)} times 256 MiB behind the limit.")


# --------------------------------------------------------------------------------------------------- disks and networks


def own_disk(run: Path) -> Path:
    """The file system that was made for the run in `run`. Another one is not touched."""
    if not os.path.ismount(run.parent):
        raise AssertionError(f"{run.parent} is no file system of its own.")
    return run.parent


def fill(folder: Path) -> None:
    """Every block of the file system of `folder`."""
    with (folder / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 14):
            with suppress(OSError):  # no space left
                while True:
                    file.write(b"\0" * size)
                    os.fsync(file.fileno())  # space is only promised before


def freeze(folder: Path) -> None:
    """The file system of `folder` stands still: whoever writes waits."""
    _order(folder, FREEZE)


def thaw(folder: Path) -> None:
    """It goes on."""
    _order(folder, THAW)


def _order(folder: Path, order: int) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(number, order, 0)
    finally:
        os.close(number)


def loopback(up: bool) -> None:
    """The only interface of a network namespace: 0x8913, 0x8914 get and set an interface's flags; flag 1 is "up"."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, 0x8913, request))[1]
        flags = flags | 1 if up else flags & ~1
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", flags))


# -------------------------------------------------------------------------------------------------------------- numbers


def _loop() -> Any:
    """The loop that runs in this process."""
    from ottava.train.loop import Loop

    return next(found for found in gc.get_objects() if type(found) is Loop)


def flip(fault: Fault, changed: Callable[[], None] = lambda: None) -> None:
    """One of the high bits of a weight, or of an activation of the next forward pass."""
    from ottava.chaos.numbers import at_output, memory_of

    chance, model = random.Random(fault.seed), _loop().model.module
    if fault.phase == "data":
        weights = [p for _, p in sorted(model.named_parameters()) if memory_of(p).numel()]
        weight = chance.choice(weights)
        _flip_high_bit(weight, chance)
        changed()
        return
    _for_one_pass(at_output, lambda t: _flip_high_bit(t, chance), chance, changed)


def _flip_high_bit(tensor: Any, chance: random.Random) -> None:
    """Of any element: exponent, or the high half of the rest, whatever the type. Never the sign."""
    from ottava.chaos.numbers import flip_bit, memory_of

    memory = memory_of(tensor)
    size, index = 8 * memory.element_size(), chance.randrange(memory.numel())
    flip_bit(tensor, index, chance.randrange(max(size - 12, 0), size - 1))


def poison_gradient(fault: Fault, changed: Callable[[], None] = lambda: None) -> None:
    """A NaN in the gradient of a layer's output, in the next backward pass."""
    from ottava.chaos.numbers import at_gradient, poison

    _for_one_pass(at_gradient, lambda t: poison(t, float("nan")), random.Random(fault.seed), changed)


def _for_one_pass(where: Any, change: Any, chance: random.Random, changed: Callable[[], None]) -> None:
    """Left in place: it acts once."""
    model = _loop().model.module
    name = f"layers.{chance.randrange(len(_layers(model)))}"

    def once(tensor: Any) -> None:
        change(tensor)
        changed()

    _in_place.enter_context(where(model, name, once, times=1))


def _layers(model: Any) -> Any:
    return next(module.layers for module in model.modules() if hasattr(module, "layers"))


def pause() -> None:
    """What a slow rank does."""
    time.sleep(SLOW_S)
