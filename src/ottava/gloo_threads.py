"""The end of a process that has talked through gloo.

A collective of gloo is over for its caller before gloo's thread has dropped the tensors, and for that the thread needs Python's lock. If
the interpreter is ending by then, Python ends the thread instead, in the middle of a C++ destructor, and the process aborts: "terminate
called without an active exception", exit code 134, after all work was done. torch alone does so wherever something still holds the group
(`tests/test_gloo_threads.py`): a model in a cycle, a mesh, a cache. It shows on busy machines.

So an interpreter that has imported Ottava waits at its end, a few milliseconds, until those threads rest. Nothing is communicated.
"""

from __future__ import annotations

import time
from pathlib import Path

from ottava import torch_private

_TASKS = Path("/proc/self/task")
_LOOK_S = 0.002
_LIMIT_S = 10.0
"""A thread that is still at work by then is left: its collective was never waited for."""


def wait_until_at_rest(limit: float = _LIMIT_S) -> bool:
    """Returns when gloo's threads sleep and have not been woken between two looks; False: some had not within `limit` seconds.

    A thread that waits for Python's lock sleeps too, but it is woken between the looks, when this one gives the lock away.
    Where there is no /proc, threads cannot be asked: they get one moment."""
    if not _TASKS.is_dir():
        time.sleep(_LOOK_S)
        return True
    end, before = time.monotonic() + limit, _looked_at()
    while before:
        time.sleep(_LOOK_S)
        now = _looked_at()
        if now == before and all(state == "S" for state, _ in now.values()):
            return True
        if time.monotonic() > end:
            return False
        before = now
    return True


def _looked_at() -> dict[str, tuple[str, int]]:
    """(state, how often it was woken) of each thread of gloo, by number."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields["Name"] == torch_private.GLOO_THREAD:
            found[task.name] = fields["State"][0], int(fields["voluntary_ctxt_switches"])
    return found
