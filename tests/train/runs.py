"""Short real runs for tests: a tiny model on a file of this repository's own text, in ranks that stay warm between runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ottava.guard.state import StateWatch
from ottava.train import loop, state
from ottava.train.config import (
    CheckpointSection,
    Config,
    DataSection,
    HealthSection,
    MetricsSection,
    ModelSection,
    ParallelSection,
    PrecisionSection,
    ScheduleSection,
    TrainSection,
)
from ottava.train.copies import Copy
from ottava.train.launch import run_rank
from ottava.train.tokenize import tokenize
from ottava.train.world import Place

ROOT = Path(__file__).parents[2]


def token_file(folder: Path) -> Path:
    """A few hundred kB of text, as bytes."""
    path = folder / "text.tokens"
    if not path.exists():  # ranks may ask at once
        tokenize(sorted((ROOT / "src" / "ottava" / "train").glob("*.py")), path, overwrite=True)
    return path


def tiny(folder: Path, name: str = "run", **sections: Any) -> Config:
    """10 steps of a model with 2 layers, a checkpoint every 4. sections: what is changed, such as train={"steps": 5}."""
    base = Config(
        model=ModelSection(vocab_size=258, hidden_size=32, ffn_hidden_size=64, layers=2, heads=2),
        data=DataSection(files=(str(token_file(folder)),), length=32, validation_fraction=0.02),
        schedule=ScheduleSection(warmup_steps=2),
        precision=PrecisionSection(),
        parallel=ParallelSection(),
        train=TrainSection(
            run=str(folder / name),
            steps=10,
            global_batch=8,
            micro_batch=2,
            evaluate_every=5,
            evaluate_batches=2,
            sample_tokens=0,
        ),
        checkpoint=CheckpointSection(every=4, background=False),
        metrics=MetricsSection(fp8_every=5),
        health=HealthSection(watchdog_s=100.0),
    )
    return replace(base, **{key: replace(getattr(base, key), **values) for key, values in sections.items()})


class Killed(BaseException):
    """Stands for a process that ends in the middle of a step."""


def train(
    config: Config,
    port: int,
    die_at: int | None = None,
    nan_at: tuple[int, ...] = (),
    faults: tuple[tuple[int, str], ...] = (),
) -> tuple[int, str]:
    """In a rank of `Ranks`: the run, (exit code, message). Digests of the samples it trains on go to RUN/seen-RANK.txt.

    die_at: the process "ends" after the backward pass of this step, from 0. nan_at: steps whose loss is NaN, the first time.
    faults: (step, what happens after its backward pass, the first time), see `fault`.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that leaves while another still connects would break its connection
    dist.destroy_process_group()
    plain, left, waiting = loop.Loop._backward, set(nan_at), list(faults)

    def watched(self: loop.Loop, step: int) -> loop.Step:
        found = plain(self, step)
        if step == die_at:
            raise Killed
        for when, kind in [each for each in waiting if each[0] == step]:
            waiting.remove((when, kind))
            fault(self, kind)
        if step in left:
            left.discard(step)
            return replace(found, known=(math.nan, found.grad_norm))
        return found

    loop.Loop._backward = watched  # type: ignore[method-assign]
    sight = state.non_finite, loop.NumberGuard.holds, StateWatch.glance, StateWatch.findings
    if (-1, "blind") in faults:  # from the beginning
        _blind()
    count = loop.Loop._count

    def noted(self: loop.Loop, batch: loop.Batch) -> float:
        for row in batch.tokens:
            seen.write(f"{self.done} {hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12]}\n")
        seen.flush()
        return count(self, batch)

    loop.Loop._count = noted  # type: ignore[method-assign]
    config.run_folder.mkdir(parents=True, exist_ok=True)
    seen = (config.run_folder / f"seen-{rank}.txt").open("a")
    try:
        return run_rank(config, Place(rank, size, rank, size, "localhost", port))
    except Killed:
        return -9, ""
    finally:
        seen.close()
        loop.Loop._backward, loop.Loop._count = plain, count  # type: ignore[method-assign]
        state.non_finite, loop.NumberGuard.holds, StateWatch.glance, StateWatch.findings = sight  # type: ignore[method-assign]


def fault(running: loop.Loop, kind: str) -> None:
    """What can happen to a run. Numbers change in the last rank; disks and signals are everybody's."""
    if kind in ("inf", "nan") and dist.get_rank() == dist.get_world_size() - 1:
        _, parameter = list(running.model.module.named_parameters())[-1]
        with torch.no_grad():
            values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            values.view(-1)[0] = float(kind)
    elif kind == "copied":
        running.copies.own.append(Copy(running.done, b"{}", 0, torch.zeros(0, dtype=torch.uint8)))
    elif kind == "no copies":
        assert not running.copies.own and running.copies.due(running.done), running.copies.own
    elif kind == "blind":
        _blind()
    elif kind == "signal":
        running.stop.number = signal.SIGTERM
    elif kind.startswith("full disk"):
        storage, times = running.state.checkpoints.storage, [int(kind.split()[-1])]
        begin = storage.begin

        def refuse(step: int) -> Any:
            if times[0] > 0:
                times[0] -= 1
                raise OSError(28, "No space left on device")
            return begin(step)

        storage.begin = refuse  # type: ignore[method-assign]
    elif kind == "cut data" and dist.get_rank() == 0:
        os.truncate(running.data.sources[0].file.path, 5000)
    elif kind == "overwrite data" and dist.get_rank() == 0:
        with running.data.sources[0].file.path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\1\0" * 4096)


def _blind() -> None:
    """As a release that looks at no numbers."""
    state.non_finite = lambda _: []  # type: ignore[assignment]
    loop.NumberGuard.holds = lambda self, done: []  # type: ignore[method-assign]
    StateWatch.glance = lambda self, device: torch.zeros((), dtype=torch.float64)  # type: ignore[method-assign]
    StateWatch.findings = lambda self: []  # type: ignore[method-assign]


def lines(config: Config) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]


def samples(config: Config, step: int) -> set[str]:
    """Digests of the samples that step number `step` (from 0) was trained on, over all ranks."""
    words = [line.split() for path in config.run_folder.glob("seen-*.txt") for line in path.read_text().splitlines()]
    return {digest for number, digest in words if int(number) == step}
