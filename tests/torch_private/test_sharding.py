"""FSDP2, FSDP1, DDP and DTensor: what is known of shards, gathers and sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava import torch_private


def test_local_box_of_a_shard() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        part = distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        assert torch_private.local_box(part) == ((4, 3), (0, 3))
        with torch_private.fake_mode():
            assert torch_private.local_box(part) == ((4, 3), (0, 3))
        assert torch_private.local_tensor(part).shape == (4, 3)
        assert torch_private.local_tensor(part) is torch_private.local_tensor(part)
    finally:
        torch.distributed.destroy_process_group()


def test_a_slice_of_a_mesh_knows_the_whole() -> None:
    torch.distributed.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=4)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert torch_private.root_mesh(mesh["tp"]) == mesh and torch_private.root_mesh(mesh) == mesh
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp2_groups_and_their_sums() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen: list[tuple[Any, ...]] = []

    def see(work: Any, output: torch.Tensor, source: torch.Tensor, group: Any, op: Any) -> Any:
        seen.append((output.dtype, source.numel() // output.numel(), group.size()))
        return work()

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
        assert torch_private.is_fsdp_managed(model) and not torch_private.is_fsdp_managed(torch.nn.Linear(4, 4))
        assert torch_private.fsdp2_groups(model) == [((0, 1), 2, torch.bfloat16)]
        with torch_private.around_reduce_scatter(model, see):
            model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
        assert seen == [(torch.bfloat16, 2, 2)]
        flat = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["shard"])
        assert torch_private.fsdp2_groups(flat) == [((0, 1), 1, torch.float32)]
        frozen = fully_shard(torch.nn.Linear(4, 4).requires_grad_(False), mesh=mesh["shard"])
        assert torch_private.fsdp2_groups(frozen) == [((0, 1), 1, None)]
    finally:
        torch.distributed.destroy_process_group()


def test_forget_gathered_lets_sizes_change() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(4, 4))
        before = model(torch.ones(1, 4))
        model.reshard()
        torch_private.forget_gathered(model)
        assert torch.equal(model(torch.ones(1, 4)), before)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "fake"])
def test_gathers_of_gloo_travel_until_they_are_waited_for(backend: str, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    where: dict[str, Any] = (
        {"store": FakeStore()} if backend == "fake" else {"init_method": f"file://{tmp_path / 'store'}"}
    )
    torch.distributed.init_process_group(backend, rank=0, world_size=1, **where)
    try:
        model = fully_shard(torch.nn.Linear(4, 4))
        group = model._get_fsdp_state()._fsdp_param_group
        assert not group.unshard_async_op
        torch_private.gather_without_streams(model)
        assert group.unshard_async_op is (backend == "gloo")
        model(torch.ones(1, 4)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_around_fsdp_waits_sees_forward_and_backward() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = fully_shard(torch.nn.Linear(4, 4))
        with torch_private.around_fsdp_waits(around):
            loss = model(torch.ones(1, 4)).sum()
            forward = len(seen)
            loss.backward()
        backward = len(seen)
        model(torch.ones(1, 4))
    finally:
        torch.distributed.destroy_process_group()
    assert 0 < forward < backward == len(seen) == 2 * seen.count("end")


def test_fsdp1_replicas(tmp_path: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shard, replicas = torch.distributed.new_group([0]), torch.distributed.new_group([0])
        for group, strategy, expected in (
            ((shard, replicas), ShardingStrategy.HYBRID_SHARD, replicas),
            (shard, ShardingStrategy.NO_SHARD, None),
        ):
            unit = FullyShardedDataParallel(
                torch.nn.Linear(2, 2), process_group=group, sharding_strategy=strategy, device_id=torch.device("cpu")
            )
            assert torch_private.fsdp1_replicas(unit) is expected
            assert unit.process_group is shard
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_fsdp1_stretches_are_the_parameters(strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = 2 if strategy == "FULL_SHARD" else 1
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        linear = torch.nn.Linear(3, 2)
        weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
        unit = FullyShardedDataParallel(
            linear, sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu"), use_orig_params=True
        )
        stretches = {n: (m, s, t, a) for m, n, s, t, a in torch_private.fsdp1_stretches(unit)}
        assert stretches["weight"][:2] == (linear, (2, 3)) and stretches["bias"][:2] == (linear, (2,))
        half = linear.weight.numel()  # rank 0 of two holds a part of the weight and nothing of the bias
        assert half == 6 if world == 1 else 0 < half < 6
        assert torch.equal(stretches["weight"][2], weight.flatten()[:half]) and stretches["weight"][3] == 0
        assert torch.equal(stretches["bias"][2], bias[: 0 if world == 2 else 2])
        assert stretches["weight"][2].data_ptr() == linear.weight.data_ptr()
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_hook_dtype(tmp_path: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        assert torch_private.ddp_hook_dtype(model) is None
        model.register_comm_hook(None, fp16_compress_hook)
        assert torch_private.ddp_hook_dtype(model) == torch.float16
    finally:
        torch.distributed.destroy_process_group()


def test_storage_info_is_what_dcp_writes() -> None:
    info = torch_private.storage_info("__0_0.distcp", 64, 100)
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 64, 100)
    assert info.__reduce_ex__(4)[2] == {"relative_path": "__0_0.distcp", "offset": 64, "length": 100}


def test_peak_memory_of_a_step_without_data() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
        model = fully_shard(torch.nn.Linear(64, 64, bias=False, device="meta"), mesh=mesh)
        with torch_private.fake_mode():
            model.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)

            def step() -> None:
                x = torch.empty(16, 64)
                assert torch_private.is_fake(x)
                model(x).sum().backward()
                optimizer.step()

            step()
            optimizer.zero_grad()
            peak = torch_private.peak_memory(model, optimizer, step)
    finally:
        torch.distributed.destroy_process_group()
    shard = 64 * 64 * 4 // 8
    assert peak["Sharded Param"] == shard and peak["OptState"] >= 2 * shard
    assert peak["Total"] == sum(size for kind, size in peak.items() if kind != "Total") > 8 * shard


def test_who_lists_what_a_module_can_load() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    asked: list[bool] = []

    class Asking(torch.nn.Linear):
        def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
            asked.append(torch_private.lists_model_state())
            return super().named_buffers(prefix, recurse, remove_duplicate)

    model = torch.nn.Sequential(Asking(2, 2))
    list(model[0].named_buffers(recurse=False)), list(model.named_buffers())
    assert not any(asked)
    set_model_state_dict(model, get_model_state_dict(model))
    assert any(asked)


def test_a_pipeline_stage_that_is_only_tried() -> None:
    from torch.distributed.pipelining.stage import PipelineStage

    asked: list[bool] = []

    class Asking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(torch_private.tries_pipeline_stage())
            return x * 1

    torch.distributed.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=1)
    try:
        one: Any = PipelineStage(Asking(), 0, 1, torch.device("cpu"))
        one.submod(torch.ones(2))
        tries = getattr(one, "_forward_metadata_inference", None) or one._shape_inference  # torch 2.11
        tries((torch.ones(2),))
        assert asked == [False, True]
    finally:
        torch.distributed.destroy_process_group()


def test_a_step_that_only_makes_state() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    asked: list[bool] = []

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            asked.append(torch_private.makes_optimizer_state())
            return super().step(closure)

    model = torch.nn.Linear(2, 2)
    optimizer = Asking(model.parameters(), lr=0.1)
    optimizer.step()
    get_optimizer_state_dict(model, optimizer)
    assert asked == [False, True]
