"""`.metadata`: DCP's index of a checkpoint, which says where each box of each tensor lies.

It is a pickle. Writing uses DCP's classes; reading uses none of them ([Note: inert records]).
"""

from __future__ import annotations

import io
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
from ottava.checkpoint.storage import Folder, bytes_held, size_of

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
        root = _Reader(data).load()
    except InvalidCheckpoint:
        raise
    except Exception as error:  # whatever a damaged file makes the unpickler do; it cannot do much
        raise _bad(f"is damaged: {type(error).__name__}: {str(error)[:120]}") from error
    fields = _fields(root, "Metadata")
    places = _places(_expect(fields.get("storage_data"), dict, "storage_data"), sizes)
    entries = {}
    for name, record in _expect(fields.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        _expect(name, str, "the name of an entry")
        if isinstance(record, _Record) and record.kind == "BytesStorageMetadata":
            raise _bad(
                f"entry {shown(name)} is a pickled object: checkpoints of Ottava have tensors alone, and nothing is unpickled."
            )
        entries[name] = _entry(name, _fields(record, "TensorStorageMetadata"), places)
    return entries


# ------------------------------------------------------------------------------------------------------ checked fields


def _bad(reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint.of(METADATA, reason)


def _expect(value: Any, kind: type, what: str) -> Any:
    if type(value) is not (_Keyed if kind is dict else kind):
        raise _bad(f"{what} is a {type(value).__name__}, expected a {kind.__name__}.")
    return value


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind:
        raise _bad(
            f"expected a {kind}, found a {record.kind if isinstance(record, _Record) else type(record).__name__}."
        )
    return _expect(record.state, dict, f"the state of a {kind}")


def _index(value: Any, what: str) -> Index:
    """The numbers of a torch.Size."""
    if isinstance(value, _Record) and value.kind == "Size" and len(value.args) == 1:
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
    if not isinstance(properties, _Record) or properties.kind != "TensorProperties":
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


# ------------------------------------------------------------------------------------------------------ inert records
# [Note: inert records]
# A pickle is a program for a small stack machine. This reader has only the instructions that DCP's files use, none of which
# allocates by a number that a file states, and every class it may name becomes a `_Record`: a tuple of arguments and a state that
# nobody calls. What the records say is then checked field by field. No class of torch is built or touched.

_KINDS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # in Python 3.13
    "builtins": {"getattr"},  # of an enum's class and a name: so Python before 3.11.4 writes its members
}

_INSTRUCTIONS = [
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
]


class _Record:
    """What stands for an object of a named class."""

    kind = ""
    args: tuple[Any, ...]
    state: Any
    __slots__ = ("args", "state")

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Keyed(dict):
    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | _Record):  # nested tuples are hashed for ever, or until the stack ends
            raise _bad(f"has a {type(key).__name__} as a key.")
        super().__setitem__(key, value)


_CONTAINERS = [
    *(pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.NEWOBJ, pickle.REDUCE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
]
_MEMORIES = [pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT]


def _counted(load: Any) -> Any:
    """An instruction of which a file may have as many as its size explains."""

    def run(reader: Any) -> None:
        reader.left -= 1
        if reader.left < 0:
            raise _bad("makes more objects than a checkpoint of its size has: it was not read further.")
        load(reader)

    return run


class _Dispatch(dict):
    def __missing__(self, code: int) -> Any:
        raise _bad(f"has the pickle instruction {chr(code)!r}, which no checkpoint needs: it was not read further.")


class _Reader(pickle._Unpickler):
    """The standard library's unpickler in Python (the one in C can be made to allocate by one instruction)."""

    dispatch = _Dispatch({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS})
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_Keyed())
    for code in (*_CONTAINERS, *_MEMORIES):
        dispatch[code[0]] = _counted(dispatch[code[0]])

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[tuple[str, str], type[_Record]] = {}
        # DCP's own files make one for every four bytes. Each takes up to 240 bytes of memory, and an instruction for it one byte.
        self.left = 2000 + len(data) // 3

    def find_class(self, module: str, name: str) -> Any:
        """A record's class for what may be named; dtypes are themselves."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _KINDS.get(module, ()):
            raise _bad(f"names {shown(f'{module}.{name}')}, which no checkpoint needs: it was not run.")
        if (module, name) not in self._kinds:
            self._kinds[module, name] = type("_Record", (_Record,), {"kind": name, "__slots__": ()})
        return self._kinds[module, name]
