"""How a process of `ottava train` takes SIGTERM, Ctrl-C, SIGHUP and SIGUSR1: the run saves once and ends; Ctrl-C again ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ottava.checkpoint.stop import SIGNALS, StopSignal
from ottava.train import exits
from ottava.train.console import tell


def announce(number: int) -> None:
    """Says what happens now."""
    again = "; press Ctrl-C again to abandon" if number == signal.SIGINT else ""
    tell(f"ottava train: {signal.Signals(number).name}: saving{again}.")


class RankSignals(StopSignal):
    """In a rank. speaks: it is rank 0, without a launcher of ours. alone: nobody but this rank can give up."""

    def __init__(self, speaks: bool = False, alone: bool = False) -> None:
        super().__init__()
        self._speaks, self._alone = speaks, alone

    @property
    def name(self) -> str:
        """Of the signal that this rank has got."""
        return signal.Signals(self.number).name if self.number is not None else "a signal to another rank"

    def asked(self, number: int) -> None:
        """Rank 0 says so."""
        if self._speaks:
            announce(number)

    def abandon(self) -> None:
        """Under our launcher, that one ends the ranks."""
        if self._alone:
            os._exit(exits.ABANDONED)


class LauncherSignals(StopSignal):
    """In the process that has started the ranks: what it gets is passed on, once. speaks: no other launcher says so."""

    def __init__(self, processes: Collection[Any], speaks: bool = True) -> None:
        super().__init__()
        self._processes, self._speaks = processes, speaks
        self.abandoned = False

    def asked(self, number: int) -> None:
        """The whole process group may have got it: ranks take it as one."""
        if self._speaks:
            announce(number)
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def abandon(self) -> None:
        """Ends the ranks, whatever they do. If all have ended by themselves, they have saved, and nothing is abandoned."""
        running = [process for process in self._processes if process.is_alive()]
        if not running:
            return
        tell("ottava train: abandoned.")
        self.abandoned = True
        for process in running:
            process.kill()


@contextmanager
def held_back() -> Iterator[None]:
    """Signals wait. A process that is started inside has them waiting until it calls `let_through`: none can come too early."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """In a started process, when it can handle them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
