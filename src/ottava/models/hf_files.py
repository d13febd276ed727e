"""Checkpoints to and from Hugging Face's directories: `config.json` and sharded safetensors, a tensor at a time.

An FP8 export has, for every weight of a linear layer, what the field calls fine-grained FP8:

    NAME.weight              float8_e4m3fn [M, K]
    NAME.weight_scale_inv    float32 [ceil(M/128), ceil(K/128)]: weight x scale_inv of its block of 128 x 128 is the value

and `quantization_config` in config.json says so. Embedding, head and norms are bfloat16, and so is a weight that blocks do not fill:
`transformers` spreads scales evenly over a weight, and would misread one of 160 rows in blocks of 128 and 32.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ottava import recipe
from ottava.checkpoint import Reader
from ottava.checkpoint.boxes import Box
from ottava.checkpoint.digest import algorithm
from ottava.checkpoint.errors import CheckpointError, listed
from ottava.checkpoint.files import About, encode_state
from ottava.checkpoint.manifest import json_object, read_at_most
from ottava.checkpoint.names import MAX_JSON_BYTES, STATE, check_file_name, open_inside
from ottava.checkpoint.storage import Location, storage_at
from ottava.checkpoint.stream import Stream, write_streams
from ottava.models.hf_llama import Row, config_from_hf, hf_config, hf_shapes, rows
from ottava.models.llama import LlamaConfig
from ottava.models.safetensors_file import File, Spec, Writer, shards
from ottava.quant.quantizer import quantize

__all__ = ["export_hf", "import_hf", "described"]

INDEX, CONFIG = "model.safetensors.index.json", "config.json"
BLOCK = 128
SCALE = "_scale_inv"
_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}
DESCRIBED = "hf_config"
"""Where a checkpoint's configuration keeps config.json, so that an export knows the model's shape. See `described`."""


# ------------------------------------------------------------------------------------------------------------------ export


def export_hf(
    checkpoint: Location,
    out: str | Path,
    config: LlamaConfig | None = None,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 << 30,
) -> Path:
    """Writes the Llama of a checkpoint as a directory that `transformers` loads; returns the directory, which must not exist.

    checkpoint: one that holds `model_state`, as `load_model_state` loads it. config: the model's shape; not needed for what
    `ottava train` or `import_hf` made. dtype: "bfloat16", "float32" or "fp8". One tensor is in memory at a time. The directory
    appears when it is complete.

        >>> export_hf("run/checkpoints/step-00000100", "my-llama", config, dtype="float32")
        >>> transformers.AutoModelForCausalLM.from_pretrained("my-llama")
    """
    if dtype not in _PLAIN:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(_PLAIN)}.")
    target = Path(out).absolute()
    if target.exists():
        raise ValueError(f"{target} exists: name a new directory.")
    reader = Reader(checkpoint)
    config = config or _own_config(reader)
    if config.layers > len(reader.entries):  # before a name is made for each
        raise ValueError(f"The checkpoint's {len(reader.entries)} tensors are too few for {config.layers} layers.")
    specs = _specs(config, dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        _write_files(folder, specs, _exported(reader, config, dtype), max_shard_bytes)
        (folder / CONFIG).write_text(json.dumps(_config_json(config, dtype), indent=2) + "\n")
        os.rename(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target


def described(config: LlamaConfig) -> dict[str, Any]:
    """What to add to the configuration of a checkpoint that `export_hf` shall understand by itself.

    >>> Checkpoints("run/checkpoints", config={**settings, **described(shape)})
    """
    return {DESCRIBED: hf_config(config)}


def _own_config(reader: Reader) -> LlamaConfig:
    found = reader.config.get(DESCRIBED) if isinstance(reader.config, dict) else None
    if not isinstance(found, dict):
        raise ValueError(
            f"{reader.path} does not say that it holds a Llama, and of which shape: it is of another model, or of a program of yours. "
            "Then call export_hf, and pass config=LlamaConfig(...)."
        )
    try:
        return config_from_hf(found)
    except ValueError as error:
        raise ValueError(f"{STATE}: {DESCRIBED} of the checkpoint's configuration: {error}") from error


def _quantized(name: str, shape: Sequence[int], dtype: str) -> bool:
    """Whether a tensor of theirs is exported in FP8: weights of the layers' products that are one block wide or whole blocks."""
    fits = all(size <= BLOCK or size % BLOCK == 0 for size in shape)
    return dtype == "fp8" and name.endswith("_proj.weight") and fits


