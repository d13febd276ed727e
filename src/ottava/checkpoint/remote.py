"""Checkpoints on a file system of `fsspec`, where nothing can be renamed: the manifest is written last, and is the commit.

A folder without a manifest is what an interrupted save left, and no checkpoint. To replace a checkpoint, its manifest goes first.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, suppress
from typing import Any, BinaryIO

from ottava.checkpoint.errors import InvalidCheckpoint
from ottava.checkpoint.names import MANIFEST, check_file_name, directory_name, step_of
from ottava.checkpoint.storage import Folder


class RemoteFolder:
    """One folder of a file system of fsspec."""

    def __init__(self, system: Any, root: str, name: str) -> None:
        self.system, self.name = system, name
        self._inner = f"{root}/{name}"
        self.path = system.unstrip_protocol(self._inner)

    def exists(self) -> bool:
        """Whether it has any file."""
        return self.system.exists(self._inner)

    def check_kind(self) -> None:
        """Nothing leads elsewhere here: names are whole keys."""

    def open(self, file: str) -> BinaryIO:
        """For reading."""
        check_file_name(file, file if isinstance(file, str) else "?")
        try:
            return self.system.open(f"{self._inner}/{file}", "rb")
        except FileNotFoundError:
            raise InvalidCheckpoint.of(file, "the file is missing.") from None
        except OSError as error:
            raise InvalidCheckpoint.of(file, f"cannot be opened: {error}") from error

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """For writing; an object store takes it as a whole when it is closed."""
        return self.system.open(f"{self._inner}/{file}", "wb")

    def make_durable(self, file: BinaryIO) -> None:
        """An object is durable when it exists, which is when `create`'s context is left."""

    def size(self, file: str) -> int:
        """Bytes of an object."""
        self.system.invalidate_cache()
        return self.system.size(f"{self._inner}/{file}")

    def sync(self) -> None:
        """Names are objects' keys: nothing to do."""


class RemoteStorage:
    """A run's checkpoints below `root` on a file system of fsspec.

    >>> storage = RemoteStorage.of("memory://run/checkpoints")
    """

    def __init__(self, system: Any, root: str) -> None:
        self.system, self.root = system, root.rstrip("/")
        self.path = system.unstrip_protocol(self.root)

    @classmethod
    def of(cls, url: str) -> RemoteStorage:
        """By URL. ValueError if `fsspec`, or what it needs for this kind of URL, is not installed."""
        try:
            system, root = importlib.import_module("fsspec").core.url_to_fs(url)
        except ImportError as error:
            raise ValueError(f"{url}: {error}. Checkpoints that are not local need the package 'fsspec'.") from error
        return cls(system, root)

    def folder(self, name: str) -> RemoteFolder:
        """By name."""
        return RemoteFolder(self.system, self.root, name)

    def candidates(self) -> list[tuple[int, Folder]]:
        """Folders that have a manifest, newest first."""
        return [(step, self.folder(name)) for step, name in self._steps() if self._committed(name)]

    def recover(self) -> None:
        """Nothing is ever set aside here."""

    def begin(self, step: int) -> RemoteFolder:
        """Removes folders without a manifest, and the checkpoint of this step if there is one."""
        for found, name in self._steps():
            if found == step or not self._committed(name):
                self.remove(found)
        folder = self.folder(directory_name(step))
        self.system.makedirs(f"{self.root}/{folder.name}", exist_ok=True)  # for those that have directories
        return folder

    def publish(self, finished: Folder, step: int) -> Folder:
        """It has its name and its manifest already."""
        return finished

    def discard(self, unfinished: Folder) -> None:
        """Removes it, manifest first."""
        self._remove(unfinished.name)

    def remove(self, step: int) -> None:
        """Removes a checkpoint, manifest first."""
        self._remove(directory_name(step))

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.system.rm_file(f"{self.root}/{name}/{MANIFEST}")
        with suppress(FileNotFoundError):
            self.system.rm(f"{self.root}/{name}", recursive=True)
        self.system.invalidate_cache()

    def _committed(self, name: str) -> bool:
        return self.system.exists(f"{self.root}/{name}/{MANIFEST}")

    def _steps(self) -> list[tuple[int, str]]:
        self.system.invalidate_cache()
        try:
            paths = self.system.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rpartition("/")[2] for path in paths}
        return sorted(((step, name) for name in names if (step := step_of(name)) is not None), reverse=True)
