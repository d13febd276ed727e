"""Which checkpoints may go."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from ottava.checkpoint.errors import InvalidCheckpoint
from ottava.checkpoint.manifest import check_sizes, read_manifest
from ottava.checkpoint.storage import Folder, Storage


def prune(
    storage: Storage, saved: int, keep_last: int, keep_every: int, rotten: Collection[int] = frozenset()
) -> list[int]:
    """Removes old checkpoints; the steps that went.

    keep_last: how many of the newest stay (0: all). keep_every: steps that are multiples of it stay (0: none for this reason).
    `saved`, which has just been written and so is the newest that is known to be good, always stays. What has no valid manifest or
    lacks bytes, or is known to be `rotten`, is neither counted nor removed: somebody may want to look at it.
    """
    if keep_last == 0:
        return []
    usable = [step for step, folder in storage.candidates() if step not in rotten and _usable(folder)]
    keep = {saved, *usable[:keep_last], *(s for s in usable if keep_every and s % keep_every == 0)}
    gone = [s for s in usable if s not in keep]
    for step in gone:
        storage.remove(step)
    return gone


def _usable(folder: Folder) -> bool:
    with suppress(InvalidCheckpoint, OSError):
        check_sizes(folder, read_manifest(folder))
        return True
    return False
