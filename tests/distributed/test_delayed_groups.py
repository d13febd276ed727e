"""Which ranks share the statistics of delayed scaling: as they are told, and all of them only where nothing is known."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ottava
from distributed.ranks import Ranks
from ottava import recipe
from ottava.distributed import ParallelPlan, ddp, parallelize
from ottava.notices import warn_once

DELAYED = recipe.DelayedScaling(amax_history_len=4)


def shared(build: Callable[..., nn.Module], steps: int = 1, group: Any = None) -> tuple[float, float, list[str]]:
    """(largest input of the first module, largest gradient of the last, what was logged) after a step in which rank r has r + 1."""
    warn_once.cache_clear()
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("ottava").addHandler(handler)
    try:
        model, mine = build(), float(dist.get_rank() + 1)
        for _ in range(steps):
            with ottava.autocast(recipe=DELAYED, amax_reduction_group=group):
                y = model(torch.full((32, 32), mine))
            y.backward(torch.full_like(y, mine))
    finally:
        logging.getLogger("ottava").removeHandler(handler)
    states = [m for m in model.modules() if isinstance(m, ottava.quant.delayed.DelayedState)]
    window = DELAYED.amax_history_len
    found = [states[0].fwd_amax_history[window - 1, 0].item(), states[-1].bwd_amax_history[window - 1, 0].item()]
    return found[0], found[1], [r.getMessage() for r in records if "DelayedScaling shares" in r.getMessage()]


def linear(**options: Any) -> ottava.Linear:
    return ottava.Linear(32, 32, device="cpu", bias=False, **options)


def pairs() -> Any:
    """The group of ranks {0, 1} or {2, 3}."""
    return [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]


def told_a_tensor_parallel_group() -> tuple[float, float, list[str]]:
    group = pairs()

    def build() -> nn.Module:
        made = linear(tp_size=2, parallel_mode="column")
        made.set_tensor_parallel_group(group)
        # Ranks 2 and 3 have another stage of a pipeline: more modules, whose statistics nobody waits for.
        return made if dist.get_rank() < 2 else nn.Sequential(made, _Halves(), copy.deepcopy(made))

    return shared(build, steps=2)


class _Halves(nn.Module):
    """What a column-parallel layer of two ranks returns, made as wide as its input again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)


def told_a_weight_mesh() -> tuple[float, float, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))

    def build() -> nn.Module:
        made = linear()
        made.set_device_mesh(weight_mesh=mesh["dp_shard"])
        return copy.deepcopy(made)  # a copy talks to the same ranks

    return shared(build)


def told_a_dimension_of_a_mesh() -> tuple[float, float, list[str]]:
    """The mesh of tp 1 x dp 2 that ranks {0, 1} or {2, 3} have for themselves."""
    meshes = [DeviceMesh("cpu", torch.tensor([ranks]), mesh_dim_names=("tp", "dp")) for ranks in ([0, 1], [2, 3])]

    def build() -> nn.Module:
        made = linear()
        made.set_device_mesh(meshes[dist.get_rank() // 2]["tp"])
        return made

    return shared(build)


def told_by_autocast() -> tuple[float, float, list[str]]:
    return shared(linear, group=pairs())


def told_nothing() -> tuple[float, float, list[str]]:
    return shared(lambda: nn.Sequential(linear(), linear()), steps=2)


def told_by_ddp() -> tuple[float, float, list[str]]:
    return shared(lambda: ddp(nn.Sequential(linear())))


def told_by_parallelize() -> tuple[float, float, list[str]]:
    def build() -> nn.Module:
        plan = ParallelPlan(dp_replicate=2, dp_shard=2, param_dtype=torch.float32)
        return parallelize(nn.Sequential(linear()), plan, recipe=DELAYED)

    return shared(build)


def pickled() -> bool:
    made = linear(tp_size=2, parallel_mode="column")
    made.set_tensor_parallel_group(pairs())
    state = made.delayed
    return bool(state.own_groups) and pickle.loads(pickle.dumps(state)).own_groups == ()


def test_statistics_are_shared_by_the_ranks_that_a_module_was_given(four_ranks: Ranks) -> None:
    for case in (told_a_tensor_parallel_group, told_a_dimension_of_a_mesh, told_by_autocast):
        results = four_ranks.run(case)
        assert [r[:2] for r in results] == [(2.0, 2.0)] * 2 + [(4.0, 4.0)] * 2, case
        said = [message for r in results for message in r[2]]
        if case is told_a_tensor_parallel_group:  # which does not say whether the other ranks run it too
            assert len(said) == 1 and "over the 2 tensor-parallel ranks of a module alone" in said[0] and results[0][2]
        else:
            assert not said, case
    # Replicas run the module too: the whole mesh that weight_mesh is a dimension of.
    assert [r[:2] for r in four_ranks.run(told_a_weight_mesh)] == [(4.0, 4.0)] * 4
    assert all(four_ranks.run(pickled))  # without the handles of this process


def test_statistics_of_a_wrapped_model_are_shared_by_all_that_run_it(four_ranks: Ranks) -> None:
    for case in (told_by_ddp, told_by_parallelize):
        results = four_ranks.run(case)
        assert [r[:2] for r in results] == [(4.0, 4.0)] * 4 and not any(r[2] for r in results), (case, results)


def test_all_ranks_are_a_guess_that_is_said_once_by_the_first(four_ranks: Ranks) -> None:
    results = four_ranks.run(told_nothing)
    assert [r[:2] for r in results] == [(4.0, 4.0)] * 4
    (message,) = results[0][2]
    assert "over all 4 ranks, a guess" in message and "amax_reduction_group" in message
    assert not any(r[2] for r in results[1:])


def test_a_pipeline_that_tries_its_stages_records_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch finds out the shapes between stages by a forward and a backward over memory that nobody has written to."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, stage

    empty = stage._make_tensor_from_meta
    monkeypatch.setattr(stage, "_make_tensor_from_meta", lambda *args: empty(*args).fill_(1e4))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        asked, x = recipe.DelayedScaling(), torch.randn(32, 64)
        layers, alone = ([ottava.Linear(64, 64, device="cpu") for _ in range(2)] for _ in range(2))
        for layer, other in zip(layers, alone, strict=True):
            other.load_state_dict(layer.state_dict())
        stages: list[Any] = [PipelineStage(layer, i, 2, torch.device("cpu")) for i, layer in enumerate(layers)]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=lambda y, target: y.square().mean())
        with ottava.autocast(recipe=asked):
            schedule.step(x, target=x)
        with ottava.autocast(recipe=asked):
            losses = [alone[1](alone[0](part)).square().mean() for part in x.chunk(2)]
        for loss in losses:
            loss.backward()  # torch divides by the number of microbatches when all are there
        for layer, other in zip(layers, alone, strict=True):
            for name, wanted in other.delayed.named_buffers():
                assert torch.equal(dict(layer.delayed.named_buffers())[name], wanted), name
            assert torch.equal(layer.weight.grad, other.weight.grad / 2)  # type: ignore[arg-type, operator]
    finally:
        dist.destroy_process_group()
