"""A save in another thread, one at a time."""

from __future__ import annotations

import threading

from torch import Tensor

from ottava.checkpoint.errors import CheckpointError
from ottava.checkpoint.plan import Item
from ottava.checkpoint.save import Save
from ottava.checkpoint.team import Team


class Background:
    """Finishes saves in a thread, with a process group that the training thread does not use."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.trusted = True
        """False after a save failed here: the next one belongs into the caller's thread."""
        self._buffers: dict[Item, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None
        self._done = False

    def start(self, save: Save, step: int) -> None:
        """Copies the state, which then may change, and writes the copy. If no thread can be had, writes here."""
        save.stage(self._buffers)
        self._step, self._error, self._done = step, None, False
        self.team.connect(f"step {step} was not saved")  # here: making a group is an act of all ranks in one order
        self._thread = threading.Thread(target=self._run, args=(save,), name="ottava-checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            self._run(save)

    def wait(self) -> int | None:
        """The step that was saved; None if no save was under way. Raises the error of the save, once."""
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        if thread.ident is not None:
            thread.join()
        if self._done:
            return self._step
        self.trusted = False
        raise self._error or CheckpointError(f"step {self._step} was not saved: its thread ended without a word.")

    def _run(self, save: Save) -> None:
        try:
            save.finish(self.team)
            self._done = True
        except BaseException as error:  # raised by `wait`
            self._error = error
