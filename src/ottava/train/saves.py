"""`Saves`: when a checkpoint is due, and what happens when one fails: an event, an alarm, another try; training goes on."""

from __future__ import annotations

import time

from ottava.checkpoint.errors import CheckpointError, RankLost
from ottava.notices import leads, log
from ottava.train.config import CheckpointSection
from ottava.train.exits import NotSaved
from ottava.train.recorder import Recorder
from ottava.train.state import RunState

LAST_TRIES = 3
"""Of a save that training cannot go on without: the last one."""
LAST_PAUSE_S = 2.0


class Saves:
    """The saves of one run. Every rank calls every method; all see the same failures.

    >>> saves = Saves(config.checkpoint, state, recorder)
    >>> if saves.due(step):
    ...     saves.save(step)
    """

    def __init__(self, section: CheckpointSection, state: RunState, recorder: Recorder) -> None:
        self._section, self._state, self._recorder = section, state, recorder
        self._failed = 0  # in a row
        self._again: int | None = None  # the step of the next try after a failure

    def due(self, done: int) -> bool:
        """Whether `done` steps are a reason to save."""
        every = self._section.every
        if done == 0 or done == self._state.checkpoints.last_saved:
            return False
        return (every > 0 and done % every == 0) or (self._again is not None and done >= self._again)

    def save(self, done: int) -> None:
        """Tried twice: a failure in the background shows here, and is that of the save before. Raises NotSaved after too many."""
        for _ in range(2):
            if self._try(done, wait=False):
                return
        self._again = done + max(self._section.every // 10, 1)

    def last(self, done: int) -> None:
        """Committed when this returns; raises NotSaved otherwise."""
        for left in reversed(range(LAST_TRIES)):
            if self._try(done, wait=True, enough=left == 0):
                return
            time.sleep(LAST_PAUSE_S)

    def _try(self, done: int, wait: bool, enough: bool = False) -> bool:
        try:
            self._state.save(done, wait=wait)
        except RankLost:
            raise  # there is nobody to go on with
        except CheckpointError as error:
            self._failed += 1
            if leads():
                log.warning("ottava train: checkpoint failed, %d in a row: %s", self._failed, error)
            self._recorder.note(f"checkpoint failed: {error}")
            if enough or self._failed >= self._section.max_failed:
                reason = str(error).rstrip(".")
                raise NotSaved(
                    f"{reason}. Those were {self._failed} failures in a row (checkpoint.max_failed is {self._section.max_failed})."
                ) from error
            return False
        self._failed, self._again = 0, None
        return True
