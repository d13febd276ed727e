"""Where checkpoints lie: a local directory, or any file system that `fsspec` knows (object stores, memory).

A `Storage` is a run's directory of checkpoints, a `Folder` one checkpoint in it. What makes a folder a checkpoint is its manifest; how
a finished one becomes visible all at once differs:

    local     it is written under another name and renamed, durably            directory.py
    fsspec    an object store has no rename: the manifest is written last      remote.py
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

Location = Path | str
"""A Path of this machine, or a URL such as "s3://bucket/run/checkpoints"."""


class Folder(Protocol):
    """The files of one checkpoint, or of one that is being written."""

    @property
    def name(self) -> str:
        """In its storage."""
        ...

    @property
    def path(self) -> Location:
        """Where it is."""
        ...

    def exists(self) -> bool:
        """Whether there is such a folder at all."""
        ...

    def check_kind(self) -> None:
        """InvalidCheckpoint for what leads somewhere else, such as a symbolic link."""
        ...

    def open(self, file: str) -> BinaryIO:
        """Opens a file for reading; seek and readinto are used. InvalidCheckpoint if there is none, or not a regular one."""
        ...

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """A new file, unbuffered. It is complete when the context is left."""
        ...

    def make_durable(self, file: BinaryIO) -> None:
        """Of a file that `create` opened: what is written so far outlives a power cut, as far as the storage can promise it."""
        ...

    def size(self, file: str) -> int:
        """Bytes of a file, as the storage has it."""
        ...

    def sync(self) -> None:
        """Makes the files' names durable."""
        ...


class Storage(Protocol):
    """The checkpoints of one run."""

    @property
    def path(self) -> Location:
        """Where it is."""
        ...

    def candidates(self) -> list[tuple[int, Folder]]:
        """(step, folder) of everything that is called a checkpoint, newest first. Whether one exists, its manifest says."""
        ...

    def folder(self, name: str) -> Folder:
        """By name; it need not exist."""
        ...

    def recover(self) -> None:
        """Undoes what an interrupted publication has begun."""
        ...

    def begin(self, step: int) -> Folder:
        """A new folder to write into. Clears what interrupted saves left: one run owns the storage."""
        ...

    def publish(self, finished: Folder, step: int) -> Folder:
        """Makes a finished folder the checkpoint of `step`."""
        ...

    def discard(self, unfinished: Folder) -> None:
        """Removes what a failed save wrote."""
        ...

    def remove(self, step: int) -> None:
        """Removes a checkpoint; it is no checkpoint any more before the first of its files goes."""
        ...


def size_of(file: BinaryIO) -> int:
    """Bytes of an open file, which is then read from its beginning."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


def storage_at(root: Location) -> Storage:
    """The storage that a path or URL names.

    >>> storage_at("run/checkpoints").path
    PosixPath('/home/me/run/checkpoints')
    """
    if isinstance(root, str) and "://" in root:
        from ottava.checkpoint.remote import RemoteStorage

        return RemoteStorage.of(root)
    from ottava.checkpoint.directory import LocalStorage

    return LocalStorage(Path(root).absolute())


def folder_at(path: Location) -> Folder:
    """One checkpoint that a path or URL names."""
    if isinstance(path, str) and "://" in path:
        from ottava.checkpoint.remote import RemoteStorage

        root, _, name = path.rstrip("/").rpartition("/")
        return RemoteStorage.of(root).folder(name)
    from ottava.checkpoint.directory import LocalFolder

    return LocalFolder(Path(path))
