"""Sharded models from and to outside: checkpoints, deferred initialization, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

import ottava
from distributed.fsdp_cases import (
    HIDDEN,
    RECIPES,
    build,
    compare_gathered,
    mesh_of,
    one_rank_mesh,
    step,
    two_ranks,
)
from distributed.ranks import Ranks
from ottava import recipe
from ottava.distributed import fsdp


def save_and_load(folder: str) -> bool | None:
    """Whether a checkpoint of 2 ranks, loaded by 3, goes on as it would have."""
    checkpoint = torch.distributed.checkpoint
    pair, three = mesh_of("2"), mesh_of("3 uneven")
    losses = []
    for mesh in (pair, three):
        if mesh is not None:
            model = build(1)
            fsdp.shard_model(model, mesh, RECIPES["block"])
            if mesh is pair:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
                fsdp.refresh(model)
                checkpoint.save(model.state_dict(), checkpoint_id=folder, process_group=mesh.get_group())
            else:
                state = model.state_dict()
                checkpoint.load(state, checkpoint_id=folder, process_group=mesh.get_group())
                model.load_state_dict(state)
            losses.append(float(step(model, "block", 0, 0)))
        dist.barrier()
    return losses[0] == losses[1] if len(losses) == 2 else None


def test_checkpoint_is_plain_and_reshards(four_ranks: Ranks, tmp_path: Path) -> None:
    answers = four_ranks.run(save_and_load, str(tmp_path))
    assert answers == [True, True, None, None]


def deferred() -> bool | None:
    mesh = two_ranks()
    if mesh is None:
        return None
    model = ottava.Linear(HIDDEN, HIDDEN, device="meta")
    fsdp.shard_model(model, mesh, RECIPES["block"])
    with pytest.raises(ValueError, match="meta device"):
        fsdp.refresh(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.delayed.reset()
    fsdp.refresh(model)
    compare_gathered(model, "block")
    with ottava.autocast(recipe=RECIPES["block"]):
        y = model(torch.ones(4, HIDDEN))
    return bool((y == 0.5 * HIDDEN + 0.5).all())


def test_deferred_initialization(four_ranks: Ranks) -> None:
    assert [a for a in four_ranks.run(deferred) if a is not None] == [True, True]


def refusals() -> list[str]:
    mesh = one_rank_mesh()
    messages = []

    def refused(model: nn.Module, chosen: recipe.Recipe, **options: Any) -> None:
        with pytest.raises(ValueError) as error:
            fsdp.shard_model(model, options.pop("mesh", mesh), chosen, **options)
        messages.append(str(error.value))

    def linear(**options: Any) -> nn.Module:
        return ottava.Linear(64, 96, device="cpu", **options)

    refused(linear(), RECIPES["current"], reshard_after_forward=2)
    refused(linear(), RECIPES["current"], mesh="cpu")
    refused(linear(), RECIPES["current"], weight_mesh="cpu")
    refused(linear(parameters_split=("a", "b")), RECIPES["mxfp8"])
    with ottava.quantized_model_init(recipe=RECIPES["current"]):
        stored = linear()
    refused(stored, RECIPES["block"])
    refused(ottava.Linear(64, 40, device="cpu"), RECIPES["current"])
    refused(linear(), recipe.MXFP8BlockScaling(backward_override="high_precision"))
    sharded = linear()
    fully_shard(sharded, mesh=mesh)
    refused(sharded, RECIPES["current"])
    return messages


def test_refusals_say_what_to_do(four_ranks: Ranks) -> None:
    messages = four_ranks.run(refusals)[0]
    expected = [
        "True or False, got 2", "ParallelPlan().meshes().dp", "meshes().weight", "multiples of 32",
        "that quantized_model_init had", "(40, 64)", "backward_override='dequantized'", "sharded already",
    ]  # fmt: skip
    for message, words in zip(messages, expected, strict=True):
        assert words in message
