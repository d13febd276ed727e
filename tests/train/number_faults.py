"""Runs whose numbers are changed on purpose: which bit, of what, in which rank, at which step."""

from __future__ import annotations

import json
import math
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.chaos.numbers import at_gradient, at_output, flip_bit, memory_of, poison
from ottava.checkpoint.placement import modules_of
from ottava.quant.delayed import DelayedState
from ottava.train import loop
from ottava.train.config import Config
from ottava.train.launch import run_rank
from ottava.train.optimizer import named
from ottava.train.world import Place


@dataclass(frozen=True)
class Fault:
    """What happens before, or in, the passes of `step` (from 0), once."""

    step: int
    rank: int
    place: str
    """weight, exp_avg, exp_avg_sq: state, changed before the step. output, gradient: of the module `name`. scale: of delayed scaling."""
    name: str = ""
    """A parameter or a module; empty: one that `seed` chooses."""
    value: float | None = None
    """What is written. None: a bit is flipped, such that the number stays finite."""
    call: int = 1
    """Which of the module's forward passes of that step; 0: all of them, also those that run again."""
    seed: int = 0


def flip_somewhere(tensor: Tensor, seed: int) -> None:
    """A bit whose flip leaves a finite number."""
    draw = random.Random(seed)
    size = 8 * memory_of(tensor).element_size()
    for _ in range(1000):
        index, bit = draw.randrange(memory_of(tensor).numel()), draw.randrange(size)
        _, after = flip_bit(tensor, index, bit)
        if math.isfinite(after):
            return
        flip_bit(tensor, index, bit)
    raise AssertionError("no bit could be flipped")


def _damage(fault: Fault, tensor: Tensor) -> None:
    if fault.value is None:
        flip_somewhere(tensor, fault.seed)
    else:
        poison(tensor, fault.value, fault.seed % memory_of(tensor).numel())


def _damage_state(running: loop.Loop, fault: Fault) -> None:
    if fault.place == "scale":
        states = {n: m for n, m in modules_of(running.model.module) if isinstance(m, DelayedState)}
        _damage(fault, states[f"{fault.name}.delayed"].fwd_scale)
        return
    parameters = {n: p for n, p in named(running.model.module) if memory_of(p).numel()}
    name = fault.name or random.Random(fault.seed).choice(sorted(parameters))
    parameter = parameters[name]
    _damage(fault, parameter if fault.place == "weight" else running.optimizer.state[parameter][fault.place])


def _damage_passes(running: loop.Loop, fault: Fault, stack: ExitStack) -> None:
    names = [
        n for n, m in modules_of(running.model.module) if n and not isinstance(m, torch.nn.ModuleList | DelayedState)
    ]
    called = [n for n in names if "layers." in n and n.split(".")[-1] in ("layernorm_qkv", "proj", "layernorm_mlp")]
    name = fault.name or random.Random(fault.seed).choice([*called, "norm", "layers.0", "layers.1"])
    hook = at_output if fault.place == "output" else at_gradient
    counted = [0]

    def once(tensor: Tensor) -> None:
        counted[0] += 1
        if fault.call in (0, counted[0]):
            _damage(fault, tensor)

    module: Any = running.model.module
    stack.enter_context(hook(getattr(module, "module", module), name, once))


def train_with(config: Config, port: int, faults: tuple[Fault, ...], forward_alone: bool = False) -> tuple[int, str]:
    """In a rank of `Ranks`: (exit code, message). forward_alone: replays are those of a GPU, whose gradients are not compared."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    plain, waiting, stack = loop.Loop._backward, list(faults), ExitStack()

    def damaged(self: loop.Loop, step: int) -> loop.Step:
        stack.close()  # a fault of the step before stays while that is run again
        if forward_alone:
            self.guard._backward, self.guard._forward_alone = False, True
        for fault in [fault for fault in waiting if fault.step == step]:
            waiting.remove(fault)
            if fault.rank == rank and fault.place in ("output", "gradient"):
                _damage_passes(self, fault, stack)
            elif fault.rank == rank:
                _damage_state(self, fault)
        return plain(self, step)

    loop.Loop._backward = damaged  # type: ignore[method-assign]
    try:
        return run_rank(config, Place(rank, size, rank, size, "localhost", port))
    finally:
        stack.close()
        loop.Loop._backward = plain  # type: ignore[method-assign]


def events(config: Config) -> list[dict[str, Any]]:
    """events.jsonl."""
    path = Path(config.run_folder) / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def blamed(config: Config) -> dict[int, dict[str, Any]]:
    """The first finding of each step that has one, by step from 0. Attributions that came later win."""
    found = {}
    for event in events(config):
        if event["findings"] and (event["what"] == "attributed" or event["step"] - 1 not in found):
            found[event["step"] - 1] = event["findings"][0]
    return found
