"""One tensor inside a shard file: the zip archive that `torch.save` makes of it.

    | pickle | ... | data/0: the bytes, aligned to 64 | ... | directory | end |

Writing is `torch.save`. Reading finds the bytes by the archive's directory and never opens the pickle, so that nothing in a file can
run, or make us allocate more than the tensor that is wanted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ottava.checkpoint.digest import HashedFile
from ottava.checkpoint.errors import InvalidCheckpoint
from ottava.checkpoint.metadata import Chunk

ALIGNMENT = 64  # bytes. torch aligns the data to this in its archive; we align the archive in the file.
_TAIL_BYTES = 4096  # directory and end of an archive with a tensor's seven records take about 700
_END = struct.Struct("<IHHHHIIH")  # signature, 2 disks, 2 counts, directory bytes, directory offset, comment bytes
_END64 = struct.Struct("<IQHHIIQQQQ")
_RECORD = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")


def write_tensor(file: HashedFile, tensor: Tensor) -> tuple[int, int]:
    """Appends a contiguous CPU tensor that owns its storage; (offset, length) of its archive."""
    file.write(bytes(-file.bytes % ALIGNMENT))
    start = file.bytes
    with _without_checksum():
        torch.save(tensor, file)  # type: ignore[arg-type]  # write and flush are all it calls
    return start, file.bytes - start


@contextmanager
def _without_checksum() -> Iterator[None]:
    """The archive's own CRC-32 costs a third of a second a GB, and the whole file is hashed anyway. torch does not look at it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def find_data(opened: BinaryIO, chunk: Chunk, dtype: torch.dtype) -> int:
    """Position in the opened file of a box's bytes. The caller has checked that its archive lies inside the file."""
    offset, length, nbytes = chunk.start, chunk.length, math.prod(chunk.shape) * dtype.itemsize

    def bad(reason: str) -> InvalidCheckpoint:
        return InvalidCheckpoint.of(chunk.file, f"entry at byte {offset}: {reason}")

    tail_start = max(0, length - _TAIL_BYTES)
    tail = _read_at(opened, offset + tail_start, length - tail_start)
    if len(tail) != length - tail_start or len(tail) < _END.size:
        raise bad("the archive is truncated.")
    directory, size = _directory(tail, bad)
    if not tail_start <= directory <= directory + size <= length:
        raise bad(f"the archive's directory ({size} bytes at {directory}) is not at its end.")
    header, stored = _data_record(tail[directory - tail_start : directory - tail_start + size], bad)
    if stored != nbytes:
        raise bad(f"the archive holds {stored} bytes of data where {nbytes} are expected.")
    local = _read_at(opened, offset + header, _LOCAL.size) if header + _LOCAL.size <= length else b""
    if len(local) != _LOCAL.size or local[:4] != b"PK\3\4":
        raise bad("the data record has no header (wrong magic).")
    *_, name_bytes, extra_bytes = _LOCAL.unpack(local)
    start = header + _LOCAL.size + name_bytes + extra_bytes
    if start + nbytes > directory:
        raise bad(f"the data ({nbytes} bytes at {start}) does not lie before the directory at {directory}.")
    return offset + start


def _read_at(file: BinaryIO, position: int, count: int) -> bytes:
    """At most `count` bytes, which is a few thousand at most."""
    file.seek(position)
    data = b""
    while len(data) < count and (more := file.read(count - len(data))):
        data += more
    return data


def _directory(tail: bytes, bad: Any) -> tuple[int, int]:
    """(offset, bytes) of the directory, from the end of the archive."""
    signature, _, _, _, _, size, start, comment = _END.unpack(tail[-_END.size :])
    if signature != 0x06054B50 or comment:
        raise bad("this is not an archive of torch.save (wrong magic).")
    end64 = tail[-_END.size - 20 - _END64.size : -_END.size - 20]  # 20: the locator between both ends
    if len(end64) == _END64.size and end64[:4] == b"PK\6\6":
        *_, size, start = _END64.unpack(end64)
    return start, size


def _data_record(directory: bytes, bad: Any) -> tuple[int, int]:
    """(offset of its header, stored bytes) of the one record `.../data/0`."""
    found, at = [], 0
    while at < len(directory):
        if len(directory) < at + _RECORD.size or directory[at : at + 4] != b"PK\1\2":
            raise bad("the archive's directory is damaged.")
        fields = _RECORD.unpack_from(directory, at)
        method, packed, plain, (name_bytes, extra_bytes, comment_bytes), header = (
            fields[4],
            fields[8],
            fields[9],
            fields[10:13],
            fields[16],
        )
        name = directory[at + _RECORD.size : at + _RECORD.size + name_bytes]
        extra = directory[at + _RECORD.size + name_bytes : at + _RECORD.size + name_bytes + extra_bytes]
        at += _RECORD.size + name_bytes + extra_bytes + comment_bytes
        if name.endswith(b"/data/0"):
            packed, plain, header = _large(packed, plain, header, extra, bad)
            if method or packed != plain:
                raise bad("the data is compressed.")
            found.append((header, plain))
    if len(found) != 1:
        raise bad(f"expected one data record, found {len(found)}.")
    return found[0]


def _large(packed: int, plain: int, header: int, extra: bytes, bad: Any) -> tuple[int, int, int]:
    """The sizes and offset with those of 4 GiB and more taken from the extra field, where zip keeps them."""
    large = 0xFFFFFFFF
    if large not in (packed, plain, header):
        return packed, plain, header
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == 1 and len(extra) >= 4 + size and size % 8 == 0:
            numbers = list(struct.unpack_from(f"<{size // 8}Q", extra, 4))
            # zip64 lists those that are too large, in this order: plain, packed, header
            fields = [packed, plain, header]
            for i in (1, 0, 2):
                if fields[i] == large and numbers:
                    fields[i] = numbers.pop(0)
            return fields[0], fields[1], fields[2]
        extra = extra[4 + size :]
    raise bad("a record of 4 GiB and more has no 64-bit size.")
