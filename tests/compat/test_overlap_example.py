"""Programs that TransformerEngine's overlap of communication was written for, on CPU ranks, with Ottava in its place."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
# TransformerEngine's own example. It is read from a checkout of its sources, where somebody has one.
SOURCES = os.environ.get("OTTAVA_TE_SOURCE")
EXAMPLE = Path(SOURCES or "") / "examples/pytorch/comm_gemm_overlap/te_layer_with_overlap.py"
needs_sources = pytest.mark.skipif(
    SOURCES is None or not EXAMPLE.is_file(),
    reason="OTTAVA_TE_SOURCE does not name a checkout of TransformerEngine 2.x, so its overlap example cannot be read",
)


def run(script: Path, *options: str, ranks: int, cwd: Path) -> subprocess.CompletedProcess[str]:
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
    command += ["-m", "ottava.compat", str(script), *options]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done


def check_losses(printed: str) -> None:
    """Of examples/te_overlap.py: every layer learns, with overlap as without it."""
    for name in LAYERS:
        rows = [
            [float(x) for x in found.split()]
            for found in re.findall(rf"^{name} overlap (?:off|on): (.*)$", printed, re.M)
        ]
        assert len(rows) == 2, printed
        off, on = rows
        assert off[-1] < off[0], name
        assert on == pytest.approx(off, rel=2e-3), name  # sums of chunks in another order, in bfloat16


def test_all_layers_train_with_overlap_as_without(tmp_path: Path) -> None:
    check_losses(run(ROOT / "examples/te_overlap.py", "--steps", "2", ranks=2, cwd=tmp_path).stdout)


@pytest.mark.extra
@pytest.mark.parametrize("options", [("--fp8",), ()], ids=["fp8", "bf16"])
def test_two_replicas_of_two_ranks_train_with_overlap_as_without(tmp_path: Path, options: tuple[str, ...]) -> None:
    check_losses(run(ROOT / "examples/te_overlap.py", "--replicas", "2", *options, ranks=4, cwd=tmp_path).stdout)


@needs_sources
@pytest.mark.extra
@pytest.mark.parametrize("options", [(), ("--fp8",), ("--no-comm-overlap",), ("--no-comm-overlap", "--fp8")], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_transformer_engines_example_runs(tmp_path: Path, ranks: int, layer: str, options: tuple[str, ...]) -> None:
    """Only names of devices and of the backend are changed. Four ranks are two replicas, with DDP outside."""
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE.read_text().replace('"cuda', '"cpu').replace('"nccl"', '"gloo"'))
    small = ("--num-heads", "4", "--head-dim", "16", "--seq-length", "64", "--num-iters", "2")
    replicas = ("--num-replicas", "2") if ranks == 4 else ()
    done = run(script, *small, *replicas, "--layer-type", layer.lower(), *options, ranks=ranks, cwd=tmp_path)
    assert "Finished training!" in done.stdout
