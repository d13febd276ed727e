"""A run's checkpoints in a local directory: what is in it, what an interrupted save left, how a finished one gets its name."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

from ottava.checkpoint.errors import InvalidCheckpoint
from ottava.checkpoint.names import DISTRUSTED, directory_name, open_inside, remains_of, step_of, sync_directory
from ottava.checkpoint.storage import Folder


class LocalFolder:
    """A directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def exists(self) -> bool:
        """Whether it is a directory."""
        return self.path.is_dir()

    def check_kind(self) -> None:
        """A link that is called a checkpoint is refused: it could lead anywhere."""
        if self.path.is_symlink() and step_of(self.name) is not None:
            raise InvalidCheckpoint.of(self.name, "is a symbolic link: name the directory it leads to.")

    def open(self, file: str) -> BinaryIO:
        """For reading; never a link, a pipe or a file elsewhere."""
        return open_inside(self.path, file)

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """For writing, unbuffered."""
        return open(self.path / file, "xb", buffering=0)  # type: ignore[return-value]

    def make_durable(self, file: BinaryIO) -> None:
        """fsync."""
        os.fsync(file.fileno())

    def size(self, file: str) -> int:
        """Bytes on the disk."""
        return os.stat(self.path / file).st_size

    def sync(self) -> None:
        """fsync of the directory."""
        sync_directory(self.path)


class LocalStorage:
    """A directory of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def candidates(self) -> list[tuple[int, Folder]]:
        """(step, directory) of everything that is called a checkpoint, newest first; after all others those that are distrusted."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        found: list[tuple[int, Folder]] = [
            (step, self.folder(name)) for name in names if (step := step_of(name)) is not None
        ]
        marks = set(names)
        return sorted(found, key=lambda each: (each[1].name + DISTRUSTED not in marks, each[0]), reverse=True)

    def distrust(self, step: int) -> None:
        """Puts a checkpoint behind all others, durably: whoever starts next shall not take the way again that led back from it."""
        self._mark(step).touch()
        sync_directory(self.path)

    def distrusted(self, step: int) -> bool:
        """Whether somebody has."""
        return self._mark(step).exists()

    def folder(self, name: str) -> LocalFolder:
        """By name."""
        return LocalFolder(self.path / name)

    def recover(self) -> None:
        """Puts back a checkpoint that was set aside to be replaced and never was."""
        for name in sorted(os.listdir(self.path)):
            target, kind = remains_of(name) or ("", "")
            if kind == "old" and not os.path.lexists(self.path / target):
                os.rename(self.path / name, self.path / target)
                sync_directory(self.path)

    def begin(self, step: int) -> LocalFolder:
        """Makes a directory `step-N.tmp-...`, after clearing what interrupted saves and prunings left."""
        _make_durably(self.path)
        self.recover()
        for name in os.listdir(self.path):
            if remains_of(name):
                _remove(self.path / name)
        folder = self._temporary(step)
        os.mkdir(folder.path)
        return folder

    def publish(self, finished: Folder, step: int) -> LocalFolder:
        """Gives a finished directory its name, durably. One that has the name is set aside first and removed after."""
        target, aside = self.path / directory_name(step), None
        if os.path.lexists(target):
            aside = self.path / f"{directory_name(step)}.old-{secrets.token_hex(4)}"
            os.rename(target, aside)
        os.rename(self.path / finished.name, target)
        self._mark(step).unlink(missing_ok=True)  # it was of the one before
        sync_directory(self.path)
        if aside is not None:
            with suppress(OSError):  # the new one is there; the next `begin` tries again
                _remove(aside)
        return LocalFolder(target)

    def discard(self, unfinished: Folder) -> None:
        """Removes its directory."""
        shutil.rmtree(self.path / unfinished.name)

    def remove(self, step: int) -> None:
        """Under another name first: a directory that is half removed must not be called a checkpoint."""
        doomed = self._temporary(step).path
        os.rename(self.path / directory_name(step), doomed)
        self._mark(step).unlink(missing_ok=True)
        _remove(doomed)

    def _mark(self, step: int) -> Path:
        return self.path / f"{directory_name(step)}{DISTRUSTED}"

    def _temporary(self, step: int) -> LocalFolder:
        return self.folder(f"{directory_name(step)}.tmp-{secrets.token_hex(4)}")


def _make_durably(path: Path) -> None:
    """Creates a directory, with every name on the way made durable."""
    if not path.is_dir():
        _make_durably(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)
