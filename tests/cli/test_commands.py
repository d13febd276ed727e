"""`ottava train`, `data`, `report` and `checkpoint` as a user types them, without starting ranks."""

from __future__ import annotations

import json
import re

import pytest
import torch

from ottava.checkpoint import Checkpoints, model_state
from ottava.cli.main import main
from ottava.models import Llama, LlamaConfig
from ottava.models.hf_files import described
from ottava.train.token_file import TokenFile


def test_an_unknown_key_is_exit_2_with_the_nearest_name(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--train.stepz", "3"])
    assert stopped.value.code == 2 and "--train.steps" in capsys.readouterr().err
    path = tmp_path / "run.toml"
    path.write_text("[train]\nstepz = 3\n")
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(path)])
    assert stopped.value.code == 2 and "Did you mean 'steps'?" in capsys.readouterr().err


def test_an_impossible_plan_is_exit_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--parallel.tp", "2", "--parallel.strategy", "ddp"])
    assert stopped.value.code == 2 and "fsdp2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["doctor", "--tmeout", "3"],
            "ottava doctor: error: unrecognized arguments: --tmeout 3. Did you mean --timeout?",
        ),
        (
            ["checkpoint", "reshard", "a", "b", "--shard=2", "--x"],
            "ottava checkpoint reshard: error: unrecognized arguments: --x.",
        ),
        (["bench", "layer", "--sizes", "9"], "ottava bench layer: error: unrecognized arguments: --sizes 9."),
    ],
)
def test_a_misspelt_option_is_told_by_its_command(capsys, words, said):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, near",
    [
        (["trian"], "train"),
        (["checkpoint", "verfy", "run"], "verify"),
        (["bench", "stepp"], "step"),
        (["launch", "gpt2", "--on", "slrum"], "slurm"),
    ],
)
def test_a_misspelt_choice_is_told_with_the_nearest(capsys, words, near):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2 and f"Did you mean {near!r}?" in capsys.readouterr().err


def test_without_a_command_all_are_listed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2 and "how a run is doing" in capsys.readouterr().err


def test_a_dry_run_shows_mesh_size_and_memory(capsys):
    assert main(["train", "llama3-8b", "--parallel.ranks", "16", "--parallel.tp", "2", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "dp_replicate 1 x dp_shard 8 x tp 2, fsdp2" in text and "8,030,261,248" in text
    assert "hidden_size = 4096" in text and "Memory of a rank" in text


def test_a_dry_run_counts_the_memory_that_a_plan_counts(tmp_path, capsys):
    best = tmp_path / "best.toml"
    assert main(["plan", "llama3-1b", "--gpus", "8", "--output", str(best)]) == 0
    planned = capsys.readouterr().out
    assert main(["train", str(best), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    (total,) = re.findall(r"in all +([\d.]+ GiB) of", planned)
    assert re.search(rf"in all, about +{total}", shown)
    assert main(["train", "--dry-run"]) == 0 and re.search(r"parameters +3.38 MiB", capsys.readouterr().out)
    assert main(["train", "--dry-run", "--parallel.strategy", "fsdp1"]) == 0
    assert "not estimated: A plan knows no strategy fsdp1." in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--parallel.ranks", "3", "--parallel.tp", "2"], "3 ranks"),
        (["--parallel.ranks", "2", "--parallel.dp-shard", "4"], "there are 2"),
        (["--parallel.ranks", "3"], "train.global_batch (16) must be a multiple of train.micro_batch (8) times the 3"),
    ],
)
def test_a_dry_run_of_what_cannot_run_is_exit_2_and_a_sentence(capsys, options, message):
    assert main(["train", "--dry-run", *options]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("ottava train: ") and message in said.err and "Traceback" not in said.err


def test_a_dry_run_names_files_that_are_not_here(tmp_path, capsys):
    missing = tmp_path / "missing.tokens"
    assert main(["train", "--dry-run", "--data.files", str(missing)]) == 0
    assert f"not here       {missing}" in capsys.readouterr().out
    assert main(["train", "--dry-run"]) == 0
    assert "not here" not in capsys.readouterr().out


def test_tokenize(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "hello"}) + "\n")
    words = ["data", "tokenize", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "a.tokens")]
    assert main([*words, "--field", "body"]) == 0
    assert TokenFile(tmp_path / "a.tokens").count == 6 and "6 tokens in 1 documents" in capsys.readouterr().out
    assert main([*words, "--overwrite"]) == 2 and "no text in the field 'text'" in capsys.readouterr().err
    assert main([*words, "--field", "body"]) == 2 and "a.tokens exists" in capsys.readouterr().err
    assert main([*words[:3], "--output", words[2], "--overwrite"]) == 2 and "is what is read" in capsys.readouterr().err


