"""`Checkpoints`: the checkpoints of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from ottava.checkpoint.background import Background
from ottava.checkpoint.digest import algorithm
from ottava.checkpoint.errors import CheckpointError
from ottava.checkpoint.load import Loaded, Relaxed, load
from ottava.checkpoint.save import Save, SaveOptions, no_hook
from ottava.checkpoint.storage import Location, storage_at
from ottava.checkpoint.team import Team
from ottava.notices import log


class Checkpoints:
    """Saves and loads the state of a run, in all ranks together.

    >>> with Checkpoints("run/checkpoints", keep_last=3, keep_every=1000) as checkpoints:
    ...     loaded = checkpoints.load(state)                 # None in a new run
    ...     for step in range(loaded.step + 1 if loaded else 1, 10_001):
    ...         train(state)
    ...         if step % 100 == 0:
    ...             checkpoints.save_async(step, state)      # or save

    The state is nested dicts and lists of plain tensors, DTensors, and plain values (numbers, strings, ...). It is restored in place:
    tensors are filled, values assigned. Every method that takes a state has to be called in every rank.

    root: directory of this run's checkpoints, or a URL that `fsspec` knows, seen by all ranks; one run may use it at a time.
    keep_last: newest checkpoints that stay (0: all). keep_every: steps that are multiples of it stay too (0: none).
    hash: "xxh3_128" (the default where `xxhash` is installed), "blake3", "blake2b" (the default otherwise) or "sha256".
    config: the resolved configuration, which is kept with each checkpoint.
    timeout: seconds that a rank waits for the others; it has to cover the slowest rank's writing. hook: for tests.
    """

    def __init__(
        self,
        root: Location,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        hash: str | None = None,
        config: Mapping[str, Any] | None = None,
        timeout: float = 1800.0,
        hook: Callable[[str], None] = no_hook,
    ) -> None:
        if keep_last < 0 or keep_every < 0:
            raise ValueError(
                f"keep_last={keep_last}, keep_every={keep_every}: expected numbers from 0 (0: no limit, and none)."
            )
        self.storage = storage_at(root)
        self.team = Team(timeout)
        self.last_saved: int | None = None
        """The last step that was committed or loaded."""
        self.rotten: set[int] = set()
        """Steps whose checkpoints were found to be unusable: they do not count for `keep_last`."""
        self._options = SaveOptions(algorithm(hash), keep_last, keep_every, config, hook, self.rotten)
        self._background = Background(Team(timeout))

    def save(self, step: int, state: Mapping[str, Any]) -> Location:
        """Saves and returns the checkpoint's directory, when it is committed. Waits for a save that is under way."""
        self.wait()
        path = self._begin(step, state).finish()
        self._background.trusted = True
        self.last_saved = step
        return path

    def save_async(self, step: int, state: Mapping[str, Any], until: Optimizer | None = None) -> None:
        """Copies the state and saves the copy while training goes on.

        until: what only this optimizer changes (its parameters and its state) is copied behind the next forward and backward pass;
        its next step waits until that is done. Nothing else may change these tensors before. Without it all is copied at once.

        Waits for the save before it, and raises its error. After an error one save is made in this thread instead, so that a
        writer that keeps failing is noticed where it happens.
        """
        self.wait()
        if self._background.trusted:
            self._background.start(self._begin(step, state), step, until)
        else:
            self.save(step, state)

    def wait(self) -> None:
        """Until no save is under way. Raises the error of one that failed."""
        saved = self._background.wait()
        self.last_saved = self.last_saved if saved is None else saved

    def finish(self, step: int, state: Mapping[str, Any]) -> None:
        """Makes sure that `step` is saved, before the process has to end: waits for its save, or makes it."""
        try:
            self.wait()
        except CheckpointError as error:  # of a save before this one
            log.warning("%s", error)
        if self.last_saved != step:
            self.save(step, state)

    def load(self, state: Any, which: Location | int = "newest", relaxed: Relaxed = Relaxed()) -> Loaded | None:  # noqa: B008
        """Restores `state` from a checkpoint.

        which: "newest" takes the newest that verifies and names every newer one that does not in `Loaded.rejected`; None is
        returned if there are none at all. A step (int), a directory (Path) or a URL takes that one alone. NoUsableCheckpoint if nothing
        verifies, ValueError with the keys if state and checkpoint differ in a way that `relaxed` does not allow.
        """
        self.wait()
        loaded = load(self.team, self.storage, state, which, relaxed, self.rotten)
        self.last_saved = loaded.step if loaded else self.last_saved
        return loaded

    def close(self) -> None:
        """Waits for a save that is under way and gives the process groups back."""
        try:
            self.wait()
        finally:
            self.team.leave()
            self._background.team.leave()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, step: int, state: Mapping[str, Any]) -> Save:
        return Save.begin(self.team, self.storage, step, state, self._options)
