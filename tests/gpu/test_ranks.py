"""Two ranks on one GPU (process group gloo, which allows that) train as one rank does; TransformerEngine's FSDP programs run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from distributed.parity import RECIPES, SEED, build, run_steps, run_steps_alone
from ottava.distributed import Meshes, ParallelPlan, meshes_of, parallelize
from ottava.distributed.topology import Machine
from ottava.distributed.whole import clean_name, layout_of, whole_pieces
from ottava.nn.initialize import materialize_

ROOT = Path(__file__).resolve().parents[2]
WIDTH, BATCH = 512, 8
PLANS: dict[str, dict[str, Any]] = {
    "fsdp2": {"dp_shard": 2},
    "tp": {"dp_shard": 1, "tp": 2},
    "tp with spread tokens": {"dp_shard": 1, "tp": 2, "sequence_parallel": True},
}


def one_rank(model: str, name: str, dp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    made = materialize_(build(model, WIDTH), SEED, "cuda").bfloat16()
    losses = run_steps_alone(made, RECIPES[name], dp, BATCH, "cuda")
    return losses, {n: p.detach().float().cpu() for n, p in made.named_parameters()}


def held(model: torch.nn.Module) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """(name, where in the whole parameter, values) of what this rank has. Gathering would be simpler, but DTensor's gather of CUDA
    tensors through gloo crashes in torch 2.11."""
    found = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = clean_name(f"{path}.{name}")
            if not isinstance(parameter, DTensor):
                found.append((full_name, (slice(None),), parameter.detach().float().cpu()))
                continue
            local = torch.empty(parameter.to_local().shape).copy_(parameter.to_local().detach())  # plain, on the CPU
            for piece in whole_pieces(parameter, *layout_of(module, name)):
                where = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape))
                found.append((full_name, where, piece.of(local)))
    return found


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for plan_name, fields in PLANS.items():
        for name in RECIPES:
            model = parallelize(
                build("llama", WIDTH),
                ParallelPlan(**fields),
                seed=SEED,
                machine=Machine(gpus_per_node=2),
                device_type="cuda",
            )
            meshes: Meshes = meshes_of(model)
            losses = torch.tensor(run_steps(model, RECIPES[name], meshes, BATCH, "cuda"))
            dist.all_reduce(losses)
            results[plan_name, name] = ((losses / 2).tolist(), held(model))
    if rank == 0:
        torch.save(results, f"{folder}/results")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, str], Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(folder,), nprocs=2)
        return torch.load(f"{folder}/results", weights_only=False)  # our own file: it has slices


def test_two_ranks_train_as_one(trained: dict[tuple[str, str], Any]) -> None:
    for (plan_name, name), (losses, parts) in trained.items():
        dp = 2 if plan_name == "fsdp2" else 1
        expected, whole = one_rank("llama", name, dp)
        assert losses == pytest.approx(expected, rel=2e-2), (plan_name, name)
        squares = [(float((part - whole[n][at]).square().sum()), float(part.square().sum())) for n, at, part in parts]
        error = (sum(e for e, _ in squares) / sum(s for _, s in squares)) ** 0.5
        print(
            f"{plan_name} {name}: losses {max(abs(a - b) for a, b in zip(losses, expected)):.1e}, weights {error:.1e}"
        )
        assert error < 2e-2, (plan_name, name, error)


@pytest.mark.parametrize(
    "command",
    [
        ["te_fsdp.py", "--recipe", "delayed"],
        ["te_fsdp.py", "--recipe", "block"],
        ["te_fully_shard.py", "--recipe", "current"],
        ["te_fully_shard.py", "--recipe", "block", "--fp8-init"],
    ],
    ids=" ".join,
)
def test_transformer_engines_fsdp_programs_run(command: list[str], tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    program += ["-m", "ottava.compat", str(ROOT / "examples" / command[0]), *command[1:]]
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stderr[-4000:]
