"""`Watchdog`: when a rank does not get on for too long, says which rank is behind, keeps every rank's stacks, and ends the process.

A rank that waits in a collective looks just like one that hangs. So every rank keeps telling the others, through the store, how far
it has come; the one that is behind, or has stopped telling, is the one the others wait for. Three threads, none of which can hold
up another:

    teller      talks to the store, and may hang there with it
    timer       looks at this process's own clock, and ends it; needs no store, no disk, no network
    C timer     faulthandler's: ends the process if Python itself stands still, because something keeps the interpreter's lock

Clocks of machines are never compared: how long a rank is silent is measured by the one that listens.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from ottava import torch_private
from ottava.train.config import Config, HealthSection
from ottava.train.console import tell
from ottava.train.exits import STALLED
from ottava.train.lock import born, machine
from ottava.train.signals import RankSignals

FOLDER = "stalls"
PREFIX = "ottava/watchdog"
LONGEST_PAUSE_S = 5.0
FIRST_S = 0.5
"""The same until the rank that may serve the store was heard: if it stops right after the start, its process has to be known."""
SAY_S, KEEP_S = 3.0, 5.0
"""What the timer allows for a line on the console and for files, which may both hang."""
HARD_S = 20.0
"""The C timer ends the process this much later than the timer should have."""
STALLED_S = 12.0
"""A rank that is not to blame for a stall waits this long for the others to meet anew, without those that are."""
RESTART_S = 60.0
"""The others have this long to come."""
UNKILLABLE_S = 5.0
"""What the system gets to end a process that was killed."""
observers: list[Callable[[int, str], None]] = []
"""Called with every beat, in the thread that trains: faults are injected there."""


def limit_of(section: HealthSection, phase: str) -> float:
    """Seconds that a run may stay in a phase without a beat. 0: any number.

    >>> limit_of(HealthSection(watchdog_s=60.0, watchdog_save_s=900.0), "checkpoint")
    900.0
    """
    if not section.watchdog_s:
        return 0.0
    own = {
        "start": section.watchdog_start_s,
        "load": section.watchdog_start_s,
        "checkpoint": section.watchdog_save_s,
        "restart": min(RESTART_S, section.watchdog_start_s or RESTART_S),
        "stalled": STALLED_S,
    }
    return own.get(phase, section.watchdog_s)


def pause_of(section: HealthSection) -> float:
    """Seconds between two messages of a rank: several in every time limit."""
    limits = (limit_of(section, phase) for phase in ("start", "checkpoint", "data"))
    return min([*(limit / 8 for limit in limits if limit), LONGEST_PAUSE_S])


class Watchdog:
    """In every rank, from its first moment. Use it in a `with` block, `connect` it when there is a store, and `beat` as the run moves on.

    kept: a launcher replaces ranks that end, so those that are not to blame for a stall stay.

    >>> with Watchdog(config, rank, size) as watchdog:
    ...     watchdog.connect(store)
    ...     watchdog.beat(step, "forward")
    """

    def __init__(
        self, config: Config, rank: int, size: int, stop: RankSignals | None = None, kept: bool = False
    ) -> None:
        self._kept = kept
        self._section, self._pause = config.health, pause_of(config.health)
        self._folder = config.run_folder / FOLDER
        self._rank, self._ranks, self._stop = rank, tuple(range(size)), stop
        self._parent = os.getppid()
        self._last = (time.monotonic(), 0, "start", 0)  # when, step, phase, beats
        self._over = threading.Event()
        self._store: dist.Store | None = None
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}  # what a rank said, and when its tick last changed
        self._answered = time.monotonic()

    def beat(self, step: int, phase: str) -> None:
        """The run is alive and has come to `phase` of `step`. All ranks beat in the same places, so their numbers compare."""
        self._last = (time.monotonic(), step, phase, self._last[3] + 1)
        for observer in observers:
            observer(step, phase)

    def came(self, ranks: Sequence[int]) -> None:
        """All of them are there: those that came early have the time of a start from here, also if they were about to give up."""
        self._ranks = tuple(ranks)
        _, step, phase, beats = self._last
        if phase in ("start", "stalled"):
            self._last = (time.monotonic(), step, "start", beats)

    def restart(self) -> int:
        """The ranks meet anew: their beats count from here. The step that this one was at."""
        self._last = (time.monotonic(), self._last[1], "restart", 0)
        return self._last[1]

    def met(self, ranks: Sequence[int]) -> None:
        """They have: these are the ones that are told of. What comes now is a start."""
        self._ranks = tuple(ranks)
        self._heard = {}
        self._last = (time.monotonic(), self._last[1], "start", 0)

    def connect(self, store: dist.Store) -> None:
        """From now on the ranks tell each other where they are, over a connection of its own."""
        if self._store is None and self._section.watchdog_s:
            self._store = store
            self._answered = time.monotonic()
            threading.Thread(target=self._go_on, args=(self._talk,), name="ottava watchdog store", daemon=True).start()

    def __enter__(self) -> Watchdog:
        if self._section.watchdog_s:
            if limit := limit_of(self._section, "start"):  # Python may stand still before the timer's first look
                faulthandler.dump_traceback_later(limit + HARD_S, exit=True, file=2)
            threading.Thread(target=self._go_on, args=(self._watch,), name="ottava watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _go_on(self, work: Callable[[], None]) -> None:
        """`work` until it returns, whatever it raises: a watchdog that dies takes the run with it, by the C timer."""
        while not self._over.is_set():
            try:
                work()
            except Exception as error:
                tell(f"ottava train: rank {self._rank}: the watchdog goes on after {type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------------------- the teller

    def _talk(self) -> None:
        """An error of the store is no reason to be silent for ever: the connection is made again."""
        connection, tick = None, 0
        while not self._over.is_set():
            tick += 1
            try:
                connection = connection or dist.PrefixStore(PREFIX, self._store.clone())  # type: ignore[union-attr]
                self._exchange(connection, tick)
                self._answered = time.monotonic()
            except RuntimeError:
                connection = None
            known = self._ranks[0] in self._heard
            self._over.wait(self._pause if known else min(self._pause, FIRST_S))

    def _exchange(self, store: dist.Store, tick: int) -> None:
        moved, step, phase, beats = self._last
        process = {"pid": os.getpid(), "born": born(os.getpid()), "machine": machine()}
        store.set(str(self._rank), json.dumps({"step": step, "phase": phase, "beats": beats, "tick": tick, **process}))
        # Rank 0 may serve the store: when it stands still nobody can be asked any more. The others are only needed then.
        late = time.monotonic() - moved > limit_of(self._section, phase) / 4
        for rank in self._ranks if late else self._ranks[:1]:
            listen(store, rank, self._heard)

    # -------------------------------------------------------------------------------------------------------- the timer

    def _watch(self) -> None:
        while not self._over.wait(min(self._pause, 1.0)):
            moved, _, phase, _ = self._last
            idle, limit = time.monotonic() - moved, limit_of(self._section, phase)
            if not limit:
                faulthandler.cancel_dump_traceback_later()
                continue
            faulthandler.dump_traceback_later(max(limit - idle, 0.0) + HARD_S, exit=True, file=2)
            self._mind_the_parent()
            if idle > limit:
                self._over.wait(
                    self._pause
                )  # the others find out a little earlier or later: all should have told the same state
                if self._last[0] == moved and not self._over.is_set():
                    self._end(time.monotonic() - moved)
        faulthandler.cancel_dump_traceback_later()

    def _mind_the_parent(self) -> None:
        """A rank whose torchrun was killed goes on for nobody: it saves and ends, and frees the run for the next start."""
        if self._stop is not None and not self._stop.requested and os.getppid() != self._parent:
            tell(f"ottava train: rank {self._rank}: the launcher is gone: saving.")
            self._stop.number = signal.SIGHUP

    def _end(self, idle: float) -> None:
        now = time.monotonic()
        told = {rank: {**state, "age": now - since} for rank, (state, since) in list(self._heard.items())}
        _, step, phase, beats = self._last
        told[self._rank] = {"step": step, "phase": phase, "beats": beats, "age": 0.0}
        text = describe(told, self._ranks, idle, 3 * self._pause)
        unreachable = self._store is not None and now - self._answered > 3 * self._pause
        if unreachable:
            text += f" The store has not answered for {now - self._answered:.0f} s."
        line = f"ottava train: rank {self._rank}: {text} Stacks and collectives of every rank: {self._folder}"
        within(SAY_S, lambda: tell(line))
        if phase != "stalled" and not within(KEEP_S, lambda: self._keep(text)):
            within(SAY_S, lambda: faulthandler.dump_traceback(file=2, all_threads=True))
        quiet = silent(told, self._ranks, 3 * self._pause)
        if self._kept and unreachable:
            os._exit(STALLED)  # a launcher serves it: the network is cut, and silence says nothing about the others
        self._kill([told[rank] for rank in quiet if rank in told])
        if self._kept and self._store is not None:
            within(SAY_S, lambda: self._accuse([rank for rank in quiet if rank not in told]), quiet=True)
        if self._kept and phase != "stalled" and self._rank not in (quiet or behind(told)):
            self._last = (time.monotonic(), step, "stalled", beats)  # those that are to blame end, and the others go on
            return
        if self._kept and self._store is not None:
            within(SAY_S, self._say_goodbye, quiet=True)
        os._exit(STALLED)  # the main thread waits in a call that will not return

    def _accuse(self, ranks: Sequence[int]) -> None:
        """Of ranks that never said anything not even the process is known: their launcher is told, which has started them."""
        store = dist.PrefixStore(PREFIX, self._store.clone())  # type: ignore[union-attr]
        for rank in ranks:
            store.set(accusation(rank), "")

    def _say_goodbye(self) -> None:
        """A process of which one thread is frozen in the kernel does not end, whatever it calls: its launcher is told that it should."""
        _, step, phase, _ = self._last
        told = {"step": step, "phase": phase, "beats": 0, "tick": -1, "ended": os.getpid()}
        dist.PrefixStore(PREFIX, self._store.clone()).set(str(self._rank), json.dumps(told))  # type: ignore[union-attr]

    def _keep(self, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stacks, record = (self._folder / f"rank-{self._rank}{name}" for name in (".txt", "-collectives.json"))
        for link in (path for path in (stacks, record) if path.is_symlink()):
            link.unlink()  # in a folder that a stranger made it may lead to any file of the user's
        with stacks.open("w", encoding="utf-8") as file:
            print(text, file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
        record.write_text(torch_private.flight_record(), encoding="utf-8")

    def _kill(self, processes: Sequence[dict[str, Any]]) -> None:
        """Ranks of this machine that say nothing: a stopped process would keep torchrun waiting for half a minute."""
        for process in processes:
            if process["machine"] == machine() != "" and process["born"] == born(process["pid"]) != "":
                os.kill(process["pid"], signal.SIGKILL)


def accusation(rank: int) -> str:
    """The key that says: others have waited for this rank for the time of a start, and it has never said anything."""
    return f"silent/{rank}"


class FrozenRanks:
    """For a launcher: ranks whose whole process stands still, so that nothing in it can end it.

    >>> FrozenRanks(config.health, store, range(4)).kill(processes)
    [1]
    """

    def __init__(self, section: HealthSection, store: dist.Store, ranks: Sequence[int]) -> None:
        self.pause = pause_of(section)
        self._limit = section.watchdog_s and section.watchdog_s + 2 * self.pause
        self._store, self._ranks = dist.PrefixStore(PREFIX, store), ranks
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}
        self.killed: set[int] = set()
        """All that were, and were not replaced."""
        self._gone: dict[int, float] = {}  # since when a rank should have ended
        self._accused: set[int] = set()

    def forget(self, rank: int) -> None:
        """It has been replaced."""
        if rank in self._accused:
            self._accused.discard(rank)
            within(SAY_S, partial(self._store.delete_key, accusation(rank)), quiet=True)
        self._heard.pop(rank, None)
        self._gone.pop(rank, None)
        self.killed.discard(rank)

    def kill(self, processes: Any) -> list[int]:
        """Kills and names those that are frozen. To be called every `pause` seconds. A store that does not answer proves nothing."""
        if not self._limit or not within(SAY_S, self._listen, quiet=True):
            return []
        now = time.monotonic()
        still = [rank for rank, (_, since) in self._heard.items() if now - since > self._limit]
        found = [
            rank
            for rank in (*still, *(self._accused - self._heard.keys()))
            if rank not in self.killed and processes[rank].exitcode is None
        ]
        self.killed.update(found)
        for rank in found:
            since = "since it was started"
            if rank in self._heard:
                since = "since step {step}, {phase}".format_map(self._heard[rank][0])
            tell(f"ottava train: rank {rank} stands still as a whole process, {since}: killed.")
            processes[rank].kill()
        ended = [rank for rank, (state, _) in self._heard.items() if state.get("ended", 0) == processes[rank].pid]
        for rank in (*found, *ended):
            self._gone.setdefault(rank, now)
        return found

    def unkillable(self, processes: Any) -> list[int]:
        """Those that were killed, or have ended themselves, and are there all the same: the kernel waits in them."""
        now = time.monotonic()
        return [
            rank
            for rank, since in self._gone.items()
            if now - since > UNKILLABLE_S and processes[rank].exitcode is None
        ]

    def _listen(self) -> None:
        for rank in self._ranks:
            listen(self._store, rank, self._heard)
            if rank not in self._heard and self._store.check([accusation(rank)]):
                self._accused.add(rank)


def listen(store: dist.Store, rank: int, heard: dict[int, tuple[dict[str, Any], float]]) -> None:
    """Notes what `rank` has told last, and when that was new."""
    if not store.check([str(rank)]):
        return
    state = json.loads(store.get(str(rank)))
    if rank not in heard or heard[rank][0]["tick"] != state["tick"]:
        heard[rank] = (state, time.monotonic())


def within(seconds: float, work: Callable[[], Any], quiet: bool = False) -> bool:
    """Whether `work` came to its end in time. It is left alone otherwise: a file system may have frozen under it.

    quiet: what it raises is not told.
    """
    done = threading.Event()

    def run() -> None:
        try:
            work()
            done.set()
        except Exception as error:
            if not quiet:
                tell(f"ottava train: {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has no thread left
        return False
    thread.join(seconds)
    return done.is_set()


def silent(told: dict[int, dict[str, Any]], ranks: Sequence[int], silence: float) -> list[int]:
    """Those of `ranks` that have told nothing for more than `silence` seconds."""
    return [rank for rank in ranks if rank not in told or told[rank]["age"] > silence]


def behind(told: dict[int, dict[str, Any]]) -> list[int]:
    """Ranks that have come less far than others; all of them, if all are in the same place."""
    least = min(state["beats"] for state in told.values())
    return [rank for rank in sorted(told) if told[rank]["beats"] == least]


def describe(told: dict[int, dict[str, Any]], ranks: Sequence[int], idle: float, silence: float) -> str:
    """Who is to blame, in words. told: what each rank said last, and how long ago; silence: seconds after which one counts as silent.

    >>> at = {"step": 7, "age": 1.0}
    >>> describe({0: {**at, "phase": "agreement", "beats": 31}, 1: {**at, "phase": "data", "beats": 28}}, range(2), 60, 10)
    'no progress for 60 s. Rank 1 is behind: step 7, data; the others are at step 7, agreement.'
    """
    if quiet := silent(told, ranks, silence):
        last = "; ".join(f"rank {r} was at step {told[r]['step']}, {told[r]['phase']}" for r in quiet if r in told)
        return f"no progress for {idle:.0f} s. Silent, so stopped or dead: rank {_names(quiet)}" + (
            f" ({last})." if last else "."
        )
    order = sorted(told, key=lambda rank: told[rank]["beats"])
    first, last_one = told[order[0]], told[order[-1]]
    if first["beats"] == last_one["beats"]:
        return f"no progress for {idle:.0f} s. All ranks are at step {first['step']}, {first['phase']}."
    return (
        f"no progress for {idle:.0f} s. Rank {_names(behind(told))} is behind: step {first['step']}, {first['phase']}; "
        f"the others are at step {last_one['step']}, {last_one['phase']}."
    )


def _names(ranks: Sequence[int], most: int = 16) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more
