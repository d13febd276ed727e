"""DDP equals one process for every recipe, and delayed scaling stays equal on all ranks without broadcasting buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ottava
from distributed.data_parallel import (
    RECIPES,
    adamw,
    batch,
    build,
    cached,
    largest_error,
    loss_of,
    one_process,
    scales_of,
    train,
)
from distributed.ranks import Ranks
from ottava.distributed import apply_recompute, ddp

reference = cached(one_process)


def group_of(world: int) -> Any:
    """All ranks; or a mesh of ranks (0, 1) or (2, 3), whichever this rank is in."""
    if world == 4:
        return None
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("other", "replicate"))["replicate"]


def trained(name: str, world: int, recompute: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, scales). Of two ranks there are two pairs; the second sees larger data, which must not reach the first."""
    model = ddp(apply_recompute(build(), recompute), group_of(world))
    rank = dist.get_rank()
    train(model, name, rank % world, scale=1.0 if rank < world else 5.0)
    return dict(copy.deepcopy(model.module).named_parameters()), scales_of(model.module)


CASES = [
    *((name, 2, "none") for name in RECIPES),
    ("delayed", 4, "none"),
    ("current", 4, "none"),
    ("delayed", 2, "full"),
    ("delayed", 2, "selective"),
]


@pytest.mark.parametrize(("name", "world", "recompute"), CASES)
def test_training_equals_one_process(four_ranks: Ranks, name: str, world: int, recompute: str) -> None:
    answers = four_ranks.run(trained, name, world, recompute)[:world]
    expected = reference(name, world)
    for own, scales in answers:
        assert own.keys() == {k for k in expected if ".delayed." not in k}
        assert largest_error(own, {k: expected[k] for k in own}) <= 1e-5
        assert largest_error(scales, {k: v for k, v in expected.items() if k in scales}) <= 1e-5
        assert all(torch.equal(scales[k], answers[0][1][k]) for k in scales)


def accumulated() -> tuple[float, float]:
    """(largest error of weights, relative error of the norm) of two microbatches, the first under no_sync with cached weights."""
    model, single, rank = ddp(build()), build(), dist.get_rank()
    mine, theirs = adamw(model), adamw(single)
    for micro in range(2):
        with ottava.autocast(recipe=RECIPES["delayed"]):
            loss = loss_of(model(batch(0, 4 * micro + rank), first=micro == 0))
        if micro == 0:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        alone = [dist.new_group([r]) for r in range(4)][rank]  # what the comparison sees is all ranks' already
        with ottava.autocast(recipe=RECIPES["delayed"], amax_reduction_group=alone):
            losses = [loss_of(single(batch(0, 4 * micro + r), first=micro == 0)) for r in range(4)]
        torch.stack(losses).sum().backward()
    for parameter in single.parameters():
        assert parameter.grad is not None
        parameter.grad /= 4
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, single)]
    mine.step(), theirs.step()
    return largest_error(dict(model.module.named_parameters()), dict(single.named_parameters())), float(
        norms[0] / norms[1]
    )


def test_no_sync_with_cached_weights_and_clipping(four_ranks: Ranks) -> None:
    for error, ratio in four_ranks.run(accumulated):
        assert error <= 1e-5 and abs(ratio - 1) <= 1e-5


def tensor_parallel() -> tuple[bool, bool, str]:
    """(groups that amax is reduced over are right, scales equal on all ranks after training, what is said about DTensors)."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "tp"))
    tp, replicate = mesh.get_group("tp"), mesh.get_group("replicate")
    options = {"set_parallel_mode": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    torch.manual_seed(mesh.get_local_rank("tp"))
    model = ddp(ottava.TransformerLayer(64, 96, 4, tp_group=tp, tp_size=2, **options), mesh["replicate"])
    train(model, "delayed", part=mesh.get_local_rank("replicate"))
    groups = [m.data_groups == (replicate, tp) for m in model.modules() if type(m).__name__ == "DelayedState"]
    equal = True
    for scale in scales_of(model).values():
        largest = scale.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        equal = equal and torch.equal(largest, scale)
    whole = ottava.TransformerLayer(64, 96, 4, **options)
    whole.set_device_mesh(mesh["tp"])
    with pytest.raises(ValueError) as error:
        ddp(whole, mesh["replicate"])
    return len(groups) == 3 and all(groups), equal, str(error.value)


def test_tensor_parallel_modules_share_scales_over_both_groups(four_ranks: Ranks) -> None:
    for groups, equal, said in four_ranks.run(tensor_parallel):
        assert groups and equal
        assert "is a DTensor" in said and "dp_replicate=N, dp_shard=1" in said


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    class Grid(DeviceMesh):
        def __init__(self) -> None:
            pass

        ndim = 2

        def __repr__(self) -> str:
            return "a grid"

    with pytest.raises(ValueError, match="one dimension, got a grid"):
        ddp(build(), Grid())
