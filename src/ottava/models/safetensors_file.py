"""Files of tensors as Hugging Face keeps them (safetensors), written and read a tensor at a time.

| 8 bytes: length of the header | header: JSON | data |
header: {name: {"dtype": "F32", "shape": [...], "data_offsets": [first, last]}, ...}
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ottava.checkpoint.manifest import check_stamp, json_object
from ottava.checkpoint.names import MAX_JSON_BYTES, open_inside
from ottava.checkpoint.storage import size_of
from ottava.untrusted.stamps import bytes_held, stamp_of

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
MOST_HOLES = 64 << 20  # bytes of a file that may be holes but for one in 256
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """What a file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_no_holes(name: str, size: int, held: int) -> None:
    """ValueError for a file that takes far less of the disk than it says it has: its tensors would cost who reads them memory, and who sent
    them nothing."""
    if size > max(MOST_HOLES, 256 * held):
        raise ValueError(
            f"{name}: of its {size} bytes {held} are there, the rest are holes: if it is yours, copy it with `cp --sparse=never`."
        )


class Writer:
    """Writes the tensors of `specs`, which have to come in this order.

    >>> with Writer(path, {"w": Spec(torch.float32, (2, 2))}) as writer:
    ...     writer.add("w", torch.ones(2, 2))
    """

    def __init__(self, path: Path, specs: dict[str, Spec]) -> None:
        self._specs, self._left = specs, list(specs)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, spec in specs.items():
            header[name] = {
                "dtype": _WORDS[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.nbytes],
            }
            position += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begins aligned
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115  # closed by __exit__
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor."""
        assert name == self._left.pop(0) and Spec(tensor.dtype, tuple(tensor.shape)) == self._specs[name], name
        tensor = tensor.contiguous()
        self._file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b"")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        assert kind is not None or not self._left, f"never written: {self._left[:3]}"


class File:
    """A file that is read a tensor at a time. Nothing in it is believed before it is checked; nothing in it can run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_inside(path.parent, path.name, links=True) as file:  # links: Hugging Face's cache consists of them
            size = size_of(file)
            check_no_holes(path.name, size, bytes_held(file))
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_JSON_BYTES, size - 8):
                raise ValueError(f"{path.name}: its header is said to have {length} bytes; the file has {size}.")
            header = json_object(file.read(length), path.name)
            self._stamp = stamp_of(file)
        self._places: dict[str, int] = {}
        self.specs: dict[str, Spec] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self._add(name, entry, 8 + length, size)
        ends = 0
        for name in sorted(self.specs, key=lambda n: (self._places[n], self.specs[n].nbytes)):
            if self._places[name] < ends:
                raise ValueError(f"{path.name}: the entry of {name[:80]!r} overlaps another's bytes.")
            ends = self._places[name] + self.specs[name].nbytes

    def _add(self, name: str, entry: object, start: int, size: int) -> None:
        try:
            assert isinstance(entry, dict)
            spec = Spec(DTYPES[entry["dtype"]], tuple(entry["shape"]))
            first, last = entry["data_offsets"]
            numbers = (*spec.shape, first, last)
            assert all(type(n) is int and n >= 0 for n in numbers)
            assert last - first == spec.nbytes and start + last <= size
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path.name}: the entry of {name[:80]!r} is {str(entry)[:120]}.") from error
        self.specs[name], self._places[name] = spec, start + first

    def read(self, name: str) -> Tensor:
        """A tensor, in new memory."""
        spec = self.specs[name]
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        data = bytearray(spec.nbytes)
        with open_inside(self.path.parent, self.path.name, links=True) as file:
            check_stamp(self.path.name, file, self._stamp)
            file.seek(self._places[name])
            view = memoryview(data)
            while view:
                count = file.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise ValueError(f"{self.path.name} ends inside of {name}.")
                view = view[count:]
        return torch.frombuffer(data, dtype=spec.dtype).view(spec.shape)


def shards(sizes: Iterable[tuple[str, int]], most: int) -> list[list[str]]:
    """Names in files of at most `most` bytes each; one that is larger has a file of its own."""
    files: list[list[str]] = [[]]
    total = 0
    for name, size in sizes:
        if files[-1] and total + size > most:
            files.append([])
            total = 0
        files[-1].append(name)
        total += size
    return files
