"""`torch.cuda` where there is no GPU: what scripts call beside naming their device answers for the CPU.

A script that was written for a GPU names its device in strings, and calls functions like `torch.cuda.set_device` and
`torch.cuda.memory_allocated` that raise, or say 0, without one. Whoever changes the strings need not change the calls. Memory is that of
this process: what the C library's allocator has handed out, from which torch takes its CPU tensors. `torch.cuda.is_available()` stays
False.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_SETTLE_SECONDS, _SETTLED_READINGS = 0.5, 3
_CAPABILITY = (0, 0)
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class _HeapCounts(ctypes.Structure):
    """glibc's `struct mallinfo2`; only `uordblks` and `hblkhd` are read."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _heap_counter() -> Callable[[], int] | None:
    """Bytes in use of the heap and of what was mapped for itself; None where the C library cannot say."""
    if platform.system() != "Linux":
        return None
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _HeapCounts

    def count() -> int:
        counts = mallinfo2()
        return int(counts.uordblks + counts.hblkhd)

    return count


def _peak_resident_bytes(device: Any = None) -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _reset_peak(device: Any = None) -> None:
    _CLEAR.write_text("5")  # proc(5): resets the peak resident size to the present one


@functools.cache
def _say(name: str) -> None:
    _LOG.warning("No GPU: torch.cuda.%s answers for the CPU.", name)


def _said(name: str, function: Callable) -> Callable:
    """`function`, which says when it is first called that it is not torch's."""

    def answer(*args: Any, **options: Any) -> Any:
        _say(name)
        return function(*args, **options)

    answer.__name__ = name
    return answer


class CpuEvent:
    """`torch.cuda.Event`: work on a CPU is done when its call returns, so an event is a time."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        _say("Event")
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        """Now."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: CpuEvent) -> float:
        """Milliseconds from this event to `end`."""
        return 1000 * (end.time - self.time)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """Nothing is under way."""
        return True


def _set_device(device: Any) -> None:
    """There is one."""


def _settled(count: Callable[[], int]) -> None:
    """Waits until memory in use stays the same: a thread of gloo frees what it has sent a moment after who waits for it goes on, and a
    script that synchronizes wants to measure."""
    before, same, deadline = count(), 0, time.perf_counter() + _SETTLE_SECONDS
    while same < _SETTLED_READINGS and time.perf_counter() < deadline:
        time.sleep(0.005)
        now = count()
        same = same + 1 if now == before else 0
        before = now


def set_capability(major: int, minor: int) -> None:
    """What `torch.cuda.get_device_capability` is to answer without a GPU, for programs that refuse to run below some number."""
    global _CAPABILITY
    _CAPABILITY = (major, minor)


def answers() -> dict[str, Any]:
    """What takes the place of which name of `torch.cuda`."""
    found: dict[str, Any] = {
        "set_device": _set_device,
        "synchronize": lambda device=None: None,
        # Scripts give it as `device=`, where a number would be an accelerator's.
        "current_device": lambda: torch.device("cpu"),
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "Event": CpuEvent,
    }
    count = _heap_counter()
    if count is not None:
        found["memory_allocated"] = lambda device=None: count()
        found["synchronize"] = lambda device=None: _settled(count)
    if _STATUS.exists() and _CLEAR.exists():
        found |= {"max_memory_allocated": _peak_resident_bytes, "reset_peak_memory_stats": _reset_peak}
    return found


def _shard_on_cpu() -> None:
    """FSDP1 takes the GPU where it is not told a device, and refuses without one: it takes the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    original = FullyShardedDataParallel.__init__

    @functools.wraps(original)
    def on_cpu(self: Any, *args: Any, **options: Any) -> None:
        if options.get("device_id") is None:
            options["device_id"] = torch.device("cpu")
        original(self, *args, **options)

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]


def answer_for_cpu() -> None:
    """Replaces the functions, for the rest of the process; nothing where there is a GPU."""
    if torch.cuda.is_available() or issubclass(torch.cuda.Event, CpuEvent):
        return
    for name, answer in answers().items():
        setattr(torch.cuda, name, answer if isinstance(answer, type) else _said(name, answer))
    _shard_on_cpu()