def _specs(config: LlamaConfig, dtype: str) -> dict[str, Spec]:
    specs = {}
    for name, shape in hf_shapes(config).items():
        if _quantized(name, shape, dtype):
            specs[name] = Spec(torch.float8_e4m3fn, shape)
            specs[name + SCALE] = Spec(torch.float32, (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
        else:
            specs[name] = Spec(_PLAIN[dtype], shape)
    return specs


def _exported(reader: Reader, config: LlamaConfig, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Their tensors, in the order of `_specs`."""
    for row in rows(config):
        for name, tensor in row.export(_checked(_weight(reader, row), row.ours)).items():
            if _quantized(name, tensor.shape, dtype):
                q: Any = quantize(tensor.float(), recipe.Float8BlockScaling(), role="weight", columnwise=False)
                yield name, q.rowwise_data.view(torch.float8_e4m3fn)
                yield name + SCALE, q.rowwise_scale_inv
            else:
                yield name, tensor.to(_PLAIN[dtype])


def _checked(tensor: Tensor, name: str) -> Tensor:
    """A model that is handed on has numbers only."""
    values = tensor.float() if tensor.element_size() == 1 else tensor
    bad = tensor.numel() - int(values.isfinite().sum())
    if bad:
        raise CheckpointError(
            f"{name} has {bad} numbers that are not finite: a model that makes NaN is not exported. Take an earlier checkpoint "
            "(`ottava checkpoint ls` lists them)."
        )
    return tensor


def _weight(reader: Reader, row: Row) -> Tensor:
    """Our tensor, whole: the parameter, or the master of one that is stored in FP8."""
    for ours in (row.ours, *row.former[:1]) if row.former else (row.ours,):
        for name in (f"model.{ours}", f"optimizer.state.{ours}.master_param"):
            if name in reader.entries:
                tensor = reader.read(name)
                return tensor if ours == row.ours or row.former is None else tensor.chunk(2)[row.former[1]]
    raise ValueError(
        f"The checkpoint has no model.{row.ours}: is it of a Llama with {row.config.layers} layers, saved with `model_state`?"
    )


def _write_files(
    folder: Path, specs: dict[str, Spec], tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    files = shards(((name, spec.nbytes) for name, spec in specs.items()), max_shard_bytes)
    placed = {}
    for i, names in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        with Writer(folder / file, {name: specs[name] for name in names}) as writer:
            for name in names:
                found, tensor = next(tensors)
                assert found == name
                writer.add(name, tensor)
                placed[name] = file
    total = sum(spec.nbytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    found = {**hf_config(config), "torch_dtype": str(_PLAIN[dtype]).removeprefix("torch.")}
    if dtype == "fp8":
        plain = [name for name, shape in hf_shapes(config).items() if not _quantized(name, shape, dtype)]
        found["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [n.removesuffix(".weight") for n in plain if "norm" not in n],
        }
    return found


# ------------------------------------------------------------------------------------------------------------------ import


def import_hf(
    source: str | Path,
    target: Location,
    *,
    step: int = 0,
    shards: int = 1,
    block_bytes: int = 64 << 20,
    **changes: Any,
) -> Location:
    """Reads a Llama from Hugging Face's directory `source` into the directory of checkpoints `target`; where the checkpoint is then.

    Weights become float32. Any mesh loads them: `load_model_state(..., relaxed=Relaxed(missing=["optimizer.*"]))`. One tensor is in
    memory at a time. changes: fields of LlamaConfig, such as pad_vocab_to. step, shards: of the new checkpoint.

        >>> import_hf("my-llama", "run/checkpoints")
        PosixPath('/home/me/run/checkpoints/step-00000000')
    """
    folder = Path(source)
    found = _json(folder / CONFIG)
    config = config_from_hf(found, **changes)
    theirs = _Theirs(folder, found)
    theirs.check(config)
    streams = {f"model.{row.ours}": theirs.stream(row) for row in rows(config)}
    state = encode_state({}, described(config))
    about = About(step, shards, [{"shards": shards}], algorithm(None))
    return write_streams(storage_at(target), about, streams, state, shards, block_bytes)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path.parent} has no {path.name}: is it a model of Hugging Face?")
    with open_inside(path.parent, path.name, links=True) as file:
        return json_object(read_at_most(file, path.name, MAX_JSON_BYTES), path.name)


class _Theirs:
    """The tensors of a directory of Hugging Face, FP8 ones dequantized."""

    def __init__(self, folder: Path, described: Mapping[str, Any]) -> None:
        quantization = described.get("quantization_config") or {}
        if not isinstance(quantization, Mapping):
            raise ValueError(f"{folder.name}: {CONFIG} has a {type(quantization).__name__} as quantization_config.")
        if quantization and quantization.get("quant_method") != "fp8":
            raise ValueError(f"{folder.name}: cannot read weights quantized by {quantization.get('quant_method')!r}.")
        self._block = _block_size(quantization.get("weight_block_size") or [BLOCK, BLOCK], folder)
        self._folder = folder
        single, index = folder / "model.safetensors", folder / INDEX
        names = [single.name] if single.exists() and not index.exists() else sorted(set(_weight_map(index).values()))
        self._file_of: dict[str, File] = {}
        for file in (File(folder / n) for n in names):
            if twice := sorted(file.specs.keys() & self._file_of.keys()):
                raise ValueError(
                    f"{file.path.name} has {listed(twice, 3)}, which {self._file_of[twice[0]].path.name} has too."
                )
            self._file_of |= dict.fromkeys(file.specs, file)
        self._held: tuple[str, Tensor] | None = None

    def check(self, config: LlamaConfig) -> None:
        """ValueError with the names of tensors that are missing, unknown or misshapen."""
        if config.layers > len(self._file_of):  # before a name is made for each
            raise ValueError(
                f"{self._folder.name}: {len(self._file_of)} tensors are too few for {config.layers} layers."
            )
        shapes = hf_shapes(config)
        unknown = sorted(
            name
            for name in self._file_of
            if name.removesuffix(SCALE) not in shapes
            and not name.endswith("rotary_emb.inv_freq")
            and not (config.tie_embeddings and name == "lm_head.weight")
        )
        missing = sorted(set(shapes) - set(self._file_of))
        if missing or unknown:
            raise ValueError(
                f"{self._folder.name} has not the weights of a Llama with {config.layers} layers: missing {listed(missing, 4)} "
                f"({len(missing)} in all), unknown {listed(unknown, 4)} ({len(unknown)} in all)."
            )
        for name, shape in shapes.items():
            file = self._file_of[name]
            if file.specs[name].shape != shape:
                what = f"{name} must have the shape {shape} for this config"
                raise ValueError(f"{file.path.name}: {what}, got {str(file.specs[name].shape)[:80]}.")
            self._check_scales(name)

    def _check_scales(self, name: str) -> None:
        """Of a weight that is stored in FP8: there have to be some, of the right shape."""
        file, spec = self._file_of.get(name + SCALE), self._file_of[name].specs[name]
        if not spec.dtype.is_floating_point or (file is None and spec.dtype.itemsize == 1):
            raise ValueError(
                f"{self._file_of[name].path.name}: {name} is {spec.dtype} without {SCALE}: expected a weight."
            )
        if file is None:
            return
        blocks = tuple(-(-size // block) for size, block in zip(spec.shape, self._block))
        found = file.specs[name + SCALE].shape
        if len(spec.shape) != 2 or found != blocks:
            raise ValueError(f"{file.path.name}: {name + SCALE} must have the shape {blocks}, got {str(found)[:80]}.")

    def stream(self, row: Row) -> Stream:
        """Our tensor of this row, made of theirs when it is read."""
        shape = tuple(
            row.load(
                {
                    n: torch.empty(self._file_of[n].specs[n].shape, dtype=torch.float32, device="meta")
                    for n in row.theirs
                }
            ).shape
        )
        return Stream(torch.float32, shape, lambda box: self._read(row, box))

    def _read(self, row: Row, box: Box) -> Tensor:
        if self._held is None or self._held[0] != row.ours:  # boxes of a tensor come one after the other
            self._held = None
            self._held = (row.ours, row.load({name: self._tensor(name) for name in row.theirs}))
        offset, shape = box
        return self._held[1][tuple(slice(o, o + n) for o, n in zip(offset, shape))].clone()

    def _tensor(self, name: str) -> Tensor:
        tensor = self._file_of[name].read(name).float()
        scale = self._file_of.get(name + SCALE)
        if scale is None:
            return tensor
        of_block = scale.read(name + SCALE).float()
        for dim, block in enumerate(self._block):
            within = torch.arange(tensor.shape[dim]) // block  # no more memory than the tensor's, however large a block
            of_block = of_block.index_select(dim, within)
        return tensor * of_block


def _block_size(found: Any, folder: Path) -> tuple[int, int]:
    """What `weight_block_size` says, if it is two numbers."""
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and 1 <= n <= 1 << 20 for n in found):
        raise ValueError(
            f"{folder.name}: {CONFIG} has weight_block_size {str(found)[:80]}: expected two numbers from 1."
        )
    return found[0], found[1]


def _weight_map(index: Path) -> dict[str, str]:
    found = _json(index).get("weight_map")
    if not isinstance(found, dict):
        raise ValueError(f"{index.name} has no weight_map.")
    return {name: check_file_name(file, index.name) for name, file in found.items()}
