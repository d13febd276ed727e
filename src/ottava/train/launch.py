"""`ottava train`: starts the ranks of this machine, passes signals on, replaces ranks that die, and ends as they end.

Without another launcher it starts one process a GPU (or 2 on a CPU). A process that torchrun or Slurm has started is a launcher of
one rank: what they see does not die when the rank does. The store through which the ranks find each other is served by a launcher,
so it outlives all of them.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ottava.train import exits
from ottava.train.config import Config
from ottava.train.console import say, settle, tell
from ottava.train.signals import LauncherSignals, RankSignals, let_through
from ottava.untrusted.files import open_anew

if TYPE_CHECKING:
    import torch.distributed as dist

    from ottava.train.keeper import Keeper
    from ottava.train.nursery import Child, Nursery
    from ottava.train.recorder import Report
    from ottava.train.watchdog import FrozenRanks
    from ottava.train.world import Place

GRACE_S = 15.0
"""Ranks get this long to end by themselves after one has failed: the others may wait for it in a collective."""
STALLED_GRACE_S = 8.0
"""The same when a watchdog has ended one: the others' have looked at the same clock."""
ABANDONED_GRACE_S = 5.0
"""The same when torchrun ends them after the launcher of rank 0 has ended: it would wait for half a minute for a rank that is frozen."""
PARENT_S = 6.0
"""torchrun gets this long to end after its ranks, where the network is cut."""
IMPORTED = ("ottava.train.loop", "ottava.checkpoint.directory", "torch._dynamo", "numpy.ma", "numpy.random")
"""Once for all ranks: the loop, and what its first step imports."""
FILES, FILES_A_RANK = 32, 16
"""Open files, most of them sockets, that a launcher and each of its ranks have at least: 2 ranks run with 64, and not with 32."""
Prepare = Callable[[int], None]


def launch(config: Config, prepare: Prepare | None = None) -> int:
    """Trains on this machine's ranks, or on the one that torchrun says this process is. Returns the exit code.

    prepare: called with its number in every rank that is started, first of all. Fault injection begins there.

        >>> sys.exit(launch(config))
    """
    from ottava.train.listen import LOOPBACK, serve_store
    from ottava.train.nursery import Nursery
    from ottava.train.world import Place, local_ranks, shared_store

    place = Place.from_torchrun()
    if place is not None and not config.health.restarts:
        return _be_rank(config, place, prepare)
    start_s = config.health.watchdog_start_s if config.health.watchdog_s else 0.0
    try:
        tempfile.gettempdir()  # torch asks for it, too
    except OSError as error:
        return _refuse(error)
    nursery = Nursery(*IMPORTED, start_s=start_s or None)  # first of all: this process has no threads yet
    count = local_ranks(config.parallel.ranks) if place is None else 1
    try:
        allow_open_files(FILES + FILES_A_RANK * count)
        notes = tempfile.TemporaryDirectory(prefix="ottava-")  # never on the disk of the run, which may be full
    except OSError as error:
        return _refuse(error)
    if place is None:
        store, kept = serve_store(), config.health.restarts > 0
        places = [Place(rank, count, rank, count, LOOPBACK, store.port, kept) for rank in range(count)]
    else:
        store, host = shared_store(place)
        places = [replace(place, host=host, port=store.port, kept=True)]
    with notes as folder:
        return Launcher(config, places, store, nursery, Path(folder), prepare, child=place is not None).run()


def _refuse(error: OSError) -> int:
    say(f"ottava train: {error}", sys.stderr)
    return exits.WRONG_USAGE


