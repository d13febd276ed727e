"""`Watchdog`: when no step ends for too long, says which rank is behind, writes every rank's stacks, and ends the process.

A rank that waits in a collective looks just like one that hangs. So every rank keeps telling the others, through the store, how far
it has come; the one that is behind, or has stopped telling, is the one the others wait for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from ottava import torch_private
from ottava.train.config import Config
from ottava.train.exits import FAILED
from ottava.train.world import World

PHASES = ("start", "checkpoint", "data", "forward", "backward", "agreement", "optimizer", "evaluation", "sample")
"""In the order in which a step goes through them."""
FOLDER = "stalls"


class Watchdog:
    """A thread in every rank. Use it in a `with` block, and call `beat` as the run moves on.

    >>> with Watchdog(config, world) as watchdog:
    ...     watchdog.beat(step, "forward")
    """

    def __init__(self, config: Config, world: World) -> None:
        self._limit = config.health.watchdog_s
        self._folder = config.run_folder / FOLDER
        self._rank, self._size = world.rank, world.size
        self._last = (time.monotonic(), 0, "start")
        self._over = threading.Event()
        self._store = dist.PrefixStore("ottava/watchdog", world.store)
        self._thread = threading.Thread(target=self._watch, name="ottava watchdog", daemon=True)

    def beat(self, step: int, phase: str) -> None:
        """The run is alive and has come to `phase` of `step`."""
        self._last = (time.monotonic(), step, phase)

    def __enter__(self) -> Watchdog:
        if self._limit:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        """Tells the others where this rank is, several times in the time limit; looks around when that is over."""
        pause = min(self._limit / 8, 10.0)
        while not self._over.wait(pause):
            moved, step, phase = self._last
            idle = time.monotonic() - moved
            told = {"step": step, "phase": phase, "told": time.time()}
            try:
                self._store.set(str(self._rank), json.dumps(told))
                if idle > self._limit:
                    self._stalled(idle, pause)
            except RuntimeError:  # the store is gone, and with it the run
                return

    def _stalled(self, idle: float, pause: float) -> None:
        self._over.wait(2 * pause)  # the others find out a little earlier or later: all should have told the same state
        if self._over.is_set() or time.monotonic() - self._last[0] < self._limit:
            return
        text = describe(self._told(), self._size, idle, 4 * pause)
        folder = self._folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{self._rank}.txt").open("w", encoding="utf-8") as file:
            print(text, file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
        (folder / f"rank-{self._rank}-collectives.json").write_text(torch_private.flight_record(), encoding="utf-8")
        print(
            f"ottava train: rank {self._rank}: {text} Stacks and collectives of every rank: {folder}", file=sys.stderr
        )
        sys.stderr.flush()
        os._exit(FAILED)  # the main thread waits in a call that will not return

    def _told(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self._size):
            if self._store.check([str(rank)]):
                found[rank] = json.loads(self._store.get(str(rank)))
        return found


def describe(told: dict[int, dict[str, Any]], size: int, idle: float, silence: float, now: float | None = None) -> str:
    """Who is to blame, in words. told: what each rank said last; silence: seconds after which one counts as silent.

    >>> describe({0: {"step": 7, "phase": "agreement", "told": 99.0}, 1: {"step": 7, "phase": "data", "told": 99.0}}, 2, 60, 10, now=100)
    'no step for 60 s. Rank 1 is behind: step 7, data; the others are at step 7, agreement.'
    """
    now = time.time() if now is None else now
    silent = [rank for rank in range(size) if rank not in told or now - told[rank]["told"] > silence]
    if silent:
        names = ", ".join(map(str, silent))
        last = "; ".join(f"rank {r} was at step {told[r]['step']}, {told[r]['phase']}" for r in silent if r in told)
        return f"no step for {idle:.0f} s. Silent, so stopped or dead: rank {names}" + (f" ({last})." if last else ".")

    def progress(rank: int) -> tuple[int, int]:
        return told[rank]["step"], PHASES.index(told[rank]["phase"])

    behind, ahead = min(map(progress, told)), max(map(progress, told))
    if behind == ahead:
        return f"no step for {idle:.0f} s. All ranks are at step {behind[0]}, {PHASES[behind[1]]}."
    names = ", ".join(str(rank) for rank in told if progress(rank) == behind)
    return (
        f"no step for {idle:.0f} s. Rank {names} is behind: step {behind[0]}, {PHASES[behind[1]]}; "
        f"the others are at step {ahead[0]}, {PHASES[ahead[1]]}."
    )
