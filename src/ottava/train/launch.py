"""`ottava train` on one machine: starts the ranks, passes signals on, and ends as they end.

A process that torchrun has started is a rank already. Otherwise this process starts one process a GPU (or 2 on a CPU) and only
waits. The store through which the ranks find each other is served here, so it outlives all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import MutableMapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ottava.train import exits
from ottava.train.config import Config
from ottava.train.console import say, settle, tell
from ottava.train.signals import LauncherSignals, RankSignals, held_back, let_through

if TYPE_CHECKING:
    from ottava.train.recorder import Report
    from ottava.train.watchdog import FrozenRanks

GRACE_S = 15.0
"""Ranks get this long to end by themselves after one has failed: the others may wait for it in a collective."""
STALLED_GRACE_S = 8.0
"""The same when a watchdog has ended one: the others' have looked at the same clock."""
UNKILLABLE_S = 5.0
"""What the system gets to end a process that was killed."""


def launch(config: Config) -> int:
    """Trains on this machine's ranks, or as the rank that torchrun says this process is. Returns the exit code.

    >>> sys.exit(launch(config))
    """
    from ottava.train.world import Place, local_ranks

    place = Place.from_torchrun()
    if place is not None:
        stop = RankSignals(speaks=place.rank == 0, alone=True)
        stop.__enter__()  # for good: a signal must not kill a rank on its way out either
        code, text = run_rank(config, place, stop)
        if text:
            say(f"ottava train: rank {place.rank}: {text}", sys.stderr)
        settle()
        return code
    return _start(config, local_ranks(config.parallel.ranks))


def run_rank(
    config: Config, place: Any, stop: RankSignals | None = None, report: Report | None = None
) -> tuple[int, str]:
    """One rank from beginning to end: (exit code, what is to be said about a failure).

    stop: what handles signals already. report: is told of every step.
    """
    from ottava.checkpoint import NoUsableCheckpoint
    from ottava.train.loop import train
    from ottava.train.rank_log import RankLog
    from ottava.train.watchdog import Watchdog
    from ottava.train.world import World

    _prepare(os.environ, config)
    try:
        with (
            RankLog(config.run_folder, place),
            Watchdog(config, place.rank, place.size, stop) as watchdog,
            World(place, 4 * config.health.watchdog_s or 1800.0, watchdog.connect) as world,
        ):
            return train(config, world, stop, watchdog, report), ""
    except NoUsableCheckpoint as error:
        return exits.NO_CHECKPOINT, str(error)
    except ValueError as error:
        _keep_traceback(config, place.rank)
        return exits.WRONG_USAGE, str(error)
    except Exception:
        return exits.FAILED, traceback.format_exc()


def _prepare(environment: MutableMapping[str, str], config: Config) -> None:
    """What libraries read once, when they start. What somebody has set stays."""
    from ottava.overlap.connections import ask_for_connections

    if config.train.deterministic:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not be deterministic
    if config.parallel.tp > 1 and config.parallel.overlap != "none":
        ask_for_connections(environment)
    environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch remembers, for the watchdog


def _keep_traceback(config: Config, rank: int) -> None:
    """A ValueError is shown as its message; where it came from lies beside the run, if there is one."""
    if config.run_folder.is_dir():
        (config.run_folder / f"error-rank-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ this machine


def _start(config: Config, count: int) -> int:
    from ottava.train.listen import serve_store
    from ottava.train.watchdog import FrozenRanks

    store = serve_store()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ottava-") as folder:
        processes = [
            context.Process(target=_rank, args=(config, rank, count, store.port, folder), name=f"rank {rank}")
            for rank in range(count)
        ]
        signals = LauncherSignals(processes)
        signals.__enter__()
        with held_back():
            for process in processes:
                process.start()
        frozen = FrozenRanks(config.health, store, count)
        first = _wait(processes, frozen)
        failures = {rank: (Path(folder) / f"{rank}.txt") for rank in range(count)}
        texts = {rank: path.read_text(encoding="utf-8") for rank, path in failures.items() if path.is_file()}
    code = exits.STALLED if frozen.killed else _code(processes[first].exitcode)
    code = exits.ABANDONED if signals.abandoned else code
    if code not in exits.TOLD:
        say(_report(first, code, texts), sys.stderr)
    settle()
    return code


def _rank(config: Config, rank: int, count: int, port: int, folder: str) -> None:
    """The process of one rank."""
    from ottava.train.listen import LOOPBACK
    from ottava.train.world import Place

    stop = RankSignals()
    stop.__enter__()
    let_through()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code, text = run_rank(config, Place(rank, count, rank, count, LOOPBACK, port), stop)
    if text:
        (Path(folder) / f"{rank}.txt").write_text(text, encoding="utf-8")
    settle()
    sys.exit(code)


def _end_with_parent() -> None:
    """A launcher that was killed cannot end its ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(exits.FAILED)


def _wait(processes: Sequence[Any], frozen: FrozenRanks | None = None) -> int:
    """Until all ranks have ended. Returns the one whose exit code counts: the first that failed, or 0."""
    first: int | None = None
    deadline: float | None = None
    while True:
        # Looked at once: who ends after this is waited for below, and seen the next time.
        codes = [process.exitcode for process in processes]
        running = [process for process, code in zip(processes, codes) if code is None]
        failed = [rank for rank, code in enumerate(codes) if code]
        if not running:
            break
        if failed and first is None:
            first = failed[0]
            deadline = time.monotonic() + (STALLED_GRACE_S if codes[first] == exits.STALLED else GRACE_S)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            for process in running:
                process.kill()
        if left is not None and left <= -UNKILLABLE_S:
            _leave_behind(running, _code(codes[failed[0]]) if failed else exits.STALLED)
        elif frozen is not None and left is None and (killed := frozen.kill(processes)):
            first, deadline = killed[0], time.monotonic() + STALLED_GRACE_S
        pause = frozen.pause if frozen is not None else None
        wait([process.sentinel for process in running], timeout=pause if left is None else max(left, 0.1))
    if exits.STALLED in codes:  # it has killed the one that it waited for
        return codes.index(exits.STALLED)
    return first if first is not None else (failed[0] if failed else 0)


def _leave_behind(processes: Sequence[Any], code: int) -> None:
    """Not even SIGKILL ends a process that the kernel waits in, such as for a frozen file system; a scheduler must be told all the same."""
    names = ", ".join(process.name for process in processes)
    tell(f"ottava train: {names} cannot be killed (frozen in the kernel), and is left behind.")
    os._exit(code)


def _code(exitcode: int | None) -> int:
    """As a shell sees it: 128 + n for signal n."""
    assert exitcode is not None
    return 128 - exitcode if exitcode < 0 else exitcode


def _report(first: int, code: int, texts: dict[int, str]) -> str:
    """What went wrong, each text once. Ranks that failed only because another one did are left out."""
    if first not in texts:
        return f"ottava train: rank {first} ended with exit code {code}."
    same = ", ".join(str(rank) for rank, text in texts.items() if text == texts[first])
    everyone = len([r for r in texts if texts[r] == texts[first]]) > 1
    who = "" if code == exits.WRONG_USAGE and everyone else f"rank {same}: "
    return f"ottava train: {who}{texts[first]}"