def allow_open_files(wanted: int) -> None:
    """OSError if this process may not have so many files open, and cannot allow itself to: ranks that find no more sockets wait for each
    other until the watchdog ends them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OSError(f"{hard} files may be open here at a time, and {wanted} are needed: raise the limit (ulimit -n).")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _be_rank(config: Config, place: Place, prepare: Prepare | None) -> int:
    """This process, which torchrun has started, is the rank."""
    from ottava.train.nursery import call_process

    call_process(f"rank {place.rank}")
    if prepare is not None:
        prepare(place.rank)
    stop = RankSignals(speaks=place.rank == 0, alone=True)
    stop.__enter__()  # for good: a signal must not kill a rank on its way out either
    code, text = run_rank(config, place, stop)
    if text:
        say(f"ottava train: rank {place.rank}: {text}", sys.stderr)
    settle()
    return code


def run_rank(
    config: Config, place: Any, stop: RankSignals | None = None, report: Report | None = None
) -> tuple[int, str]:
    """One rank from beginning to end: (exit code, what is to be said about a failure).

    stop: what handles signals already. report: is told of every step.
    """
    from ottava.checkpoint import NoUsableCheckpoint
    from ottava.train.loop import train
    from ottava.train.members import Released
    from ottava.train.rank_log import RankLog
    from ottava.train.watchdog import Watchdog
    from ottava.train.world import World

    _prepare(os.environ, config, place.kept)
    try:
        with (
            RankLog(config.run_folder, place),
            Watchdog(config, place.rank, place.size, stop, place.kept) as watchdog,
            World(place, 4 * config.health.watchdog_s or 1800.0, watchdog.connect, watchdog.came) as world,
        ):
            try:
                return train(config, world, stop, watchdog, report), ""
            except Released:  # there are fewer ranks now, and this is none of them
                return exits.DONE, ""
    except NoUsableCheckpoint as error:
        return exits.NO_CHECKPOINT, str(error)
    except ValueError as error:
        _keep_traceback(config, place.rank)
        return exits.WRONG_USAGE, str(error)
    except Exception:
        return exits.FAILED, traceback.format_exc()


def _prepare(environment: MutableMapping[str, str], config: Config, kept: bool = False) -> None:
    """What libraries read once, when they start. What somebody has set stays. kept: the rank may outlive others."""
    from ottava.overlap.connections import ask_for_connections

    if config.train.deterministic:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not be deterministic
    if config.parallel.tp > 1 and config.parallel.overlap != "none":
        ask_for_connections(environment)
    if kept:
        # A rank that lost another one is not to be ended by NCCL's own watchdog: ours is there, and it meets the others again.
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch remembers, for the watchdog


def _keep_traceback(config: Config, rank: int) -> None:
    """A ValueError is shown as its message; where it came from lies beside the run, if there is one: but not beside one that another
    process is at, whose error this is not."""
    from ottava.train import lock

    folder = config.run_folder
    with suppress(OSError):  # of a name that is too long, or a folder that is locked, not even this can be asked
        if folder.is_dir() and lock.read(folder / lock.FILE) is None:
            with open_anew(folder / f"error-rank-{rank}.txt") as file:
                file.write(traceback.format_exc())


# ------------------------------------------------------------------------------------------------------------- the launcher


class Launcher:
    """The ranks of some places, from their start to their end. folder: where they leave what they have to say about a failure.

    child: of another launcher, without which the ranks would go on for nobody.
    """

    def __init__(
        self,
        config: Config,
        places: Sequence[Place],
        store: dist.Store,
        nursery: Nursery,
        folder: Path,
        prepare: Prepare | None = None,
        child: bool = False,
    ) -> None:
        from ottava.train.keeper import Keeper
        from ottava.train.members import found
        from ottava.train.watchdog import FrozenRanks

        self._config, self._nursery, self._folder, self._prepare = config, nursery, folder, prepare
        self._places = {place.rank: place for place in places}
        size = places[0].size
        found(store, size)
        self.ranks: dict[int, Child] = {}
        self._signals = LauncherSignals(self.ranks.values(), speaks=0 in self._places)
        self._frozen = FrozenRanks(config.health, store, list(self._places))
        self._keeper = Keeper(config, store, self.ranks, size, self._restart, lambda: self._signals.requested, child)
        self._child, self._parent = child, os.getppid() if child else None

    def run(self) -> int:
        """Until all ranks have ended. The exit code of the run."""
        self._signals.__enter__()  # before the ranks: what comes is passed on to those that are there
        for seat in self._places:
            self.ranks[seat] = self._start(seat)
            if self._signals.number is not None:
                os.kill(self.ranks[seat].pid, self._signals.number)
        first, code = wait_for(self.ranks, self._frozen, self._keeper, self._mind_the_parent)
        code = exits.ABANDONED if self._signals.abandoned else code
        if code not in exits.TOLD:
            files = {seat: self._folder / f"{seat}.txt" for seat in self.ranks}
            texts = {seat: path.read_text(encoding="utf-8") for seat, path in files.items() if path.is_file()}
            say(_report(first, code, texts), sys.stderr)
            if self._signals.requested:
                say_what_is_lost(self._config.run_folder)
        settle()
        if self._child and code == exits.STALLED and self._keeper.cut_off:
            end_later(os.getppid(), PARENT_S)
            os._exit(code)  # threads that wait for the store would hold this process up
        return code

    def _restart(self, seat: int) -> Child:
        """What the one before had to say is not lost."""
        note = self._folder / f"{seat}.txt"
        if note.is_file():
            say(f"ottava train: rank {seat}: {note.read_text(encoding='utf-8')}", sys.stderr)
        return self._start(seat)

    def _start(self, seat: int) -> Child:
        """Signals wait in it until it can handle them."""
        self._frozen.forget(seat)
        work = (self._config, self._places[seat], str(self._folder), os.getpid(), self._prepare)
        return self._nursery.fork(f"rank {seat}", _rank, *work)

    def _mind_the_parent(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            self._parent = None
            tell("ottava train: the launcher is gone: saving.")
            os.kill(os.getpid(), signal.SIGHUP)  # as a terminal does it


def end_later(process: int, seconds: float) -> None:
    """Ends another process, if it has not ended by itself by then: torchrun waits for its store too, and longer than a scheduler should."""
    handle = os.pidfd_open(process)
    if os.fork():
        return
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not wait([handle], timeout=seconds):
            signal.pidfd_send_signal(handle, number)
            seconds = min(seconds, 3.0)
    os._exit(0)


def _rank(config: Config, place: Place, folder: str, launcher: int, prepare: Prepare | None) -> None:
    """The process of one rank."""
    while os.getppid() != launcher:  # the one between is about to end
        if not Path(f"/proc/{launcher}").is_dir():
            os._exit(exits.FAILED)
        time.sleep(0.001)
    stop = RankSignals()
    stop.__enter__()
    let_through()
    threading.Thread(target=_end_with_parent, args=(launcher,), daemon=True).start()
    note = Path(folder) / f"{place.rank}.txt"
    note.unlink(missing_ok=True)
    if prepare is not None:
        prepare(place.rank)
    code, text = run_rank(config, place, stop)
    if text:
        try:
            note.write_text(text, encoding="utf-8")
        except OSError:  # TMPDIR is full: its exit code, and the words, count more than who says them
            say(f"ottava train: rank {place.rank}: {text}", sys.stderr)
    settle()
    sys.exit(code)


def _end_with_parent(launcher: int) -> None:
    """A launcher that was killed cannot end its ranks."""
    try:
        wait([os.pidfd_open(launcher)])
    finally:
        os._exit(exits.FAILED)


def wait_for(
    ranks: Mapping[int, Any],
    frozen: FrozenRanks | None = None,
    keeper: Keeper | None = None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Until all ranks have ended, and none is replaced: (the one whose exit code counts, that code)."""
    from ottava.train import watchdog

    first: int | None = None
    deadline: float | None = None
    gave_up = False
    while True:
        tick()
        # Looked at once: who ends after this is waited for below, and seen the next time.
        codes = _codes(ranks, frozen, keeper)
        failed = [seat for seat, code in codes.items() if code]
        if failed and first is None:
            revived = [keeper is not None and keeper.revive(seat, codes[seat] or 0) for seat in failed]
            if all(revived):
                continue
            first = failed[0]
            deadline = time.monotonic() + (STALLED_GRACE_S if codes[first] == exits.STALLED else GRACE_S)
        running = [ranks[seat] for seat, code in codes.items() if code is None]
        if not running:
            if first is not None or keeper is None or keeper.over():
                break
            time.sleep(keeper.pause or 0.0)
            continue
        left = None if deadline is None else deadline - time.monotonic()
        if left is None:
            if frozen is not None:
                frozen.kill(ranks)
                if stuck := frozen.unkillable(ranks):
                    for process in running:
                        process.kill()
                    _leave_behind([ranks[seat] for seat in stuck], exits.STALLED)
            if keeper is not None:
                keeper.tend()
                if keeper.abandoned:
                    deadline = time.monotonic() + ABANDONED_GRACE_S
                elif keeper.hopeless():
                    tell("ottava train: not all ranks have come to the others: a machine is gone. Ending.")
                    first, deadline = next(iter(ranks)), time.monotonic()
                    gave_up = True
        elif left <= 0:
            for process in running:
                process.kill()
            if left <= -watchdog.UNKILLABLE_S:
                _leave_behind(running, _code(codes[failed[0]]) if failed else exits.STALLED)
        pauses = [one.pause for one in (frozen, keeper) if one is not None and one.pause is not None]
        pause = min(pauses, default=None) if left is None else max(left, 0.1)
        wait([process.sentinel for process in running], timeout=pause)
    return (first, exits.STALLED) if gave_up and first is not None else _verdict(first, codes)


