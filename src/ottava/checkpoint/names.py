"""Names of directories and files, and opening files without leaving the directory they are named in."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from ottava.checkpoint.errors import InvalidCheckpoint

MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
SHARD_SUFFIX = ".distcp"
DISTRUSTED = ".distrusted"
"""Ends the name of an empty file beside a checkpoint that a run went back behind: it is tried when no other is left."""
MAX_JSON_BYTES = 4 << 20  # parsed, JSON takes up to 20 times its size

_STEP = re.compile(r"step-([0-9]{8,18})")
_REMAINS = re.compile(r"(step-[0-9]{8,18})\.(tmp|old)-[0-9a-f]+")
_FILE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,200}")


def directory_name(step: int) -> str:
    """
    >>> directory_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory; None for any other name."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and directory_name(step) == name else None


def remains_of(name: str) -> tuple[str, str] | None:
    """(directory it was to be or had been, "tmp" or "old") for what an interrupted save leaves; None for any other name."""
    match = _REMAINS.fullmatch(name)
    return (match[1], match[2]) if match else None


def shard_name(rank: int) -> str:
    """As DCP calls the first file of a rank."""
    return f"__{rank}_0{SHARD_SUFFIX}"


def check_file_name(name: object, named_in: str) -> str:
    """`name` if it is a plain file name; an error about the file `named_in` for anything with a path in it."""
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name in (".", ".."):
        # Nothing but text is shown: that of nested tuples may have more characters than there are atoms.
        what = repr(name[:80]) if isinstance(name, str) else f"a {type(name).__name__}"
        raise InvalidCheckpoint.of(named_in, f"{what} is not the name of a file in its own directory.")
    return name


def open_inside(directory: Path, name: str, links: bool = False) -> BinaryIO:
    """Opens a regular file of `directory` for reading. Links are refused, since they could lead anywhere, unless `links`."""
    check_file_name(name, name if isinstance(name, str) else "?")
    try:
        # NONBLOCK: opening a named pipe would wait for a writer
        follow = 0 if links else os.O_NOFOLLOW
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    except FileNotFoundError:
        raise InvalidCheckpoint.of(name, "the file is missing.") from None
    except OSError as error:
        link = os.path.islink(directory / name)
        raise InvalidCheckpoint.of(
            name, "is a symbolic link." if link else f"cannot be opened: {error.strerror}"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidCheckpoint.of(name, "is not a regular file.")
    return os.fdopen(descriptor, "rb", buffering=0)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
