"""Files that a stranger might send, made on the spot: each kind has a good example, and ways to spoil it.

A case is a function that gets a folder with the good example in it, spoils it, and returns the name that the error has to contain
(several, with "|" between them, where any of them will do).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from checkpoint import hostile as signed
from checkpoint.hostile import MANIFEST, METADATA, SHARD, STATE, change_index, sign
from ottava.checkpoint import Checkpoints
from ottava.checkpoint.manifest import _own_digest
from ottava.models.hf_files import described, export_hf
from ottava.models.hf_llama import rows
from ottava.models.llama import LlamaConfig
from ottava.train.token_file import HEADER, MAGIC, write_token_file

Spoil = Callable[[Path], str]
CONFIG_JSON, INDEX_JSON = "config.json", "model.safetensors.index.json"
TOKENS, TOKENIZER, TOML = "corpus.tokens", "tokenizer.json", "run.toml"
DEEP = 100_000  # brackets in a row


@dataclass(frozen=True)
class Case:
    """One thing that is tried."""

    kind: str
    name: str
    spoil: Spoil


def cases() -> list[Case]:
    """All of them, in order."""
    kinds: dict[str, Iterator[tuple[str, Spoil]]] = {
        "checkpoint": checkpoints(),
        "Hugging Face directory": directories(),
        "token file": token_files(),
        "tokenizer": tokenizers(),
        "configuration": configurations(),
    }
    return [Case(kind, name, spoil) for kind, found in kinds.items() for name, spoil in found]


def make_good(kind: str, folder: Path) -> None:
    """The example that cases of a kind spoil."""
    if kind == "checkpoint":
        Checkpoints(folder / "root", hash="blake2b").save(1, {"w": torch.arange(64.0).view(16, 4), "step": 1})
    elif kind == "Hugging Face directory":
        shape = LlamaConfig(vocab_size=8, hidden_size=8, ffn_hidden_size=8, layers=1, heads=2, kv_heads=1, max_length=8)
        sizes = {"embedding.weight": (8, 8), "head.weight": (8, 8), "layernorm_qkv.weight": (16, 8)}
        weights = {
            row.ours: torch.ones(8)
            if "norm" in row.ours.rsplit(".", 2)[-1] or row.ours == "norm.weight"
            else torch.ones(8, 8)
            for row in rows(shape)
        }
        weights |= {name: torch.ones(size) for name in weights for end, size in sizes.items() if name.endswith(end)}
        saved = Checkpoints(folder / "source", config=described(shape)).save(1, {"model": weights})
        export_hf(saved, folder / "hf")
    elif kind == "token file":
        write_token_file(folder / TOKENS, [[1, 2, 3], [4, 5], [0]], vocab_size=7, tokenizer="by hand", end_token=6)
    elif kind == "tokenizer":
        (folder / TOKENIZER).write_text(json.dumps(good_tokenizer()))
    else:
        (folder / TOML).write_text("[train]\nsteps = 3\n")


# ---------------------------------------------------------------------------------------------------------- any kind of file


def _replaced(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _holes(path: Path, size: int = 1 << 40) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def anything(find: Callable[[Path], Path], name: str | None = None) -> Iterator[tuple[str, Spoil]]:
    """What may lie where any file is expected."""
    ways: dict[str, Callable[[Path], Any]] = {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "empty": lambda path: path.write_bytes(b""),
        "zeros": lambda path: path.write_bytes(bytes(5000)),
        "not text": lambda path: path.write_bytes(bytes(range(255, -1, -1)) * 20),
        "a terabyte of holes": _holes,
        "brackets": lambda path: path.write_text("[" * DEEP),
        "braces": lambda path: path.write_text('{"a":' * DEEP),
    }
    for way, make in ways.items():

        def spoil(folder: Path, make: Callable[[Path], Any] = make) -> str:
            path = find(folder)
            _replaced(path, make)
            return name or path.name

        yield way, spoil


# --------------------------------------------------------------------------------------------------------------- checkpoints


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
    _holes(step / SHARD, 256 << 20)
    sign(step)
    return METADATA


def _terabytes(folder: Path) -> str:
    _holes(_step(folder) / SHARD, 8 << 40)
    sign(_step(folder), {SHARD: 8 << 40})
    return SHARD


# ------------------------------------------------------------------------------------------------- directories of Hugging Face


def _shard(folder: Path) -> Path:
    (path,) = (folder / "hf").glob("*.safetensors")
    return path


def directories() -> Iterator[tuple[str, Spoil]]:
    places: dict[str, Callable[[Path], Path]] = {
        CONFIG_JSON: lambda folder: folder / "hf" / CONFIG_JSON,
        INDEX_JSON: lambda folder: folder / "hf" / INDEX_JSON,
        "safetensors": _shard,
    }
    for name, find in places.items():
        for way, spoil in anything(find):
            yield f"{name} is {way}", spoil
    for name, change in _hf_configs().items():
        yield f"config.json with {name}", partial(_config_changed, change=change)
    for name, index in _hf_indexes().items():
        yield f"index with {name}", partial(_index_written, index=index)
    for name, change in _headers().items():
        yield f"safetensors with {name}", partial(_header_changed, change=change)


def _hf_configs() -> dict[str, dict[str, Any]]:
    fp8 = {"quant_method": "fp8"}
    return {
        "a quantization_config that is a list": {"quantization_config": [1, 2]},
        "a quantization_config that is a text": {"quantization_config": "fp8"},
        "another quantization": {"quantization_config": {"quant_method": "gptq"}},
        "a quantization of nested lists": {"quantization_config": {"quant_method": [[[]]]}},
        "blocks of 2^31": {"quantization_config": {**fp8, "weight_block_size": [2**31, 1]}},
        "blocks of 0": {"quantization_config": {**fp8, "weight_block_size": [0, 0]}},
        "one block size": {"quantization_config": {**fp8, "weight_block_size": 128}},
        "a billion layers": {"num_hidden_layers": 10**9},
        "2^70 layers": {"num_hidden_layers": 1 << 70},
        "no layers": {"num_hidden_layers": 0},
        "layers in a list": {"num_hidden_layers": [1]},
        "a hidden size of 4,000 digits": {"hidden_size": 10**4000},
        "a hidden size of 2^39": {"hidden_size": 1 << 39},
        "a vocabulary of 2^39": {"vocab_size": 1 << 39},
        "a negative vocabulary": {"vocab_size": -8},
        "no heads": {"num_attention_heads": 0},
        "heads that do not divide": {"num_attention_heads": 3},
        "true heads": {"num_attention_heads": True},
        "no kv heads": {"num_key_value_heads": 0},
        "more kv heads than heads": {"num_key_value_heads": 64},
        "kv heads of text": {"num_key_value_heads": "1"},
        "eps of text": {"rms_norm_eps": "1e-5"},
        "eps that is no number": {"rms_norm_eps": float("nan")},
        "negative eps": {"rms_norm_eps": -1.0},
        "infinite theta": {"rope_theta": float("inf")},
        "theta in a dict": {"rope_theta": {"a": 1}},
        "scaled positions": {"rope_scaling": {"type": "yarn"}},
        "scaling of text": {"rope_scaling": "linear"},
        "another activation": {"hidden_act": "gelu"},
        "an activation of lists": {"hidden_act": [["silu"]]},
        "another model": {"model_type": "gemma2"},
        "a window": {"sliding_window": 4096},
        "biases": {"attention_bias": True},
        "another head size": {"head_dim": 2},
        "embeddings tied with text": {"tie_word_embeddings": "no"},
        "no positions": {"max_position_embeddings": 0},
    }


def _config_changed(folder: Path, change: dict[str, Any]) -> str:
    path = folder / "hf" / CONFIG_JSON
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return f"{CONFIG_JSON}|hf|.safetensors"  # it, or the folder or file that does not fit what it says


def _hf_indexes() -> dict[str, Any]:
    return {
        "no map": {},
        "a map that is a list": {"weight_map": []},
        "a file above": {"weight_map": {"a": "../x"}},
        "a file elsewhere": {"weight_map": {"a": "/etc/passwd"}},
        "a file that is a number": {"weight_map": {"a": 1}},
        "a file that is a list": {"weight_map": {"a": [["x"]]}},
        "a file that is not there": {"weight_map": {"a": "model-00009.safetensors"}},
        "config.json for weights": {"weight_map": {"a": CONFIG_JSON}},
        "itself for weights": {"weight_map": {"a": INDEX_JSON}},
        "a name with a zero": {"weight_map": {"a": "x\0y"}},
    }


def _index_written(folder: Path, index: Any) -> str:
    (folder / "hf" / INDEX_JSON).write_text(json.dumps(index))
    found = index.get("weight_map")
    files = list(found.values()) if isinstance(found, dict) else []
    good = [f for f in files if isinstance(f, str) and "/" not in f and "\0" not in f]
    return good[0] if good else INDEX_JSON


def _headers() -> dict[str, Callable[[dict[str, Any]], Any]]:
    name = "model.norm.weight"

    def entry(**fields: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda header: header[name].update(fields)

    def moved(by: int) -> Callable[[dict[str, Any]], Any]:
        return lambda header: header[name].update(data_offsets=[n + by for n in header[name]["data_offsets"]])

    return {
        "bytes that two share": moved(-1),
        "bytes beyond the end": moved(1 << 40),
        "bytes before the beginning": moved(-(1 << 40)),
        "no offsets": lambda header: header[name].pop("data_offsets"),
        "three offsets": entry(data_offsets=[0, 1, 2]),
        "offsets of text": entry(data_offsets=["0", "16"]),
        "offsets that go back": entry(data_offsets=[16, 0]),
        "a shape of 2^40": entry(shape=[1 << 40]),
        "a negative shape": entry(shape=[-8]),
        "a shape of text": entry(shape="8"),
        "a shape of halves": entry(shape=[8.0]),
        "a shape of a million ones": entry(shape=[1] * 100_000),
        "no shape": lambda header: header[name].pop("shape"),
        "a type that nobody knows": entry(dtype="F4"),
        "a type of lists": entry(dtype=[]),
        "integers for weights": entry(dtype="U8", shape=[16]),
        "an entry that is a list": lambda header: header.update({name: []}),
        "an entry that is nothing": lambda header: header.update({name: None}),
        "a missing weight": lambda header: header.pop(name),
        "an unknown weight": lambda header: header.update({"evil\x1b[2J": header.pop(name)}),
    }


def _header_changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    path = _shard(folder)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    known = {"model.norm.weight"} <= header.keys()
    return path.name if known else "hf"


# --------------------------------------------------------------------------------------------------------------- token files


def token_files() -> Iterator[tuple[str, Spoil]]:
    yield from anything(lambda folder: folder / TOKENS)
    for name, header in _token_headers().items():
        yield f"a header with {name}", partial(_token_header, header=header)
    for name, text in (("lists", b"[" * 4000), ("dicts", b'{"a":' * 800), ("nothing", b""), ("a text", b'"a"')):
        yield f"a header of {name}", partial(_token_bytes, at=12, data=struct.pack("<I", len(text)) + text)
    yield "another version", partial(_token_bytes, at=8, data=struct.pack("<I", 2))
    yield "another magic", partial(_token_bytes, at=0, data=b"OTTAVATX")
    yield "a header longer than the file", partial(_token_bytes, at=12, data=struct.pack("<I", 2**32 - 1))
    yield "cut in the tokens", partial(_token_cut, size=HEADER + 8)
    yield "cut in the header", partial(_token_cut, size=100)
    yield "a byte more", partial(_token_cut, size=HEADER + 9 * 2 + 3 * 8 + 1)
    yield "documents of holes", _documents_of_holes
    for name, ends in (("back", (4, 3, 9)), ("beyond", (4, 7, 10)), ("nowhere", (0, 0, 9)), ("at 2^63", (4, 2**63, 9))):
        yield f"documents that end {name}", partial(_token_bytes, at=HEADER + 18, data=struct.pack("<3Q", *ends))


def _token_headers() -> dict[str, dict[str, Any]]:
    return {
        "no tokens": {"count": 0},
        "negative tokens": {"count": -9},
        "2^60 tokens": {"count": 1 << 60},
        "2^47 tokens": {"count": (1 << 47) - 1, "documents": (1 << 47) - 1},
        "a count of 3,000 digits": {"count": 10**3000},
        "a count of text": {"count": "9"},
        "true tokens": {"count": True},
        "more documents than tokens": {"documents": 10},
        "no documents": {"documents": 0},
        "another type": {"dtype": "<f8"},
        "a type of objects": {"dtype": "O"},
        "a vocabulary of 2^40": {"vocab_size": 1 << 40},
        "no vocabulary": {"vocab_size": 0},
        "an end outside": {"end_token": 7},
        "a negative end": {"end_token": -1},
        "a tokenizer that clears the screen": {"tokenizer": "\x1b[2J"},
        "a tokenizer that is a list": {"tokenizer": []},
        "a checksum of text": {"crc32": "0"},
    }


def _token_header(folder: Path, header: dict[str, Any]) -> str:
    path = folder / TOKENS
    data = path.read_bytes()
    length = int.from_bytes(data[12:16], "little")
    text = json.dumps({**json.loads(data[16 : 16 + length]), **header}).encode()
    path.write_bytes((data[:12] + struct.pack("<I", len(text)) + text).ljust(HEADER, b"\0") + data[HEADER:])
    return TOKENS


def _token_bytes(folder: Path, at: int, data: bytes) -> str:
    with (folder / TOKENS).open("r+b") as file:
        file.seek(at)
        file.write(data)
    return TOKENS


def _token_cut(folder: Path, size: int) -> str:
    os.truncate(folder / TOKENS, size)
    return TOKENS


def _documents_of_holes(folder: Path) -> str:
    count = 10**11
    header = {
        "dtype": "<u2",
        "count": count,
        "documents": count,
        "vocab_size": 7,
        "tokenizer": "",
        "end_token": 6,
        "crc32": 0,
    }
    text = json.dumps(header).encode()
    (folder / TOKENS).write_bytes((MAGIC + struct.pack("<II", 1, len(text)) + text).ljust(HEADER, b"\0"))
    _holes(folder / TOKENS, HEADER + 10 * count)
    return TOKENS


# ---------------------------------------------------------------------------------------------------------------- tokenizers


def good_tokenizer() -> dict[str, Any]:
    """A tokenizer.json of three letters."""
    options = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model = {"type": "BPE", **options, "fuse_unk": False, "byte_fallback": False, "vocab": {"a": 0, "b": 1, "</s>": 2}}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **nothing, "added_tokens": [], "model": {**model, "merges": []}}


def tokenizers() -> Iterator[tuple[str, Spoil]]:
    yield from anything(lambda folder: folder / TOKENIZER)
    for name, change in _tokenizer_changes().items():
        yield name, partial(_tokenizer, change=change)
    for name, model in _models().items():
        yield f"a model {name}", partial(_tokenizer, change={"model": {**good_tokenizer()["model"], **model}})


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _tokenizer_changes() -> dict[str, dict[str, Any]]:
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    doubling = [_replace({"String": "a"}, "aa")] * 60
    return {
        "a table that cannot be parsed, which panics": {
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
        },
        "an empty table, which panics": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        "letters that double 60 times": {"normalizer": {"type": "Sequence", "normalizers": doubling}},
        "anything doubles 60 times": {
            "normalizer": {"type": "Sequence", "normalizers": [_replace({"Regex": "."}, "aa")] * 60}
        },
        "a letter that becomes a book": {"normalizer": _replace({"String": "a"}, "a" * 2_000_000)},
        "a preface": {"normalizer": {"type": "Prepend", "prepend": "a" * 2_000_000}},
        "a pattern that is none": {"normalizer": _replace({"Regex": "(("}, "a")},
        "a rule of no kind": {"normalizer": {"type": "Evil"}},
        "rules in rules": {"normalizer": _nested_rules(3000)},
        "words cut by no pattern": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "["}, "behavior": "Isolated"}
        },
        "an unknown cut": {"pre_tokenizer": {"type": "Evil"}},
        "no model": {"model": None},
        "a model that is a list": {"model": []},
        "a token 2^40": {"added_tokens": [{"id": 1 << 40, "content": "x", **added}]},
        "a token of a negative number": {"added_tokens": [{"id": -1, "content": "x", **added}]},
        "a token without a text": {"added_tokens": [{"id": 3, **added}]},
        "tokens that are a text": {"added_tokens": "abc"},
        "another version": {"version": "9.9"},
    }


def _nested_rules(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "NFC"}
    for _ in range(min(depth, 300)):
        found = {"type": "Sequence", "normalizers": [found]}
    return found


def _models() -> dict[str, dict[str, Any]]:
    return {
        "with a token 2^32 - 1": {"vocab": {"a": 0, "</s>": 2**32 - 1}},
        "with a token 2^24": {"vocab": {"a": 0, "</s>": 1 << 24}},
        "with a token of text": {"vocab": {"a": "0", "</s>": 1}},
        "with a negative token": {"vocab": {"a": -1, "</s>": 1}},
        "without an end": {"vocab": {"a": 0}},
        "without tokens": {"vocab": {}},
        "whose tokens are a list": {"vocab": ["a"]},
        "that merges strangers": {"merges": ["x y"]},
        "that merges one": {"merges": [["a"]]},
        "that merges to a stranger": {"merges": ["a b"]},
        "that drops everything": {"dropout": 5.0},
        "of no kind": {"type": "Evil"},
        "of one-word pieces without unknowns": {
            "type": "WordPiece",
            "unk_token": "zz",
            "max_input_chars_per_word": 100,
        },
        "of words without unknowns": {"type": "WordLevel", "unk_token": "zz", "vocab": {"</s>": 0}},
        "of no letters": {"type": "Unigram", "unk_id": 0, "vocab": []},
        "of letters without the unknown": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0], ["</s>", 0.0]]},
    }


def _tokenizer(folder: Path, change: dict[str, Any]) -> str:
    (folder / TOKENIZER).write_text(json.dumps({**good_tokenizer(), **change}))
    return TOKENIZER


# ------------------------------------------------------------------------------------------------------------ configurations


def configurations() -> Iterator[tuple[str, Spoil]]:
    yield from ((way, spoil) for way, spoil in anything(lambda folder: folder / TOML) if way != "empty")
    for name, text in _tomls().items():
        yield name, partial(_toml, text=text)


def _tomls() -> dict[str, str]:
    return {
        "lists in lists": "a = " + "[" * DEEP,
        "tables in tables": "a = " + "{b = " * 50_000,
        "a name of a hundred thousand parts": "a" + ".a" * DEEP + " = 1",
        "a table's name of a hundred thousand parts": "[a" + ".a" * DEEP + "]",
        "2 MB of spaces": " " * (2 << 20),
        "cut short": "[train\nsteps = 1",
        "twice the same key": "[train]\nsteps = 1\nsteps = 2",
        "a number of 5,000 digits": "[train]\nsteps = " + "9" * 5000,
        "an unknown section": "[evil]\na = 1",
        "an unknown key": "[train]\nevil = 1",
        "a section of text": 'train = "steps"',
        "a section in a list": "[[train]]\nsteps = 1",
        "a section named by an escape": '["\\u001b[2J"]\na = 1',
        "steps of text": '[train]\nsteps = "many"',
        "steps of dates": "[train]\nsteps = 2020-01-01",
        "steps in a table": "[train]\nsteps = {a = 1}",
        "steps in a list": "[train]\nsteps = [1, 2]",
        "half a step": "[train]\nsteps = 1.5",
        "steps that are no number": "[train]\nsteps = nan",
        "files that are options": '[data]\nfiles = ["--train.steps=1"]',
        "a preset that is a list": 'preset = ["gpt2"]',
        "a preset that nobody knows": 'preset = "../../etc/passwd"',
        "a learning rate of text": '[optimizer]\nlr = "fast"',
    }


def _toml(folder: Path, text: str) -> str:
    (folder / TOML).write_text(text)
    return TOML