def _codes(ranks: Mapping[int, Any], frozen: FrozenRanks | None, keeper: Keeper | None) -> dict[int, int | None]:
    """Exit codes, None for a rank that runs. One that was killed because it stood still has stalled."""
    codes = {seat: rank.exitcode for seat, rank in ranks.items() if keeper is None or seat not in keeper.released}
    killed = frozen.killed if frozen is not None else set()
    return {seat: exits.STALLED if code is not None and seat in killed else code for seat, code in codes.items()}


def _verdict(first: int | None, codes: Mapping[int, int | None]) -> tuple[int, int]:
    """(rank, exit code) of the run: of the first that failed."""
    for seat, code in codes.items():
        if code == exits.STALLED:  # it has killed the one that it waited for
            return seat, code
    failed = [seat for seat, code in codes.items() if code]
    if first is None and not failed:
        return 0, exits.DONE
    decisive = failed[0] if first is None else first
    return decisive, _code(codes[decisive])


def _leave_behind(processes: Sequence[Any], code: int) -> None:
    """Not even SIGKILL ends a process that the kernel waits in, such as for a frozen file system; a scheduler must be told all the same."""
    names = ", ".join(process.name for process in processes)
    tell(f"ottava train: {names} cannot be killed (frozen in the kernel), and is left behind.")
    os._exit(code)


