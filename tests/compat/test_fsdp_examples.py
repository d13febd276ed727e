"""TransformerEngine's two documented ways to shard a model run on CPU ranks, with Ottava in its place."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What TransformerEngine's example of FSDP and its tests of FSDP2 use of it.
NAMES = [
    *("Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"),
    *("autocast", "checkpoint", "quantized_model_init", "fp8_model_init", "QuantizedTensor", "optimizers.FusedAdam"),
    *(f"distributed.{n}" for n in ("CudaRNGStatesTracker", "checkpoint", "prepare_te_modules_for_fsdp")),
    *(f"fp8.check_{n}_support" for n in ("fp8", "fp8_block_scaling", "mxfp8", "nvfp4")),
    *("tensor.NVFP4Tensor", "quantized_tensor.QuantizedTensor", "module.base.TransformerEngineBaseModule"),
]


def run(example: str, *options: str, cwd: Path, ranks: int = 2) -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(port),
    ]
    command += ["-m", "ottava.compat", str(ROOT / "examples" / example), *options]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not list(cwd.iterdir())
    return done.stdout


def test_every_name_of_transformer_engines_fsdp_programs_is_there() -> None:
    from ottava import compat

    with compat.installed():
        import transformer_engine.pytorch as te

        for name in NAMES:
            found = te
            for part in name.split("."):
                found = getattr(found, part)
            assert found is not None, name


@pytest.mark.parametrize(
    "example, options",
    [
        pytest.param("te_fsdp.py", ("--recipe", "delayed"), marks=pytest.mark.extra),
        ("te_fsdp.py", ("--recipe", "block", "--defer-init", "--recompute")),
        pytest.param("te_fully_shard.py", ("--recipe", "current"), marks=pytest.mark.extra),
        ("te_fully_shard.py", ("--recipe", "block", "--fp8-init")),
    ],
    ids=str,
)
def test_a_sharded_model_learns(tmp_path: Path, example: str, options: tuple[str, ...]) -> None:
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run(example, *options, cwd=tmp_path))]
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0]
