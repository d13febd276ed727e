"""`.metadata`: DCP's index of a checkpoint, which says where each box of each tensor lies.

It is a pickle. Writing uses DCP's classes; reading uses none of them (untrusted/inert_pickle.py).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ottava import torch_private
from ottava.checkpoint.boxes import Box, Index, tiling_problem
from ottava.checkpoint.errors import InvalidCheckpoint, shown
from ottava.checkpoint.flat import Path
from ottava.checkpoint.names import METADATA, SHARD_SUFFIX, check_file_name
from ottava.checkpoint.storage import Folder, size_of
from ottava.untrusted.inert_pickle import Record, Refused, Table, read_pickle
from ottava.untrusted.stamps import bytes_held

FREE_BYTES = 2 << 20
"""That `.metadata` may have in any case: some 10,000 boxes."""


@dataclass(frozen=True)
class Chunk:
    """A stored box and the archive (archive.py) that holds it."""

    offset: Index
    shape: Index
    file: str
    start: int
    length: int

    @property
    def box(self) -> Box:
        """Where it lies in the tensor."""
        return self.offset, self.shape


@dataclass(frozen=True)
class Entry:
    """A stored tensor."""

    dtype: torch.dtype
    shape: Index
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def encode(entries: Mapping[str, Entry], paths: Mapping[str, Path]) -> bytes:
    """The file's content. paths: where each tensor lies in the nested state; DCP's converters rebuild the nesting from it."""
    from torch.distributed.checkpoint import metadata as dcp

    tensors, storage = {}, {}
    for name, entry in entries.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in entry.chunks]
        properties = dcp.TensorProperties(dtype=entry.dtype)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for i, c in enumerate(entry.chunks):
            storage[dcp.MetadataIndex(name, c.offset, i)] = torch_private.storage_info(c.file, c.start, c.length)
    planner_data = {name: paths[name] for name in entries}
    return pickle.dumps(dcp.Metadata(tensors, planner_data, storage, dcp.StorageMeta(), version="1.0.0"))  # type: ignore[arg-type]


def size_limit(folder: Folder, files: Iterable[str]) -> int:
    """Most bytes that `.metadata` may have beside these files.

    A stored box takes over 1,000 bytes in its shard, however small the tensor, and about 150 here. So an honest file stays far
    below, and a large one that would fill the memory comes only with shards to match: of bytes, not of holes.
    """
    limit = FREE_BYTES
    for name in files:
        if name.endswith(SHARD_SUFFIX):
            with folder.open(name) as file:
                limit += min(size_of(file) // 4, bytes_held(file))
    return min(1 << 30, limit)


def decode(data: bytes, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """The stored tensors by name. sizes: bytes of each file of the checkpoint, from its manifest."""
    try:
        root = read_pickle(data)
    except Refused as error:
        raise _bad(str(error)) from None
    except Exception as error:  # whatever a damaged file makes the unpickler do; it cannot do much
        raise _bad(f"is damaged: {type(error).__name__}: {str(error)[:120]}") from error
    fields = _fields(root, "Metadata")
    places = _places(_expect(fields.get("storage_data"), dict, "storage_data"), sizes)
    entries = {}
    for name, record in _expect(fields.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        _expect(name, str, "the name of an entry")
        if isinstance(record, Record) and record.kind == "BytesStorageMetadata":
            raise _bad(
                f"entry {shown(name)} is a pickled object: checkpoints of Ottava have tensors alone, and nothing is unpickled."
            )
        entries[name] = _entry(name, _fields(record, "TensorStorageMetadata"), places)
    return entries


# ------------------------------------------------------------------------------------------------------ checked fields


def _bad(reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint.of(METADATA, reason)


def _expect(value: Any, kind: type, what: str) -> Any:
    if type(value) is not (Table if kind is dict else kind):
        raise _bad(f"{what} is a {type(value).__name__}, expected a {kind.__name__}.")
    return value


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, Record) or record.kind != kind:
        raise _bad(
            f"expected a {kind}, found a {record.kind if isinstance(record, Record) else type(record).__name__}."
        )
    return _expect(record.state, dict, f"the state of a {kind}")


def _index(value: Any, what: str) -> Index:
    """The numbers of a torch.Size."""
    if isinstance(value, Record) and value.kind == "Size" and len(value.args) == 1:
        value = value.args[0]
    numbers = _expect(value, tuple, what)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or len(numbers) > 64:
        raise _bad(f"{what} is not a tensor's size or offset.")
    return numbers


def _places(storage: dict, sizes: Mapping[str, int]) -> dict[tuple[str, Index], tuple[str, int, int]]:
    """(tensor, offset of a box) -> (file, start, length), inside files that the manifest has."""
    places = {}
    for key, record in storage.items():
        where, what = _fields(key, "MetadataIndex"), _fields(record, "_StorageInfo")
        name = _expect(where.get("fqn"), str, "the name of a stored box")
        offset = _index(where.get("offset"), "the offset of a box")
        file = check_file_name(what.get("relative_path"), METADATA)
        start, length = (_expect(what.get(k), int, f"{k} of a stored box") for k in ("offset", "length"))
        if what.get("transform_descriptors"):
            raise _bad(f"{shown(name)} is stored with a transform, which Ottava never writes.")
        if file not in sizes or not file.endswith(SHARD_SUFFIX):
            raise _bad(f"{shown(name)} lies in {shown(file)}, which is no shard of the manifest.")
        if start < 0 or length <= 0 or start + length > sizes[file]:
            raise _bad(f"{shown(name)} lies at byte {start}, {length} long, in {file}, which has {sizes[file]} bytes.")
        if (name, offset) in places:
            raise _bad(f"{shown(name)} has two boxes at {offset}.")
        places[name, offset] = (file, start, length)
    return places


def _entry(name: str, fields: dict[str, Any], places: Mapping[tuple[str, Index], tuple[str, int, int]]) -> Entry:
    properties = fields.get("properties")
    if not isinstance(properties, Record) or properties.kind != "TensorProperties":
        raise _bad(f"{shown(name)} has no properties.")
    dtype = properties.state[0] if isinstance(properties.state, tuple) and properties.state else None
    if not isinstance(dtype, torch.dtype):
        raise _bad(f"{shown(name)} has no dtype.")
    shape = _index(fields.get("size"), f"the size of {shown(name)}")
    chunks = []
    for record in _expect(fields.get("chunks"), list, f"the boxes of {shown(name)}"):
        box = _fields(record, "ChunkStorageMetadata")
        offset, size = _index(box.get("offsets"), "offsets"), _index(box.get("sizes"), "sizes")
        place = places.get((name, offset))
        if place is None:
            raise _bad(f"{shown(name)} has a box at {offset} that is stored nowhere.")
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes > place[2]:
            raise _bad(f"{shown(name)}: a box of {nbytes} bytes is said to lie in {place[2]} bytes of {place[0]}.")
        chunks.append(Chunk(offset, size, *place))
    if problem := tiling_problem(shape, [c.box for c in chunks]):
        raise _bad(f"{shown(name)}: {problem}.")
    return Entry(dtype, shape, tuple(chunks))
