"""Two ranks and one train the same model: how far apart are their UPDATES. What the ranks of `gpu/test_ranks.py` run, on any device.

Weights move by a percent or less in a few steps: a bar on weights would pass a model that never moves. So what is compared is what
training added,

    error = |(end - start) of the ranks - (end - start) of one process| / |(end - start) of one process|

which is 1 for a model that stays where it was, whatever the learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.parity import RECIPES, SEED, build, run_steps, run_steps_alone
from ottava import torch_private
from ottava.distributed import ParallelPlan, meshes_of, parallelize
from ottava.distributed.topology import Machine
from ottava.distributed.whole import modules_of
from ottava.nn.initialize import materialize_

PLANS: dict[str, dict[str, Any]] = {
    "fsdp2": {"dp_shard": 2},
    "tp": {"dp_shard": 1, "tp": 2},
    "tp with spread tokens": {"dp_shard": 1, "tp": 2, "sequence_parallel": True},
}
COMPUTE = torch.bfloat16
"""What weights are gathered and multiplied in; the weights that are updated are float32, on many ranks and on one."""

UNQUANTIZED_BAR = 2e-2
"""Of an update without FP8, in bf16: 0.007 was seen on CPU ranks."""
MOVED = 0.9
"""A parameter that stays where it was is 1 off."""

Pieces = list[tuple[str, tuple[slice, ...], Tensor]]
"""(name, where in the whole parameter, values) of what a rank has."""


@dataclass
class Trained:
    """A run: the losses, and the parameters before and after, whole (by name) or in a rank's pieces."""

    losses: list[float]
    start: Any
    end: Any


def one_process(width: int, recipe: str, dp: int, batch: int, device: str) -> Trained:
    """All `dp` parts of the data in one process: float32 weights, multiplied in `COMPUTE`, as FSDP2 does it."""
    model = materialize_(build("llama", width), SEED, device)
    start = {n: p.detach().float().cpu().clone() for n, p in model.named_parameters()}
    losses = run_steps_alone(model, RECIPES[recipe], dp, batch, device, COMPUTE)
    return Trained(losses, start, {n: p.detach().float().cpu() for n, p in model.named_parameters()})


def on_ranks(plan: str, width: int, recipe: str, batch: int, device: str, lr: float = 1e-3) -> Trained:
    """The same on the ranks of a plan; in every rank. lr=0 is the control, which does not update."""
    model = parallelize(
        build("llama", width),
        ParallelPlan(param_dtype=COMPUTE, **PLANS[plan]),
        seed=SEED,
        machine=Machine(gpus_per_node=2),
        device_type=device,
    )
    start = held(model)
    losses = torch.tensor(run_steps(model, RECIPES[recipe], meshes_of(model), batch, device, lr=lr))
    dist.all_reduce(losses)
    return Trained((losses / dist.get_world_size()).tolist(), start, held(model))


def held(model: nn.Module) -> Pieces:
    """Copies of what this rank has. Gathering would be simpler, but DTensor's gather of CUDA tensors through gloo crashes in torch 2.11."""
    found: Pieces = []
    for path, module in modules_of(model):
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}".strip(".")
            if not isinstance(parameter, DTensor):
                found.append((full_name, (slice(None),), parameter.detach().float().cpu().clone()))
                continue
            local = torch.empty(parameter.to_local().shape).copy_(parameter.to_local().detach())  # plain, on the CPU
            shape, offset = torch_private.local_box(parameter)
            found.append((full_name, tuple(slice(a, a + n) for a, n in zip(offset, shape)), local))
    return found


def update_errors(ranks: list[Trained], whole: Trained) -> dict[str, float]:
    """The error of the update of each parameter, from the pieces of all ranks, and of all of them together as "all"."""
    wrong: dict[str, float] = {}
    moved: dict[str, float] = {}
    for trained in ranks:
        for (name, at, start), (_, _, end) in zip(trained.start, trained.end, strict=True):
            expected = (whole.end[name][at] - whole.start[name][at]).double()
            difference = (end - start).double() - expected
            wrong[name] = wrong.get(name, 0.0) + float(difference.square().sum())
            moved[name] = moved.get(name, 0.0) + float(expected.square().sum())
    assert set(moved) >= set(whole.start), f"no rank has {sorted(set(whole.start) - set(moved))}"
    assert all(moved.values()), "one process did not update everything"
    wrong["all"], moved["all"] = sum(wrong.values()), sum(moved.values())
    return {name: (wrong[name] / moved[name]) ** 0.5 for name in wrong}


def bar_of(recipe: str, whole: Trained, unquantized: Trained) -> float:
    """How far apart updates may be, from one process's runs by the recipe and without one.

    The same sums in another order differ in the last bit of bf16, which moves most FP8 roundings that follow: two runs are then as far
    apart as two draws of the recipe's own rounding error, sqrt(2) of it. For Float8CurrentScaling that is 0.1 of the update, and an
    input that differs by 1e-4 has the same effect in one process. A model that does not update is 1 off, whatever the recipe.
    """
    if recipe == "none":
        return UNQUANTIZED_BAR
    wrong, moved = 0.0, 0.0
    for name, end in whole.end.items():
        expected = (unquantized.end[name] - unquantized.start[name]).double()
        wrong += float(((end - whole.start[name]).double() - expected).square().sum())
        moved += float(expected.square().sum())
    bar = 1.5 * (wrong / moved) ** 0.5
    assert bar < 0.9, f"{recipe} rounds so much ({bar / 1.5:.2g} of the update) that no bar can tell updates from none"
    return bar


def check_updates(ranks: list[Trained], whole: Trained, bar: float) -> float:
    """Raises unless the ranks' update is within `bar` of one process's, and every parameter has moved; the error."""
    errors = update_errors(ranks, whole)
    worst = max((name for name in errors if name != "all"), key=lambda name: errors[name])
    assert errors["all"] < bar, (
        f"the update is {errors['all']:.3g} off, more than {bar:.3g} (worst: {worst}, {errors[worst]:.3g})"
    )
    assert errors[worst] < MOVED, f"the update of {worst} is {errors[worst]:.3g} off, as if it had not been updated"
    return errors["all"]
