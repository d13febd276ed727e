"""Plain values between ranks; and a life of a model, of every strategy, in which no rank opens a pickle of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d

import ottava
from distributed.parity import RECIPES, SEED, batch_of, build
from distributed.ranks import Ranks
from ottava import exchange
from ottava.checkpoint import Checkpoints, load_model_state, model_state
from ottava.checkpoint.manifest import FileEntry
from ottava.distributed import ParallelPlan, clip_grad_norm_, meshes_of, parallelize, whole_state


def collectives() -> tuple[Any, ...]:
    rank, size = dist.get_rank(), dist.get_world_size()
    words = ["é" * (7 * rank)] * rank  # of different sizes, empty in rank 0
    entry = FileEntry(rank, "00")
    return (
        exchange.broadcast({"from": rank}),
        exchange.gather((words, entry)),
        exchange.scatter([{"to": r, "padding": "x" * 50 * r} for r in range(size)] if rank == 0 else []),
        exchange.all_gather(words),
    )


def test_collectives(four_ranks: Ranks):
    every = [("é" * (7 * rank),) * rank for rank in range(4)]
    for rank, (broadcast, gathered, scattered, all_gathered) in enumerate(four_ranks.run(collectives)):
        assert broadcast == {"from": 0} and all_gathered == every
        assert scattered == {"to": rank, "padding": "x" * 50 * rank}
        wanted = [(words, FileEntry(r, "00")) for r, words in enumerate(every)]
        assert gathered == (wanted if rank == 0 else [])


PLANS: dict[str, dict[str, Any]] = {
    "fsdp2 x tp": {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "ddp x tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "strategy": "ddp"},
    "fsdp1": {"dp_shard": 4, "strategy": "fsdp1"},
}


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a rank opens a pickle of another")


def whole_life(root: str, plan: dict[str, Any]) -> bool:
    """Trains, saves in the foreground and in the background, loads."""
    with mock.patch.object(torch.distributed.distributed_c10d, "_tensor_to_object", refused):
        model = parallelize(build("llama"), ParallelPlan(param_dtype=torch.float32, **plan), seed=SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = batch_of(0, 8).chunk(meshes_of(model).dp_size)[meshes_of(model).dp_rank]
        with Checkpoints(root) as checkpoints:
            for step in (1, 2):
                with ottava.autocast(recipe=RECIPES["current"]):
                    model(tokens[:, :-1], tokens[:, 1:]).backward()
                clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                state = model_state(model, optimizer) | {"step": step}
                checkpoints.save(step, state) if step == 1 else checkpoints.save_async(step, state)
            checkpoints.wait()
            loaded = load_model_state(checkpoints, model, optimizer, extra={"step": 0})
            whole_state(model)
    return loaded is not None and loaded.step == 2


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_rank_opens_a_pickle_of_another(four_ranks: Ranks, plan: dict[str, Any], tmp_path: Path) -> None:
    assert four_ranks.run(whole_life, str(tmp_path), plan) == [True] * 4
