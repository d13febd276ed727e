"""A pickle of a stranger, read as data: `.metadata` of a checkpoint, which DCP wants as one.

>>> read_pickle(data)
<Record of Metadata>
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ottava.untrusted.files import printable


class Refused(ValueError):
    """The file says something that no such file needs."""


def read_pickle(data: bytes) -> Any:
    """What a pickle describes, of plain values, `Record`s and `Table`s. `Refused`, or any error of the standard library's reader."""
    return _Reader(data).load()


# [Note: inert records]
# A pickle is a program for a small stack machine. This reader has only the instructions that DCP's files use, none of which
# allocates by a number that a file states, and every class it may name becomes a `Record`: a tuple of arguments and a state that
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


class Record:
    """What stands for an object of a named class."""

    kind = ""
    args: tuple[Any, ...]
    state: Any
    __slots__ = ("args", "state")

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Table(dict):
    """A dict of the file, with texts and records for keys."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | Record):  # nested tuples are hashed for ever, or until the stack ends
            raise Refused(f"has a {type(key).__name__} as a key.")
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
            raise Refused("makes more objects than a checkpoint of its size has: it was not read further.")
        load(reader)

    return run


class _Dispatch(dict):
    def __missing__(self, code: int) -> Any:
        raise Refused(f"has the pickle instruction {chr(code)!r}, which no checkpoint needs: it was not read further.")


class _Reader(pickle._Unpickler):
    """The standard library's unpickler in Python (the one in C can be made to allocate by one instruction)."""

    dispatch = _Dispatch({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS})
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Table())
    for code in (*_CONTAINERS, *_MEMORIES):
        dispatch[code[0]] = _counted(dispatch[code[0]])

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[tuple[str, str], type[Record]] = {}
        # DCP's own files make one for every four bytes. Each takes up to 240 bytes of memory, and an instruction for it one byte.
        self.left = 2000 + len(data) // 3

    def find_class(self, module: str, name: str) -> Any:
        """A record's class for what may be named; dtypes are themselves."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _KINDS.get(module, ()):
            raise Refused(f"names {printable(f'{module}.{name}', 120)}, which no checkpoint needs: it was not run.")
        if (module, name) not in self._kinds:
            self._kinds[module, name] = type("Record", (Record,), {"kind": name, "__slots__": ()})
        return self._kinds[module, name]
