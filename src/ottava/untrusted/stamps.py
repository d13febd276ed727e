"""What a file is known by, and how much of it is there: before it is believed, and after it was read."""

from __future__ import annotations

import errno
import os
from typing import BinaryIO

Stamp = tuple[object, ...]


def stamp_of(file: BinaryIO) -> Stamp:
    """What differs once an open file was written to, or another one was opened by its name. A checkpoint is hashed, then read: that
    it was the same file all the time is known by this. (Of an object store it is what the store tells of an object.)"""
    try:
        found = os.fstat(file.fileno())
    except (OSError, AttributeError):
        details = getattr(file, "details", None) or {}
        return tuple(
            str(details.get(key)) for key in ("ETag", "etag", "generation", "LastModified", "mtime", "created")
        )
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def bytes_held(file: BinaryIO) -> int:
    """Bytes of an open file that are no holes: a file of terabytes may take one block of the disk."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        blocks = os.fstat(file.fileno()).st_blocks
        if not blocks:  # nothing is there; or a file system that does not count says that all is
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
            return size
    except (OSError, AttributeError) as error:
        return 0 if getattr(error, "errno", None) == errno.ENXIO else size
    return min(size, 512 * blocks)
