"""Directories as Hugging Face has them: what config.json, the index and headers of safetensors may say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hostile.spoil import CONFIG_JSON, INDEX_JSON, Spoil, anything


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
    for name, more in (
        ("a size", '"hidden_size": 16'),
        ("its kind", '"model_type": "llama"'),
        ("theta", '"rope_theta": 1e400'),
    ):
        yield f"config.json with {name} twice", partial(_config_twice, more=more)
    yield "safetensors with a weight twice", _weight_twice
    for name, target in (("a file that is none", "/etc/passwd"), ("a device", "/dev/zero"), ("nothing", "/nowhere")):
        yield f"safetensors that are a link to {name}", partial(_weights_elsewhere, target=target)
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
        "2^62 positions": {"max_position_embeddings": 1 << 62},
        "a wide MLP of 2^39": {"intermediate_size": 1 << 39},
        "a negative MLP": {"intermediate_size": -16},
        "a hidden size with a point": {"hidden_size": 8.0},
        "endless eps": {"rms_norm_eps": float("inf")},
        "negative theta": {"rope_theta": -1.0},
        "a hundred thousand block sizes": {"quantization_config": {**fp8, "weight_block_size": [128] * 100_000}},
        "a model that clears the screen": {"model_type": "evil\x1b[2J"},
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


def _config_twice(folder: Path, more: str) -> str:
    path = folder / "hf" / CONFIG_JSON
    path.write_text(f"{path.read_text().rstrip()[:-1]}, {more}}}")
    return CONFIG_JSON


def _weight_twice(folder: Path) -> str:
    path = _shard(folder)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode().rstrip()
    entry = json.dumps(json.loads(text)["model.norm.weight"])
    header = f'{text[:-1]},"model.norm.weight":{entry}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    return path.name


def _weights_elsewhere(folder: Path, target: str) -> str:
    path = _shard(folder)
    path.unlink()
    path.symlink_to(target)
    return path.name
