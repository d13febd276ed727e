"""A plan is checked when it is made, resolves to numbers, and gives meshes whose groups are the ones it says."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed.ranks import RankDied, Ranks, RankTimeout
from ottava.distributed.plan import (
    MESH_DIMENSIONS,
    RECOMPUTE,
    STRATEGIES,
    Meshes,
    ParallelPlan,
)
from ottava.overlap.schedule import METHODS, TRANSPORTS


def test_defaults_shard_over_all_ranks() -> None:
    plan = ParallelPlan()
    assert plan.shape == (1, -1, 1) and not plan.is_resolved
    assert plan.strategy == "fsdp2" and plan.recompute == "none" and plan.overlap == "none"
    assert plan.param_dtype == torch.bfloat16 and plan.reduce_dtype == torch.float32


@pytest.mark.parametrize(
    "fields, world_size, shape",
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (1, 8, 1)),
        ({"tp": 2}, 6, (1, 3, 2)),
        ({"dp_replicate": 2, "tp": 2}, 8, (2, 2, 2)),
        ({"dp_replicate": -1, "dp_shard": 4}, 16, (4, 4, 1)),
        ({"dp_shard": 1, "tp": -1}, 4, (1, 1, 4)),
        ({"dp_replicate": 2, "dp_shard": 3, "tp": 4}, 24, (2, 3, 4)),
        ({"strategy": "ddp"}, 4, (4, 1, 1)),
        ({"strategy": "ddp", "tp": 2}, 8, (4, 1, 2)),
        ({"strategy": "ddp", "dp_replicate": 4, "tp": 2}, 8, (4, 1, 2)),
        ({"strategy": "ddp", "dp_replicate": -1, "tp": 2}, 8, (4, 1, 2)),
        ({"strategy": "none", "tp": 2}, 4, (1, 2, 2)),
        ({"strategy": "fsdp1", "dp_replicate": 2}, 4, (2, 2, 1)),
    ],
)
def test_resolve(fields: dict[str, Any], world_size: int, shape: tuple[int, ...]) -> None:
    resolved = ParallelPlan(**fields).resolve(world_size)
    assert resolved.shape == shape and resolved.is_resolved
    assert resolved.resolve(world_size) == resolved


@pytest.mark.parametrize(
    "fields, world_size, words",
    [
        ({"tp": 3}, 8, ["8 ranks", "tp=3", "dp_shard", "multiple of 3"]),
        ({"dp_shard": 4, "tp": 2}, 4, ["= 8 ranks", "there are 4", "start 8 ranks", "-1"]),
        ({"dp_shard": 2}, 4, ["= 2 ranks", "there are 4"]),
        ({"strategy": "ddp", "dp_replicate": 2}, 4, ["= 2 ranks", "there are 4"]),
        ({}, 0, ["world_size", "got 0"]),
    ],
)
def test_resolve_says_what_does_not_fit(fields: dict[str, Any], world_size: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ParallelPlan(**fields).resolve(world_size)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tp": 0}, ["tp", "got 0", "-1"]),
        ({"dp_shard": -2}, ["dp_shard", "got -2"]),
        ({"tp": 2.0}, ["tp", "got 2.0"]),
        ({"tp": True}, ["tp", "got True"]),
        ({"dp_replicate": -1}, ["only one", "dp_replicate and dp_shard"]),
        ({"strategy": "fdsp2"}, ["strategy", "'fsdp1'", "'ddp'", "got 'fdsp2'", "Did you mean 'fsdp2'?"]),
        ({"strategy": "ddp", "dp_shard": 4}, ["ddp", "dp_shard=4", "dp_replicate=4"]),
        ({"recompute": "selectiv"}, ["recompute", "Did you mean 'selective'?"]),
        ({"overlap": "rings"}, ["overlap", "Did you mean 'ring'?"]),
        ({"reduce_dtype": "float32"}, ["reduce_dtype", "torch.float32", "got 'float32'"]),
        ({"param_dtype": torch.int8}, ["param_dtype", "torch.int8"]),
        ({"prefetch": -1}, ["prefetch", "got -1"]),
        ({"cpu_offload": 1}, ["cpu_offload", "got 1"]),
        ({"dp_shrad": 2}, ["'dp_shrad'", "Did you mean 'dp_shard'?"]),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ParallelPlan(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "field, known",
    [("recompute", RECOMPUTE), ("overlap", METHODS), ("overlap_transport", TRANSPORTS), ("strategy", STRATEGIES)],
)
def test_every_known_choice_is_accepted(field: str, known: tuple[str, ...]) -> None:
    for name in known:
        assert getattr(ParallelPlan(**{field: name}), field) == name


def test_a_plan_is_plain_data() -> None:
    plan = ParallelPlan(tp=2, reduce_dtype=torch.bfloat16, strategy="fsdp1")
    assert plan == copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == ParallelPlan.from_dict(plan.as_dict())
    assert hash(plan) == hash(copy.copy(plan))
    assert plan.as_dict()["reduce_dtype"] == "bfloat16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.tp = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="Did you mean 'bfloat16'"):
        ParallelPlan.from_dict({"param_dtype": "bfloat61"})
    assert set(STRATEGIES) == {"fsdp2", "fsdp1", "ddp", "none"}


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        ParallelPlan().mesh()


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """Makes this process rank `rank` of a world that does not exist."""

    def start(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_of(mesh: dist.DeviceMesh) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group())


def test_meshes_of_a_thousand_fake_ranks(fake_world: Any) -> None:
    fake_world(rank=19, world_size=1024)
    meshes = ParallelPlan(dp_shard=8, dp_replicate=-1, tp=2).meshes("cpu")
    assert meshes.root.mesh_dim_names == MESH_DIMENSIONS and tuple(meshes.root.shape) == (64, 8, 2)
    assert ranks_of(meshes.weight) == list(range(16, 32))
    assert ranks_of(meshes.tp) == [18, 19]
    assert (meshes.dp_rank, meshes.dp_size) == (9, 512)
    assert repr(meshes) == "Meshes(dp_replicate=64, dp_shard=8, tp=2, device_type='cpu')"


def test_meshes_want_the_three_dimensions(fake_world: Any) -> None:
    fake_world(rank=0, world_size=4)
    with pytest.raises(ValueError, match="dp_replicate.*got \\('dp', 'tp'\\)"):
        Meshes(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


# In real ranks. One start of the processes serves every case.


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def groups_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Which ranks each part of the mesh joins, by a collective over the part: its group works, and has these ranks."""
    meshes = ParallelPlan(**fields).meshes("cpu")
    found: dict[str, Any] = {
        "dp": tuple(meshes.dp.shape),
        "dp_rank": meshes.dp_rank,
        "names": meshes.root.mesh_dim_names,
    }
    for name in ("replicate", "shard", "tp", "weight"):
        mesh = getattr(meshes, name)
        members = [torch.zeros(1, dtype=torch.long) for _ in range(mesh.size())]
        dist.all_gather(members, torch.tensor([dist.get_rank()]), group=mesh.get_group())
        found[name] = [int(member) for member in members]
    return found