def test_report(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path / "nothing")]) == 2 and "is not a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert f"{tmp_path / 'no' / 'page.html'} cannot be written: No such file" in capsys.readouterr().err


def test_checkpoints_are_listed_and_verified(tmp_path, capsys):
    Checkpoints(tmp_path / "checkpoints").save(3, {"w": torch.ones(4)})
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0 and "step-00000003" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    Checkpoints(tmp_path / "long").save(3, {"w": torch.ones(4), "layers.0.self_attention.proj.weight": torch.ones(4)})
    capsys.readouterr()
    assert main(["checkpoint", "ls", str(tmp_path / "long" / "step-00000003")]) == 0
    assert len({line.index(" ok ") for line in capsys.readouterr().out.splitlines()}) == 1
    (shard,) = (tmp_path / "checkpoints" / "step-00000003").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 4 and "BAD" in capsys.readouterr().out
    assert main(["checkpoint", "ls", str(tmp_path / "nowhere")]) == 2


def test_a_llama_goes_to_hugging_face_and_back(tmp_path, capsys):
    shape = LlamaConfig(60, 64, 128, layers=1, heads=2, kv_heads=1, max_length=16, pad_vocab_to=64)
    model, run = Llama(shape, device="cpu"), tmp_path / "run"
    Checkpoints(run / "checkpoints", config=described(shape)).save(7, model_state(model))
    assert main(["checkpoint", "export", str(run), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 60
    assert main(["checkpoint", "export", str(run), str(tmp_path / "hf")]) == 2  # it is there already
    back = ["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "back"), "--step", "3", "--pad-vocab-to", "64"]
    assert main([*back, "--shards", "2"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(tmp_path / "back" / "step-00000003")]) == 0
    assert "__1_0.distcp" in capsys.readouterr().out
    other = Llama(shape, device="cpu")
    state = model_state(other)
    Checkpoints(tmp_path / "back").load({"model": state["model"]})
    for name, weight in model.state_dict().items():
        if isinstance(weight, torch.Tensor):
            rows = 60 if name in ("embedding.weight", "head.weight") else None  # padding is nobody's
            assert torch.equal(weight[:rows], other.state_dict()[name][:rows]), name


def test_reshard_takes_the_newest_that_can_be_used(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": torch.full((8,), float(step))})
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_text("{")
    (shard,) = (tmp_path / "checkpoints" / "step-00000003").glob("*.distcp")
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])  # of the right size
    assert main(["checkpoint", "reshard", str(tmp_path), str(tmp_path / "cut"), "--shards", "4"]) == 0
    assert capsys.readouterr().out.strip().endswith("step-00000001")
    state = {"w": torch.zeros(8)}
    Checkpoints(tmp_path / "cut").load(state)
    assert torch.equal(state["w"], torch.ones(8)) and len(list((tmp_path / "cut").glob("*/*.distcp"))) == 4
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    assert main(["checkpoint", "reshard", str(tmp_path), str(tmp_path / "more")]) == 4
    assert "manifest" in capsys.readouterr().err
