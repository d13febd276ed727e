"""`ottava explain` tells what events.jsonl has; FP8 health and exports know numbers that are not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import ottava
from ottava import recipe as recipes
from ottava.checkpoint import CheckpointError, Checkpoints, model_state
from ottava.cli.main import main
from ottava.guard.finding import Finding
from ottava.models import Llama, LlamaConfig
from ottava.models.hf_files import described, export_hf
from ottava.nn.product import watching
from ottava.train.events import Events, read_events
from ottava.train.fp8_health import FIGURES, figures


def test_the_story_of_a_run_has_tensor_rank_step_and_advice(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "loss": 2.5}\n{"step": 8, "loss": 2.25}\n')
    assert main(["explain", str(tmp_path)]) == 0
    assert "has bad numbers on record" in capsys.readouterr().out
    events = Events(tmp_path, writes=True)
    hidden = Finding("non-finite", "layers.1.layernorm_mlp", "fc2.input", 1, 7, "forward", "3 numbers")
    events.tell(7, "skipped", f"Step 7 has a non-finite loss: {hidden.text}.", [hidden], loss=math.nan)
    flipped = Finding("memory", "layers.0.self_attention.proj", "weight (weight)", 3, 9, detail="persistent")
    events.tell(9, "found", f"{flipped.text}.", [flipped, flipped])
    events.tell(9, "rolled back", "Step 9: back to the checkpoint of step 8.", to=8)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 10, "what": "fo')  # killed here
    assert main(["explain", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for part in (
        "Before it: step 6 had loss 2.5000.",
        "fc2.input of layers.1.layernorm_mlp is not finite (3 numbers) in the forward pass of rank 1, step 7",
        "The step changed no weight",
        "weight (weight) of layers.0.self_attention.proj changed in memory in rank 3, step 9: persistent",
        "What to do: Memory that nobody wrote has changed",
        "1 steps skipped, 1 times back to a checkpoint; ranks that were named: 1, 3; the run is at step 8.",
    ):
        assert part in told, told
    assert main(["explain", str(tmp_path), "--step", "9"]) == 0 and "Step 7" not in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "nothing")]) == 2
    assert [event["step"] for event in read_events(tmp_path)] == [7, 9, 9]
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["loss"] is None


def test_an_event_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    Events(tmp_path, writes=True).tell(1, "found", "Something.")
    Events(tmp_path / "other", writes=False).tell(1, "found", "Something.")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "recipe", [recipes.Float8CurrentScaling(), recipes.Float8BlockScaling()], ids=["tensor", "block"]
)
def test_fp8_health_shows_what_is_not_finite(recipe):
    linear = ottava.Linear(128, 128, bias=False, device="cpu")
    found: list[dict[str, float]] = []

    def look(a, b):
        found.extend(dict(zip(FIGURES, figures(operand).tolist())) for operand in (a, b))

    with torch.no_grad():
        linear.weight[5, 6] = math.nan
    with watching(look), ottava.autocast(recipe=recipe):
        linear(torch.randn(16, 128))
    assert [figure["non_finite"] for figure in found] == [0.0, 1.0]


def test_a_model_that_is_not_finite_is_not_exported(tmp_path):
    shape = LlamaConfig(vocab_size=64, hidden_size=32, ffn_hidden_size=64, layers=1, heads=2, kv_heads=2, max_length=16)
    model = Llama(shape, device="cpu")
    with torch.no_grad():
        model.layers[0].layernorm_mlp.fc2_weight[1, 1] = math.inf
    Checkpoints(tmp_path / "run", config=described(shape)).save(1, model_state(model))
    with pytest.raises(CheckpointError, match=r"fc2_weight has 1 numbers that are not finite"):
        export_hf(tmp_path / "run" / "step-00000001", tmp_path / "out")
    assert [p.name for p in Path(tmp_path).iterdir()] == ["run"]
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 4