def _code(exitcode: int | None) -> int:
    """As a shell sees it: 128 + n for signal n."""
    assert exitcode is not None
    return 128 - exitcode if exitcode < 0 else exitcode


def say_what_is_lost(folder: Path) -> None:
    """After a save that a signal asked for, and in which a rank has ended: steps that are in no checkpoint. The disk may hang, too."""
    from ottava.checkpoint.storage import storage_at
    from ottava.train.run_folder import last_step
    from ottava.train.watchdog import SAY_S, within

    def look() -> None:
        saved = max((step for step, _ in storage_at(folder / "checkpoints").candidates()), default=0)
        done = last_step(folder)
        if done > saved:
            say(
                f"ottava train: the save that was asked for is not complete: steps {saved + 1} to {done} are lost, and the next start "
                f"goes on from step {saved}.",
                sys.stderr,
            )

    within(SAY_S, look, quiet=True)


def _report(first: int, code: int, texts: dict[int, str]) -> str:
    """What went wrong, each text once. Ranks that failed only because another one did are left out."""
    if first not in texts:
        return f"ottava train: rank {first} ended with exit code {code}."
    same = ", ".join(str(rank) for rank, text in texts.items() if text == texts[first])
    everyone = len([r for r in texts if texts[r] == texts[first]]) > 1
    who = "" if code == exits.WRONG_USAGE and everyone else f"rank {same}: "
    return f"ottava train: {who}{texts[first]}"
