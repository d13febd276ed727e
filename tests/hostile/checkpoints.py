"""Checkpoints: what their index, states and manifest may say."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from checkpoint import hostile as signed
from checkpoint.hostile import MANIFEST, METADATA, SHARD, STATE, change_index, sign
from hostile.spoil import DEEP, Spoil, anything, make_holes
from ottava.checkpoint.manifest import _own_digest


def _step(folder: Path) -> Path:
    return folder / "root" / "step-00000001"


def checkpoints() -> Iterator[tuple[str, Spoil]]:
    for case in signed.CASES:
        yield case.__name__.replace("_", " "), partial(_signed_case, case)
    for file in (METADATA, STATE, MANIFEST, SHARD):
        for way, spoil in anything(lambda folder, file=file: _step(folder) / file):
            resigned = file != MANIFEST and way in ("empty", "zeros", "not text", "brackets", "braces")
            yield f"{file} is {way}", partial(_then_signed, spoil) if resigned else spoil
    for name, data in _pickles().items():
        yield name, partial(_index_bytes, data=data)
    for name, change in _indexes().items():
        yield name, partial(_index_changed, change=change)
    for name, value in _states().items():
        yield f"state.json is {name}", partial(_state, value=value)
    for name, fields in _manifests().items():
        yield f"manifest with {name}", partial(_manifest, fields=fields)
    yield "50 MB of braces beside a shard of holes", _braces_beside_holes
    yield "a shard of 8 TB of holes", _terabytes
    yield "a manifest that says a thing twice", _manifest_twice


def _signed_case(case: Callable[[Path, Path], str], folder: Path) -> str:
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    return case(_step(folder), outside)


def _then_signed(spoil: Spoil, folder: Path) -> str:
    name = spoil(folder)
    sign(_step(folder))
    return name


def _index_bytes(folder: Path, data: bytes) -> str:
    (_step(folder) / METADATA).write_bytes(data)
    sign(_step(folder))
    return METADATA


def _index_changed(folder: Path, change: Callable[[Any], Any]) -> str:
    change_index(_step(folder), change)
    return METADATA


def _dag(depth: int = 60) -> bytes:
    """A tuple of the same tuple twice, and so on: as many leaves as there are atoms in a hand."""
    return b")\x94" + b"".join(b"h%c\x86\x94" % i for i in range(depth))


_GOOD_CLASS = b"\x8c\x25torch.distributed.checkpoint.metadata\x94\x8c\x08Metadata\x94\x93"


def _pickles() -> dict[str, bytes]:
    start = b"\x80\x04"
    return {
        "the index is nested tuples": start + b")" + b"\x85" * 900_000 + b".",
        "the index is twice itself, 60 times": start + _dag() + b".",
        "a key in a key": start + b"}}K\x01s" * 1000 + b"K\x01s.",
        "a million marks": start + b"(" * 1_000_000 + b".",
        "a million lists in a list": start + b"](" + b"]" * 1_000_000 + b"e.",
        "a million dicts, each with an entry": start + b"](" + b"}\x8c\x01a\x94K\x01s" * 150_000 + b"e.",
        "a million things remembered": start + b"N" + b"\x94" * 1_000_000 + b".",
        "a text of 4 GB": start + b"X" + struct.pack("<I", 2**32 - 1) + b"a.",
        "a text of 2^60 bytes": start + b"\x8d" + struct.pack("<Q", 2**60) + b"a.",
        "a number of 2 GB": start + b"\x8b" + struct.pack("<i", 2**31 - 1) + b"a.",
        "a frame of 2^60 bytes": start + b"\x95" + struct.pack("<Q", 2**60) + b"N.",
        "an instruction that calls": start + b"cos\nsystem\n(X\x02\x00\x00\x00lstR.",
        "an instance by an old instruction": b"(ios\nsystem\n.",
        "an object by its extension": start + b"\x82\x01.",
        "an object that is not in it": start + b"X\x01\x00\x00\x00aQ.",
        "a class of a module's attribute": start + b"\x8c\x05torch\x94\x8c\x0cos.path.join\x94\x93.",
        "a class that is made of itself": start + _GOOD_CLASS + b")\x81\x94h\x00b.",
        "the class and no object": start + _GOOD_CLASS + b".",
        "an object without fields": start + _GOOD_CLASS + b")\x81.",
        "fields that are a list": start + _GOOD_CLASS + b")\x81]b.",
        "an object made with a million arguments": start + _GOOD_CLASS + b"(" + b"N" * 1_000_000 + b"t\x81.",
        "nothing but a stop": b".",
        "stack underflow": start + b"0" * 10 + b"s.",
        "an unknown protocol": b"\x80\xff.",
    }


def _place(index: Any) -> Any:
    return next(iter(index.storage_data.values()))


def _nested_path(depth: int) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        value: Any = ()
        for _ in range(depth):
            value = (value, value)
        _place(index).relative_path = value

    return change


def _boxes(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Callable[[Any], None]:
    """An index of one tensor that is cut so; every box lies where the first one did."""

    def change(index: Any) -> None:
        entry, place = index.state_dict_metadata["w"], _place(index)
        entry.size = torch.Size(shape)
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
        index.storage_data = {MetadataIndex("w", torch.Size(o), i): place for i, (o, _) in enumerate(boxes)}

    return change


def _indexes() -> dict[str, Callable[[Any], Any]]:
    def on_entry(**fields: Any) -> Callable[[Any], None]:
        return lambda index: [setattr(index.state_dict_metadata["w"], k, v) for k, v in fields.items()] and None

    def on_place(**fields: Any) -> Callable[[Any], None]:
        return lambda index: [setattr(_place(index), k, v) for k, v in fields.items()] and None

    def on_index(**fields: Any) -> Callable[[Any], None]:
        return lambda index: [setattr(index, k, v) for k, v in fields.items()] and None

    count = 3_000
    rows_and_columns = [((i, 0), (1, 2 * count)) for i in range(count)] + [
        ((count, j), (count, 1)) for j in range(2 * count)
    ]
    spoilt = [*rows_and_columns[:-1], ((count, 0), (count, 1))]
    eight = (2,) * 8
    corners = [(tuple(i >> d & 1 for d in range(8)), (1,) * 8) for i in range(256)]
    return {
        "a file's name is nested tuples": _nested_path(60),
        "a file's name is a number": on_place(relative_path=7),
        "a file's name ends in a zero": on_place(relative_path="__0_0.distcp\0"),
        "a file that is not there": on_place(relative_path="__1_0.distcp"),
        "a file that is no shard": on_place(relative_path=STATE),
        "a box that begins after 2^80 bytes": on_place(offset=1 << 80),
        "a box of no bytes": on_place(length=0),
        "a box of a text's length": on_place(length="100"),
        "a box of true bytes": on_place(offset=True),
        "a box that was transformed": on_place(transform_descriptors=["zstd"]),
        "sizes are a text": on_entry(size="16"),
        "sizes are negative": on_entry(size=(-16, -4)),
        "sizes are fractions": on_entry(size=(16.0, 4)),
        "no boxes": on_entry(chunks=[]),
        "boxes are a dict": on_entry(chunks={}),
        "boxes are numbers": on_entry(chunks=[1, 2]),
        "no properties": on_entry(properties=None),
        "no tensors and a box": on_index(state_dict_metadata={}, storage_data=[1]),
        "tensors are a list": on_index(state_dict_metadata=[1]),
        "no places": on_index(storage_data=None),
        "places without boxes": on_index(storage_data={}),
        "a tensor's name is a number": lambda index: index.state_dict_metadata.update(
            {7: index.state_dict_metadata["w"]}
        ),
        "boxes that overlap": _boxes((16, 4), [((0, 0), (8, 4)), ((7, 0), (8, 4))]),
        "a box outside": _boxes((16, 4), [((8, 0), (16, 4))]),
        "a box of fewer dimensions": _boxes((16, 4), [((0,), (64,))]),
        "9,000 boxes, in rows and in columns, of which two overlap": _boxes((2 * count, 2 * count), spoilt),
        "boxes that cut 8 dimensions": _boxes(eight, corners),
        "two boxes at one place": _boxes((16, 4), [((0, 0), (8, 4)), ((0, 0), (8, 4))]),
        "a tensor of 2^62 elements": _boxes((1 << 31, 1 << 31), [((0, 0), (1 << 31, 1 << 31))]),
    }


def _states() -> dict[str, bytes]:
    return {
        "a list": b"[]",
        "a text": b'"values"',
        "without values": b"{}",
        "values that are a list": b'{"values": []}',
        "a number of 5,000 digits": b'{"values": {"step": ' + b"9" * 5000 + b"}}",
        "cut short": b'{"values": {"step": 1}',
        "no UTF-8": b'{"values": {"\xff": 1}}',
        "deep": b'{"values": ' + b"[" * DEEP,
    }


def _state(folder: Path, value: bytes) -> str:
    (_step(folder) / STATE).write_bytes(value)
    sign(_step(folder))
    return STATE


def _manifests() -> dict[str, dict[str, Any]]:
    entry = {"bytes": 1, "digest": "00"}
    files = {"files": {METADATA: entry, STATE: entry}}
    return {
        "another schema": {"schema": "other"},
        "version 2": {"version": 2},
        "version one": {"version": "1"},
        "no files": {"files": {}},
        "files in a list": {"files": [METADATA]},
        "files of negative size": {"files": {METADATA: {"bytes": -1, "digest": ""}, STATE: entry}},
        "files of true size": {"files": {METADATA: {"bytes": True, "digest": ""}, STATE: entry}},
        "files without digests": {"files": {METADATA: {"bytes": 1}, STATE: entry}},
        "sizes of 2^200": {"files": {METADATA: {"bytes": 1 << 200, "digest": ""}, STATE: entry}},
        "a file of another folder": {"files": {**files["files"], "/etc/passwd": entry}},
        "a file of no name": {"files": {**files["files"], "": entry}},
        "a file above": {"files": {**files["files"], "..": entry}},
        "a file of a long name": {"files": {**files["files"], "a" * 5000: entry}},
        "30,000 files": {"files": {**files["files"], **{f"f{i}": entry for i in range(30_000)}}},
        "a hash that nobody knows": {"hash": "crc32"},
        "a hash that is a module": {"hash": "os"},
        "a step of another": {"step": 2},
        "a step of text": {"step": "1"},
        "a step of 4,000 digits": {"step": 10**4000},
        "another byte order": {"byteorder": "big"},
        "meshes of nothing": {"meshes": None},
        "dtypes in a list": {"dtypes": []},
        "a world of half a rank": {"world_size": 0.5},
    }


def _manifest(folder: Path, fields: dict[str, Any]) -> str:
    path = _step(folder) / MANIFEST
    body = {**json.loads(path.read_text()), **fields}
    del body["digest"]
    path.write_text(json.dumps({**body, "digest": _own_digest(body)}))
    return f": {MANIFEST}: |: {METADATA}: |: f0: "  # it, or a file that it lists


def _braces_beside_holes(folder: Path) -> str:
    step = _step(folder)
    with open(step / METADATA, "wb") as file:
        file.write(b"\x80\x04" + b"}" * (50 << 20))
    make_holes(step / SHARD, 256 << 20)
    sign(step)
    return METADATA


def _terabytes(folder: Path) -> str:
    make_holes(_step(folder) / SHARD, 8 << 40)
    sign(_step(folder), {SHARD: 8 << 40})
    return SHARD


def _manifest_twice(folder: Path) -> str:
    path = _step(folder) / MANIFEST
    path.write_text(f'{path.read_text().rstrip()[:-1]}, "step": 1}}')
    return MANIFEST
