"""A process that has talked through gloo ends with its own exit code, also on a busy machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ottava import gloo_threads

# On one core, gloo's thread drops the tensor when the main thread has gone on to end the interpreter. `group` outlives its destruction.
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import atexit, ottava
if sys.argv[1:] == ["as torch has it"]:
    atexit.unregister(ottava.gloo_threads.wait_until_at_rest)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
core = min(os.sched_getaffinity(0))
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {core})
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are seen in Linux's /proc")


def exit_codes(times: int, *arguments: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return [subprocess.run(command, capture_output=True, timeout=120).returncode for _ in range(times)]


@needs_proc
def test_a_process_ends_with_its_own_exit_code() -> None:
    assert exit_codes(4) == [0, 0, 0, 0]


@needs_proc
@pytest.mark.extra
def test_torch_alone_aborts() -> None:
    """If this fails torch has mended it, and `gloo_threads` can go."""
    assert any(code == -6 for code in exit_codes(10, "as torch has it"))


@needs_proc
def test_threads_of_a_group_are_found_and_come_to_rest() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(4))
        assert gloo_threads._looked_at(), "torch calls its threads something else now"
        assert gloo_threads.wait_until_at_rest()
    finally:
        dist.destroy_process_group()


def test_without_gloo_nothing_is_waited_for() -> None:
    begin = time.perf_counter()
    assert gloo_threads.wait_until_at_rest()
    assert time.perf_counter() - begin < 1


def test_a_thread_that_goes_on_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "_TASKS", Path.cwd())
    monkeypatch.setattr(gloo_threads, "_looked_at", lambda: {"7": ("R", 0)})
    assert not gloo_threads.wait_until_at_rest(limit=0.01)
