"""Signals by which a person or a scheduler asks the process to end, soon, and the run to be resumable."""

from __future__ import annotations

import signal
import time
from typing import Any, Self

from ottava.checkpoint.team import Team

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
EXIT_CODE = 128 + signal.SIGTERM
"""143: stopped by one of them, after saving."""
AGAIN_S = 1.0
"""Ctrl-C reaches a rank from the terminal and from its launcher: only one that comes this much later is pressed again."""


class StopSignal:
    """Remembers a signal instead of dying from it. The loop asks between steps, when the state is whole.

    >>> with StopSignal() as stop:
    ...     for step in steps:
    ...         train(state)
    ...         if stop.anywhere(checkpoints.team):          # the same answer in every rank
    ...             checkpoints.finish(step, state)          # waits for the save of this step, or makes it
    ...             sys.exit(EXIT_CODE)

    Signals can be handled in the main thread only; those that are ignored (nohup) stay so. Only Ctrl-C, pressed again, interrupts.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that this process has got."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """In this process."""
        return self.number is not None

    def anywhere(self, team: Team) -> bool:
        """Whether any rank was asked to stop. Ranks get the signal at different times, and must end after the same step."""
        return team.agree("comparing a flag", lambda: self.requested, any)

    def __enter__(self) -> Self:
        kept = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in kept}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def asked(self, number: int) -> None:
        """The first signal has come. To be overridden; nothing is done here."""

    def abandon(self) -> None:
        """Ctrl-C was pressed again."""
        raise KeyboardInterrupt

    def _handle(self, number: int, frame: object) -> None:
        if self.number is None:
            self.number, self._since = number, time.monotonic()
            self.asked(number)
        elif number == signal.SIGINT and time.monotonic() - self._since > AGAIN_S:
            self.abandon()
