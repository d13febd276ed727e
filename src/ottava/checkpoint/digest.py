"""Hashes of files: which algorithms there are, and a file that is hashed while it is written."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from ottava.checkpoint.errors import InvalidCheckpoint

BLOCK_BYTES = 8 << 20  # read at once for hashing: beyond the caches' size, so that larger blocks win nothing
_PARALLEL_BYTES = 1 << 20  # below this a second thread costs more than the hash

# name in the manifest -> package that has it (None: the standard library)
_ALGORITHMS: dict[str, str | None] = {"xxh3_128": "xxhash", "blake3": "blake3", "blake2b": None, "sha256": None}


def algorithm(wanted: str | None) -> str:
    """The algorithm for new checkpoints: `wanted`, or xxh3_128 where `xxhash` is installed, else blake2b.

    >>> algorithm("sha256")
    'sha256'
    """
    if wanted is None:
        return "xxh3_128" if importlib.util.find_spec("xxhash") else "blake2b"
    if wanted not in _ALGORITHMS:
        raise ValueError(f"hash {wanted!r}: expected one of {', '.join(_ALGORITHMS)}.")
    package = _ALGORITHMS[wanted]
    if package and not importlib.util.find_spec(package):
        raise ValueError(f"hash {wanted!r} needs the package {package!r}: install it, or use 'sha256'.")
    return wanted


def hasher(name: str) -> Any:
    """A new hash object of an algorithm that a manifest names."""
    if name not in _ALGORITHMS:
        raise InvalidCheckpoint.of(
            "manifest.json", f"hash algorithm {name[:40]!r} is not one of {', '.join(_ALGORITHMS)}."
        )
    package = _ALGORITHMS[name]
    if package is None:
        return hashlib.new(name)
    try:
        return getattr(importlib.import_module(package), name)()
    except ImportError as error:
        raise InvalidCheckpoint.of(
            "manifest.json", f"its hashes are {name}: install {package!r} to verify them."
        ) from error


def digest_of(file: BinaryIO, name: str) -> tuple[int, str]:
    """(bytes, hexadecimal digest) of the rest of an open file."""
    state, size, block = hasher(name), 0, memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        state.update(block[:count])
        size += count
    return size, state.hexdigest()


class HashedFile:
    """Writes to `file` and hashes the same bytes. Large blocks are hashed in another thread while this one writes.

    `write` is what `torch.save` needs of a file. An error of the thread is raised by the `write` that caused it.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.bytes = file, 0
        self.error: OSError | None = None
        """The first error of the file: `torch.save` may put one of its own in its place."""
        self._state = hasher(name)
        self._thread: ThreadPoolExecutor | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Writes and hashes all of `data`."""
        if len(data) < _PARALLEL_BYTES:
            self._state.update(data)
            self._write_all(data)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="ottava-hash")
            hashed = self._thread.submit(self._state.update, data)
            try:
                self._write_all(data)
            finally:
                hashed.result()  # the memory behind `data` is torch's and may be gone after this call
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """For `torch.save`, which flushes what it is given."""
        self.file.flush()

    def close(self) -> None:
        """Ends the thread. The file takes no more after it."""
        if self._thread is not None:
            self._thread.shutdown()

    def digest(self) -> str:
        """Of everything that was written."""
        return self._state.hexdigest()

    def _write_all(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:  # an unbuffered write may take a part: Linux moves at most 2 GiB at once
                view = view[self.file.write(view) :]
        except OSError as error:
            self.error = self.error or error
            raise
