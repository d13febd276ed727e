"""The directory of a run's checkpoints: what is in it, what an interrupted save left, what may go."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from ottava.checkpoint.errors import InvalidCheckpoint
from ottava.checkpoint.manifest import check_sizes, read_manifest
from ottava.checkpoint.names import directory_name, remains_of, step_of, sync_directory


def candidates(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that is called a checkpoint, newest first. Whether one exists, its manifest says."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    found = [(step, root / name) for name in names if (step := step_of(name)) is not None]
    return sorted(found, reverse=True)


def recover(root: Path) -> None:
    """Puts back a checkpoint that was set aside to be replaced and never was."""
    for name in sorted(os.listdir(root)):
        target, kind = remains_of(name) or ("", "")
        if kind == "old" and not os.path.lexists(root / target):
            os.rename(root / name, root / target)
            sync_directory(root)


def sweep(root: Path) -> None:
    """Clears what interrupted saves and prunings left. One run owns the directory: no save may be under way."""
    recover(root)
    for name in os.listdir(root):
        if remains_of(name):
            _remove(root / name)


def temporary(root: Path, step: int) -> Path:
    """A new name for a save in progress."""
    return root / f"{directory_name(step)}.tmp-{secrets.token_hex(4)}"


def publish(finished: Path, step: int) -> Path:
    """Gives a finished directory its name, durably. One that has the name is set aside first and removed after."""
    root, target = finished.parent, finished.parent / directory_name(step)
    aside = None
    if os.path.lexists(target):
        aside = root / f"{directory_name(step)}.old-{secrets.token_hex(4)}"
        os.rename(target, aside)
    os.rename(finished, target)
    sync_directory(root)
    if aside is not None:
        _remove(aside)
    return target


def prune(root: Path, saved: int, keep_last: int, keep_every: int) -> list[int]:
    """Removes old checkpoints; the steps that went.

    keep_last: how many of the newest stay (0: all). keep_every: steps that are multiples of it stay (0: none for this reason).
    `saved`, which has just been written and so is the newest that is known to be good, always stays. What has no valid manifest or
    lacks bytes is neither counted nor removed: somebody may want to look at it.
    """
    if keep_last == 0:
        return []
    usable = [step for step, path in candidates(root) if _usable(path)]
    keep = {saved, *usable[:keep_last], *(s for s in usable if keep_every and s % keep_every == 0)}
    gone = [s for s in usable if s not in keep]
    for step in gone:
        # Under another name first: a directory that is half removed must not be called a checkpoint.
        doomed = temporary(root, step)
        os.rename(root / directory_name(step), doomed)
        _remove(doomed)
    return gone


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def _usable(path: Path) -> bool:
    try:
        if path.is_symlink():
            return False
        check_sizes(path, read_manifest(path))
    except (InvalidCheckpoint, OSError):
        return False
    return True
