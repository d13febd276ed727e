"""Checkpoints of what lies on a GPU: copied behind the next pass, bit for bit; a run that goes on from one is the same run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ottava.checkpoint import Checkpoints
from ottava.train.metrics import read_metrics
from train.runs import ROOT, token_file


@pytest.mark.parametrize("until", [True, False], ids=["behind the next pass", "at once"])
def test_a_save_has_the_values_of_its_moment(tmp_path: Path, until: bool) -> None:
    weight = nn.Parameter(torch.randn(1 << 27, device="cuda"))  # 512 MiB: its copy takes a while
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in (1, 2):  # the second uses the first's pinned memory
        wanted = weight.detach().clone()
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save_async(step, {"weight": weight.detach()}, until=optimizer if until else None)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            checkpoints.wait()
            found = {"weight": torch.empty_like(wanted)}
            checkpoints.load(found, which=step)
        assert torch.equal(found["weight"], wanted) and not torch.equal(weight, wanted)


@pytest.mark.parametrize("recipe", ["none", "DelayedScaling", "Float8BlockScaling"])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, recipe: str) -> None:
    def train() -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "ottava", "train", "debug", f"--train.run={tmp_path / 'run'}"]
        command += [f"--data.files={token_file(tmp_path)}", f"--precision.recipe={recipe}", "--train.deterministic"]
        command += ["--train.steps=8", "--checkpoint.every=4", "--model.hidden-size=256", "--schedule.warmup-steps=2"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return [
            {key: line[key] for key in ("step", "loss", "grad_norm")}
            for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        ]

    whole = train()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    assert train() == whole and len(whole) == 8
