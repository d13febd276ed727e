"""A rank of a real run dies, and the others go on: under torchrun, on fewer ranks, and until it is too often."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ottava.checkpoint import Loaded, NoUsableCheckpoint
from ottava.train import run_folder
from ottava.train.config import Config
from ottava.train.loop import Loop
from ottava.train.restarts import read_restarts
from train.runs import lines, tiny
from train.test_launch import by_step, end, ranks_of, start, wait_for_step

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the ranks' processes in /proc")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def job(folder: Path, name: str, ranks: int = 2, clip: float = 1.0, **health: Any) -> Config:
    return tiny(
        folder,
        name,
        optimizer={"clip": clip},
        train={"steps": 30, "evaluate_every": 0},
        precision={"recipe": "none"},
        metrics={"fp8_every": 0},
        checkpoint={"every": 6, "background": True},
        parallel={"ranks": ranks},
        health={"watchdog_s": 100.0, **health},
    )


@pytest.mark.slow
def test_torchrun_never_learns_that_a_rank_died(tmp_path):
    config = job(tmp_path, "run", copies=1.0)
    launcher = start(config, *TORCHRUN)
    wait_for_step(config, 8, launcher)
    survivor, victim = ranks_of(launcher)
    (config.run_folder / "config.toml").unlink()  # as if the leading rank had died before it wrote it
    os.kill(victim, signal.SIGKILL)
    wait_for_step(config, 20, launcher)
    assert "seed = 1234" in (config.run_folder / "config.toml").read_text()
    assert ranks_of(launcher)[0] == survivor and ranks_of(launcher)[1] != victim
    code, output = end(launcher)
    assert code == 0 and output.count("rank 1 has ended (SIGKILL): the others go on.") == 1, output
    assert "Going on from the copies in memory" in output and "Resuming from" not in output, output
    found = lines(config)
    assert [line["step"] for line in found] == list(range(1, 31)) and found[-1]["attempt"] == 1
    (restart,) = read_restarts(config.run_folder)
    assert restart.in_place and restart.cause == "rank 1 ended (SIGKILL)" and restart.lost_s > 0
    whole = replace(config, train=replace(config.train, run=str(tmp_path / "whole")))
    code, output = end(start(whole))
    assert code == 0 and by_step(lines(whole)) == by_step(found), output


@pytest.mark.parametrize(
    "copied, saved, come_to, wanted, told",
    [
        (7, [6, 4], 8, 7, "Going on from the copies in memory: 7 of 30"),
        (3, [6, 4], 8, 6, "Resuming from 6: 6 of 30"),
        (3, [6, 4], 5, 4, "Resuming from 4: 4 of 30"),  # the run went back behind the one of step 6
        (3, [-6], 8, 3, "Going on from the copies in memory: 3 of 30"),  # damaged
        (None, [6], 8, 6, "Resuming from 6: 6 of 30"),
    ],
)
def test_the_newest_state_counts_copies_or_checkpoint(copied, saved, come_to, wanted, told, monkeypatch):
    monkeypatch.setattr(run_folder, "last_step", lambda folder: come_to)
    said: list[str] = []
    manifest: Any = None

    def load(below: int | None = None, above: int = -1) -> Loaded | None:
        found = [step for step in saved if abs(step) > above and (below is None or abs(step) < below)]
        if found and found[0] < 0:
            raise NoUsableCheckpoint("damaged")
        return Loaded(found[0], str(found[0]), manifest, {}, (), ()) if found else None

    loop: Any = object.__new__(Loop)
    loop.config = job(Path(), "run")
    loop.world = SimpleNamespace(leads=True, share=lambda value: value)
    loop.model, loop.optimizer, loop.say = SimpleNamespace(module=None), None, said.append
    loop.state = SimpleNamespace(load=load)
    forgotten: list[int] = []
    loop.copies = SimpleNamespace(
        newest=lambda world: copied, restore=lambda *_: copied, forget=lambda: forgotten.append(1)
    )
    assert loop._continue() == wanted and said[-1].startswith(told)
    assert bool(forgotten) == (wanted != copied)


@pytest.mark.slow
def test_sigterm_while_ranks_meet_again_saves_what_the_copies_hold(tmp_path):
    config = job(tmp_path, "run", copies=1.0)
    launcher = start(config)
    wait_for_step(config, 10, launcher)
    victim = ranks_of(launcher)[1]
    os.kill(victim, signal.SIGKILL)
    while len(ranks_of(launcher)) < 2 or ranks_of(launcher)[1] == victim:  # until it is replaced
        time.sleep(0.01)
    os.kill(launcher.pid, signal.SIGTERM)
    code, output = end(launcher)
    assert code == 143, output
    steps = [line["step"] for line in lines(config)]
    assert (config.run_folder / "checkpoints" / f"step-{steps[-1]:08d}").is_dir(), output
    assert steps == list(range(1, len(steps) + 1)) and steps[-1] >= 9


@pytest.mark.extra
def test_on_fewer_ranks_with_the_same_bits(tmp_path):
    """Sums of gradients have the same order on 2 and 4 ranks of a CPU. The norm is taken shard by shard, and so is right to a rounding:
    it must not enter the weights here."""
    config, whole = job(tmp_path, "run", 4, clip=0.0, after_death="shrink"), job(tmp_path, "whole", 4, clip=0.0)
    assert end(start(whole))[0] == 0
    launcher = start(config)
    wait_for_step(config, 8, launcher)
    os.kill(ranks_of(launcher)[0], signal.SIGKILL)
    wait_for_step(config, 20, launcher)
    assert len(ranks_of(launcher)) == 2  # 3 cannot share 8 sequences in microbatches of 2
    code, output = end(launcher)
    assert code == 0 and "Resuming from" in output, output  # copies are of 4 ranks
    found, wanted = by_step(lines(config)), by_step(lines(whole))
    norms = [{step: values[1] for step, values in each.items()} for each in (found, wanted)]
    rest = [{step: values[:1] + values[2:] for step, values in each.items()} for each in (found, wanted)]
    assert rest[0] == rest[1] and norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.extra
def test_a_rank_that_always_dies_ends_the_run_with_its_exit_code(tmp_path):
    config = job(tmp_path, "run", restarts=2)
    config = replace(config, train=replace(config.train, steps=100_000))
    launcher = start(config)
    wait_for_step(config, 3, launcher)
    seen: set[int] = set()
    while launcher.poll() is None:
        for rank in ranks_of(launcher)[1:]:
            if rank not in seen:
                seen.add(rank)
                os.kill(rank, signal.SIGKILL)
    code, output = end(launcher)
    assert code == 137 and "health.restarts (2) is used up" in output, output
    assert len(seen) == 3
