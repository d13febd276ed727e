"""SIGTERM: the scheduler wants the process to end, soon, and the run to be resumable."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from ottava.checkpoint.team import Team

EXIT_CODE = 128 + signal.SIGTERM
"""143: stopped by SIGTERM, after saving."""


class StopSignal:
    """Remembers SIGTERM instead of dying from it. The loop asks between steps, when the state is whole.

    >>> with StopSignal() as stop:
    ...     for step in steps:
    ...         train(state)
    ...         if stop.anywhere(checkpoints.team):          # the same answer in every rank
    ...             checkpoints.finish(step, state)          # waits for the save of this step, or makes it
    ...             sys.exit(EXIT_CODE)

    Signals can be handled in the main thread only. A second SIGTERM does what it would have done without this.
    """

    def __init__(self) -> None:
        self.requested = False
        """In this process."""
        self._before: Any = None

    def anywhere(self, team: Team) -> bool:
        """Whether any rank was asked to stop. Ranks get the signal at different times, and must end after the same step."""
        return team.any(self.requested)

    def __enter__(self) -> StopSignal:
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
