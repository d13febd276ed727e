"""Checkpoints to Hugging Face's directories and back, judged by `transformers` and by the `safetensors` package."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from ottava.checkpoint import CheckpointError, Checkpoints, Relaxed, load_model_state, model_state, verify
from ottava.models import Llama, LlamaConfig
from ottava.models.hf_files import export_hf, import_hf
from ottava.models.hf_llama import hf_config
from ottava.models.safetensors_file import File
from ottava.nn.initialize import materialize_

CONFIG = LlamaConfig(
    vocab_size=100, hidden_size=64, ffn_hidden_size=160, layers=2, heads=4, kv_heads=2, max_length=64, init_std=0.1
)
TIED = LlamaConfig(**{**vars(CONFIG), "tie_embeddings": True, "pad_vocab_to": 64})
TOKENS = torch.randint(100, (2, 17), generator=torch.Generator().manual_seed(1))


def saved(root: Path, config: LlamaConfig) -> tuple[Llama, Path]:
    model = materialize_(Llama(config, device="meta"), seed=3, device="cpu")
    with torch.no_grad():  # gains of 1 would hide a swap of two norms
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, Checkpoints(root).save(7, model_state(model, optimizer))


def loaded(root: Path, config: LlamaConfig, step: int = 0) -> Llama:
    model = materialize_(Llama(config, device="meta"), seed=4, device="cpu")
    assert load_model_state(Checkpoints(root), model, which=step, relaxed=Relaxed(extra=["optimizer.*"])) is not None
    return model


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied, padded"])
def test_transformers_loads_an_export_and_agrees(tmp_path: Path, config: LlamaConfig) -> None:
    model, path = saved(tmp_path / "run", config)
    out = export_hf(path, tmp_path / "hf", config, dtype="float32", max_shard_bytes=60_000)
    hf = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(model(TOKENS), hf(TOKENS).logits, rtol=1e-5, atol=1e-5)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    tensors = {n: t for f in files for n, t in safetensors.torch.load_file(out / f).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(tensors) == set(index["weight_map"])


def test_a_model_of_transformers_is_imported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(CONFIG)))
    hf.save_pretrained(tmp_path / "one")
    hf.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    for source, shards in (("one", 1), ("many", 3)):
        path = import_hf(tmp_path / source, tmp_path / f"run-{source}", shards=shards, block_bytes=4096)
        assert all(row.good for row in verify(path))
        model = loaded(tmp_path / f"run-{source}", CONFIG)
        torch.testing.assert_close(model(TOKENS), hf(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_export_and_import_give_the_weights_back(tmp_path: Path) -> None:
    model, path = saved(tmp_path / "run", TIED)
    export_hf(path, tmp_path / "hf", TIED, dtype="float32")
    import_hf(tmp_path / "hf", tmp_path / "back", pad_vocab_to=64)
    back = loaded(tmp_path / "back", TIED)
    for (name, mine), theirs in zip(model.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    # as in Hugging Face's cache
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "hf").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    import_hf(tmp_path / "links", tmp_path / "linked", pad_vocab_to=64)
    assert torch.equal(loaded(tmp_path / "linked", TIED).norm.weight, model.norm.weight)
    # what was imported knows its shape
    export_hf(tmp_path / "back" / "step-00000000", tmp_path / "again", dtype="float32")
    for file in (tmp_path / "hf").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_bfloat16_is_the_rounded_weight(tmp_path: Path) -> None:
    model, path = saved(tmp_path / "run", CONFIG)
    out = export_hf(path, tmp_path / "hf", CONFIG)
    (file,) = out.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    assert torch.equal(tensors["model.norm.weight"], model.norm.weight.bfloat16())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


BLOCKS = LlamaConfig(**{**vars(CONFIG), "hidden_size": 128, "ffn_hidden_size": 384})
RAGGED = LlamaConfig(**{**vars(CONFIG), "hidden_size": 128, "ffn_hidden_size": 160})


def test_fp8_export_has_blocks_and_scales_that_come_back(tmp_path: Path) -> None:
    model, path = saved(tmp_path / "run", BLOCKS)
    out = export_hf(path, tmp_path / "hf", BLOCKS, dtype="fp8")
    (file,) = out.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.0.mlp.gate_proj.weight"  # [384, 128]
    weight, scale = tensors[name], tensors[f"{name}_scale_inv"]
    assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (3, 1)
    gate = model.layers[0].layernorm_mlp.fc1_gate_weight.detach()
    values = weight.float() * scale.repeat_interleave(128, 0)
    assert (values - gate).abs().max() <= gate.abs().max() / 16  # half of e4m3's step of 1/8
    import_hf(out, tmp_path / "back")
    back = loaded(tmp_path / "back", BLOCKS)
    assert torch.equal(back.layers[0].layernorm_mlp.fc1_gate_weight, values)
    assert torch.equal(back.norm.weight, model.norm.weight.bfloat16().float())


@pytest.mark.parametrize("config", [CONFIG, BLOCKS, RAGGED], ids=["parts of blocks", "blocks", "ragged"])
def test_transformers_loads_an_fp8_export(tmp_path: Path, config: LlamaConfig) -> None:
    _, path = saved(tmp_path / "run", config)
    out = export_hf(path, tmp_path / "hf", config, dtype="fp8")
    plain = transformers.FineGrainedFP8Config(dequantize=True)  # their FP8 products need a GPU
    hf = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=plain).float()
    import_hf(out, tmp_path / "back")
    ours = loaded(tmp_path / "back", config)
    torch.testing.assert_close(ours(TOKENS), hf(TOKENS).logits, rtol=1e-5, atol=1e-5)
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert ("model.layers.1.mlp.down_proj" in kept) == (config.ffn_hidden_size == 160)


def test_mistakes_are_named(tmp_path: Path) -> None:
    _, path = saved(tmp_path / "run", CONFIG)
    with pytest.raises(ValueError, match="pass config=LlamaConfig"):
        export_hf(path, tmp_path / "hf")
    more = LlamaConfig(**{**vars(CONFIG), "layers": 3})
    with pytest.raises(ValueError, match="layers.2.*Llama with 3 layers"):
        export_hf(path, tmp_path / "hf", more)
    with pytest.raises(ValueError, match="too few for 1000000000 layers"):
        export_hf(path, tmp_path / "hf", LlamaConfig(**{**vars(CONFIG), "layers": 10**9}))
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob("hf.tmp*"))
    with pytest.raises(ValueError, match="dtype='int8'"):
        export_hf(path, tmp_path / "hf", CONFIG, dtype="int8")
    out = export_hf(path, tmp_path / "hf", CONFIG)
    with pytest.raises(ValueError, match="exists"):
        export_hf(path, out, CONFIG)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../../etc/passwd"
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match="not the name of a file"):
        import_hf(out, tmp_path / "back")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        import_hf(tmp_path, tmp_path / "back")


def test_a_strangers_directory_is_not_believed(tmp_path: Path) -> None:
    _, path = saved(tmp_path / "run", CONFIG)
    good = export_hf(path, tmp_path / "hf", CONFIG)
    (weights,) = (p.name for p in good.glob("*.safetensors"))

    def refused(name: str, change: Callable[[Path], Any]) -> str:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(good, tmp_path / "bad")
        (tmp_path / "bad" / name).unlink()
        change(tmp_path / "bad" / name)
        with pytest.raises((ValueError, CheckpointError)) as caught:
            import_hf(tmp_path / "bad", tmp_path / "back")
        return str(caught.value)

    config = json.loads((good / "config.json").read_text())
    index = "model.safetensors.index.json"
    for name in (weights, index, "config.json"):  # a pipe would be waited for
        assert refused(name, os.mkfifo) == f"{name}: is not a regular file."
    for name in (index, "config.json"):

        def long(path: Path) -> None:
            path.touch()
            os.truncate(path, 1 << 40)

        assert "at most 4194304 are read" in refused(name, long)
        assert "is not valid JSON" in refused(name, lambda path: path.write_text("[" * 200_000))
    for change, message in (
        ({"num_hidden_layers": 10**9}, "too few for 1000000000 layers"),
        ({"hidden_size": "64"}, "hidden_size '64'"),
        ({"vocab_size": None}, "vocab_size None"),
        ({"rope_scaling": 3}, "cannot be understood"),
        ({"max_position_embeddings": []}, "max_position_embeddings (list)"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps '1e-5'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"model_type": "gemma"}, "model_type 'gemma'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
    ):
        text = json.dumps({**config, **change})
        assert message in refused("config.json", lambda path, text=text: path.write_text(text))
    for entry in (3, None, "/etc/passwd", "../x"):
        text = json.dumps({"weight_map": {"model.norm.weight": entry}})
        assert "is not the name of a file" in refused(index, lambda path, text=text: path.write_text(text))


def test_a_strangers_file_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def write(header: object, data: bytes = b"") -> None:
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)

    path.write_bytes((1 << 50).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="header is said to have"):
        File(path)
    for entry in (
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "object", "shape": [1], "data_offsets": [0, 4]},
        "text",
    ):
        write({"w": entry}, b"1234")
        with pytest.raises(ValueError, match="the entry of 'w'"):
            File(path)
    write({"w": {"dtype": "F32", "shape": [1 << 28], "data_offsets": [0, 1 << 30]}})
    os.truncate(path, path.stat().st_size + (1 << 30))  # a kilobyte on the disk, a gigabyte in memory
    with pytest.raises(ValueError, match=r"x.safetensors: of its \d+ bytes \d+ are there, the rest are holes"):
        File(path)
