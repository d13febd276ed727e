"""What the trainer adds to a step: the loop with all metrics and guards on, against the same forward, backward and optimizer without it.

    python benchmarks/loop_overhead.py [--steps 200] [--config CONFIG] [--json results.json] [--kernels]

One rank on the GPU if there is one, else on the CPU. Both take turns in blocks of steps (bare, loop, loop, bare), so that a machine that
is busy with something else, or hot, slows both; the median over such rounds is told. Steps that are replayed (health.replay_every) are
timed apart, and their cost is spread over the steps in between.
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

BLOCK = 20
"""Steps of one loop before it is the other's turn. After a turn the GPU is idle and waits for the host's first launches, which training
never does: the longer a block, the less of that is counted."""
REPLAYS = 5  # replayed steps of a round


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
TURNS = ("bare", "loop", "loop", "bare")
"""Blocks of one round: what is hot or busy after the one before slows both alike."""


def block(loop: Loop, name: str, steps: int) -> float:
    """Seconds a step over `steps` steps. Inside nobody waits for the GPU who would not anyway."""
    start = time.perf_counter()
    for _ in range(steps):
        STEPS[name](loop)
    if loop.world.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def measure(loop: Loop, steps: int) -> dict[str, float]:
    """Medians: seconds a step of each of `STEPS`, and by how much a round's steps of the loop take longer than its bare ones."""
    rounds: list[dict[str, float]] = []
    for number in range(-1, max(steps // (2 * BLOCK), 1)):  # the first warms up
        seconds: dict[str, list[float]] = {name: [] for name in STEPS}
        for name in TURNS:
            seconds[name].append(block(loop, name, BLOCK))
        seconds["replayed"].append(block(loop, "replayed", REPLAYS))
        if number >= 0:
            rounds.append({name: statistics.mean(values) for name, values in seconds.items()})
    found = {name: statistics.median(r[name] for r in rounds) for name in STEPS}
    ratios = [r["loop"] / r["bare"] - 1 for r in rounds]
    return found | {
        "every_step": statistics.median(ratios),
        "rounds": len(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def show_kernels(loop: Loop, steps: int = 3) -> None:
    """What the GPU does in a step of each kind: busy milliseconds, launches, and the kernels of the loop that a bare step has not."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name in STEPS:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(steps):
                STEPS[name](loop)
            torch.cuda.synchronize()
        found[name] = {
            e.key: (e.self_device_time_total / steps * 1e-3, e.count / steps) for e in recorded.key_averages()
        }
        busy, launches = (sum(values) for values in zip(*found[name].values()))
        print(f"{name}: the GPU is busy for {busy:.2f} ms a step with {launches:.0f} kernels and copies")
    for name in ("loop", "replayed"):
        more = {k: tuple(a - b for a, b in zip(v, found["bare"].get(k, (0.0, 0.0)))) for k, v in found[name].items()}
        print(f"{name}, beyond a bare step (ms, launches):")
        for key, (milliseconds, launches) in sorted(more.items(), key=lambda item: -item[1][0])[:25]:
            print(f"    {milliseconds:8.3f} {launches:7.1f}  {key[:110]}")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description="Overhead of the training loop.")
    parser.add_argument("--steps", type=int, default=200, help="steps of each loop (default: 200)")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--kernels", action="store_true", help="also list what a GPU does beyond a bare step")
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
        found = measure(loop, options.steps)
        if options.kernels and world.device.type == "cuda":
            show_kernels(loop)
    every = config.health.replay_every
    replays = (found["replayed"] - found["loop"]) / every if every else 0.0  # seconds a step
    overhead = found["every_step"] + replays / found["bare"]
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
