"""Two ranks on one GPU (process group gloo, which allows that) train as one rank does; TransformerEngine's FSDP programs run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distributed.parity import RECIPES
from distributed.update_parity import PLANS, Trained, bar_of, check_updates, on_ranks, one_process, update_errors

ROOT = Path(__file__).resolve().parents[2]
WIDTH, BATCH = 512, 8
CONTROL = "a control that does not update"


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {(plan, name): on_ranks(plan, WIDTH, name, BATCH, "cuda") for plan in PLANS for name in RECIPES}
    results |= {(plan, CONTROL): on_ranks(plan, WIDTH, "none", BATCH, "cuda", lr=0.0) for plan in PLANS}
    torch.save(results, f"{folder}/results-{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, str], list[Trained]]:
    """(plan, recipe) -> the runs of both ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(folder,), nprocs=2)
        files = [torch.load(f"{folder}/results-{rank}", weights_only=False) for rank in range(2)]  # our own files
    return {key: [results[key] for results in files] for key in files[0]}


@functools.cache
def one_rank(name: str, dp: int) -> Trained:
    return one_process(WIDTH, name, dp, BATCH, "cuda")


def test_two_ranks_update_as_one(trained: dict[tuple[str, str], list[Trained]]) -> None:
    for (plan, name), runs in trained.items():
        if name == CONTROL:
            continue
        dp = 2 if plan == "fsdp2" else 1
        whole = one_rank(name, dp)
        bar = bar_of(name, whole, one_rank("none", dp))
        assert runs[0].losses == pytest.approx(whole.losses, rel=2e-2), (plan, name)
        print(f"{plan} {name}: update {update_errors(runs, whole)['all']:.1e} off, bar {bar:.1e}")
        check_updates(runs, whole, bar)


def test_a_model_that_does_not_update_fails_the_bars(trained: dict[tuple[str, str], list[Trained]]) -> None:
    for plan in PLANS:
        dp = 2 if plan == "fsdp2" else 1
        for name in RECIPES:
            whole = one_rank(name, dp)
            with pytest.raises(AssertionError, match="the update is 1 off, more than"):
                check_updates(trained[plan, CONTROL], whole, bar_of(name, whole, one_rank("none", dp)))


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
