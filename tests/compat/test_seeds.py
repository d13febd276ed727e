"""A script that seeds torch again and builds the same model on the meta device again gets the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
import transformer_engine.pytorch as te

def build():
    layers = [te.Linear(32, 32, device="meta") for _ in range(2)]
    for layer in layers:
        layer.reset_parameters()
    return [layer.weight.detach() for layer in layers]

build()
models = []
for seed in (11, 11, 12):
    torch.manual_seed(seed)
    models.append(build())
more = build()
same = all(torch.equal(a, b) for a, b in zip(models[0], models[1]))
others = [models[0], models[2], more]
weights = [w for model in others for w in model]
different = not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
print(same, different)
import torch._dynamo
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
"""


def test_the_same_seed_builds_the_same_model_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ottava.compat", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]
