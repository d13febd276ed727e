"""What the trainer adds to a step: the loop with all metrics and guards on, against the same forward, backward and optimizer without it.

    python benchmarks/loop_overhead.py [--steps 40] [--config CONFIG] [--json results.json]

One rank on the GPU if there is one, else on the CPU. All take turns in blocks of steps, so that a machine that is busy with something
else slows all. Steps that are replayed (health.replay_every) are timed apart, and their cost is spread over the steps in between.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist

from ottava.train.arguments import parse
from ottava.train.loop import Loop
from ottava.train.optimizer import clip_gradients
from ottava.train.world import Place, World

BLOCK = 5  # steps of one loop before it is the other's turn


def bare_step(loop: Loop) -> None:
    """Data, forward, backward, clipping, optimizer: nothing is measured, looked at, agreed on or written."""
    config, model = loop.config.train, loop.model
    batch = next(loop.batches).to(loop.world.device)
    for part in batch.split(config.micro_batch):
        with model.precision():
            loss = model.module(part.tokens, part.targets, part.packed(), reduction="sum")
        (loss / batch.targets.numel()).backward()
    _, clipped = clip_gradients(model.module, loop.optimizer, loop.config.optimizer.clip)
    loop.optimizer.step(**clipped)
    loop.optimizer.zero_grad()


def whole_step(loop: Loop) -> None:
    """A step as `Loop.run` makes it."""
    loop.clock.restart()
    loop._step()


def replayed_step(loop: Loop) -> None:
    """The same, and a microbatch of it is computed twice and compared."""
    every, loop.guard._every = loop.guard._every, 1
    whole_step(loop)
    loop.guard._every = every


STEPS = {"bare": bare_step, "loop": whole_step, "replayed": replayed_step}


def measure(loop: Loop, steps: int, device: torch.device) -> dict[str, float]:
    """Median over the blocks of seconds a step, of each of `STEPS`. Inside of a block nobody waits for the GPU who would not anyway."""
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    for block in range(-1, steps // BLOCK):  # the first warms up
        for name, step in STEPS.items():
            start = time.perf_counter()
            for _ in range(BLOCK):
                step(loop)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if block >= 0:
                seconds[name].append((time.perf_counter() - start) / BLOCK)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description="Overhead of the training loop.")
    parser.add_argument("--steps", type=int, default=40, help="steps of each loop (default: 40)")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--config", nargs="*", default=[], help="of `ottava train` (default: its own)")
    options = parser.parse_args()
    config, _ = parse(options.config)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as resources:
        train = replace(config.train, run=folder, steps=10**6, evaluate_every=0, sample_tokens=0)
        size = min(train.global_batch, 64)
        train = replace(
            train, global_batch=size, micro_batch=size
        )  # one part: the bare loop keeps nothing between parts
        config = replace(
            config,
            train=train,
            checkpoint=replace(config.checkpoint, every=0),
            metrics=replace(config.metrics, tensorboard=True, prometheus_port=0, console_every=10**6),
        )
        world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=600.0))
        loop = Loop(config, world, resources)
        found = measure(loop, options.steps, world.device)
    every = config.health.replay_every
    replays = (found["replayed"] - found["loop"]) / every if every else 0.0  # seconds a step
    overhead = (found["loop"] + replays) / found["bare"] - 1
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(
        f"{device}: a bare step {found['bare'] * 1e3:.1f} ms, with the loop {found['loop'] * 1e3:.1f} ms, with a replay "
        f"{found['replayed'] * 1e3:.1f} ms, one in {every}: {overhead:+.2%}"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            command = " ".join(["python", "benchmarks/loop_overhead.py", *sys.argv[1:]])
            about = {"command": command, "device": device, "torch": torch.__version__}
            file.write(json.dumps({**about, **found, "replay_every": every, "overhead": overhead}, indent=2) + "\n")


if __name__ == "__main__":
    main()