@pytest.mark.parametrize(
    "fields, dp, weight_groups, tp_groups",
    [
        ({}, (4,), [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        ({"tp": 2}, (2,), [[0, 1, 2, 3]], [[0, 1], [2, 3]]),
        ({"tp": 4}, (1,), [[0, 1, 2, 3]], [[0, 1, 2, 3]]),
        ({"dp_replicate": 2}, (2, 2), [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
        ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, (2, 1), [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        ({"strategy": "ddp"}, (4, 1), [[0], [1], [2], [3]], [[0], [1], [2], [3]]),
    ],
    ids=["fsdp", "fsdp-tp", "tp", "hsdp", "replicas-tp", "ddp"],
)
def test_groups_of_real_ranks(four: Ranks, fields: Any, dp: Any, weight_groups: Any, tp_groups: Any) -> None:
    found = four.run(groups_of, fields)
    for rank, parts in enumerate(found):
        assert parts["names"] == MESH_DIMENSIONS and parts["dp"] == dp
        assert parts["weight"] in weight_groups and rank in parts["weight"]
        assert parts["tp"] in tp_groups and rank in parts["tp"]
        assert not set(parts["weight"]) & set(parts["replicate"]) - {rank}  # replicas never share scales
    # Ranks of a tp group see the same data, all others different data.
    by_data = {parts["dp_rank"] for parts in found}
    assert by_data == set(range(len(tp_groups)))
    for group in tp_groups:
        assert len({found[rank]["dp_rank"] for rank in group}) == 1


def test_one_rank_has_meshes_too() -> None:
    with Ranks(1) as one:
        (parts,) = one.run(groups_of, {})
    assert parts["weight"] == parts["tp"] == parts["shard"] == [0] and parts["dp"] == (1,)


def hsdp_with_tp() -> list[int]:
    return groups_of({"dp_replicate": 2, "dp_shard": 2, "tp": 2})["weight"]


@pytest.mark.slow
def test_weight_groups_of_hsdp_with_tp() -> None:
    with Ranks(8) as eight:
        assert eight.run(hsdp_with_tp) == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


# The helper itself: other tests lean on it.


def fail_in_rank_two() -> None:
    if dist.get_rank() == 2:
        raise ValueError("two is wrong")
    dist.barrier()  # never completes


def die_in_rank_one() -> None:
    if dist.get_rank() == 1:
        import os

        os._exit(7)
    dist.barrier()


def hang_in_rank_three() -> int:
    if dist.get_rank() == 3:
        import time

        time.sleep(1000)
    return dist.get_rank()


def test_ranks_raise_the_first_error_with_its_traceback(four: Ranks) -> None:
    with pytest.raises(ValueError, match="two is wrong") as caught:
        four.run(fail_in_rank_two)
    assert "in rank 2 of 4" in caught.value.__notes__[0] and "fail_in_rank_two" in caught.value.__notes__[0]
    assert four.run(dist.get_rank) == [0, 1, 2, 3]  # started anew


def test_ranks_notice_a_death_and_a_hang(four: Ranks) -> None:
    with pytest.raises(RankDied, match="rank 1 died with exit code 7"):
        four.run(die_in_rank_one)
    with pytest.raises(RankTimeout, match=r"ranks \[3\] did not finish in 8 s"):
        four.run(hang_in_rank_three, timeout=8)
