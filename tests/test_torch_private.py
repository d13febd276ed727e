"""Every private torch API that Ottava leans on, one at a time: a torch release that changes one fails here, by name."""

from __future__ import annotations

import datetime
import inspect
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ottava import torch_private


class Spy(torch.autograd.Function):
    """Calls `look` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Any) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.look()
        return grad, None


def run_backward(look: Any) -> None:
    Spy.apply(torch.ones(2, requires_grad=True), look).sum().backward()


def test_inside_backward() -> None:
    seen = []
    run_backward(lambda: seen.append(torch_private.inside_backward()))
    assert seen == [True] and not torch_private.inside_backward()


def test_tree_flatten_and_unflatten() -> None:
    tree = ((1, None), {"a": [2]})
    leaves, spec = torch_private.tree_flatten(tree)
    assert leaves == [1, None, 2] and torch_private.tree_unflatten(leaves, spec) == tree
    assert spec != torch_private.tree_flatten(((1, None), {"b": [2]}))[1]


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        return dy * ctx.factor, None


def test_bare_apply_is_apply() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch_private.bare_apply(_Double)(x, 3.0)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [3.0, 3.0] and type(y.grad_fn).__name__ == "_DoubleBackward"


def test_transforms_active() -> None:
    assert not torch_private.transforms_active()
    seen = []
    torch.func.vmap(lambda x: seen.append(torch_private.transforms_active()) or x)(torch.ones(2))
    assert seen == [True]


def _intercepting() -> set[str]:
    names = ("dispatch_modes", "function_modes", "transforms_active", "is_tracing", "profiler_enabled")
    return {name for name in names if getattr(torch_private, name)()}


def test_who_wants_to_see_ops_is_noticed() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    assert not _intercepting()
    with FlopCounterMode(display=False):
        assert "dispatch_modes" in _intercepting()
    with TorchFunctionMode():
        assert _intercepting() == {"function_modes"}
    with torch.profiler.profile():
        assert _intercepting() == {"profiler_enabled"}
    with torch_private.fake_mode():
        assert "dispatch_modes" in _intercepting()
    seen: list[set[str]] = []
    torch.func.vmap(lambda x: seen.append(_intercepting()) or x)(torch.ones(2))
    torch.jit.trace(lambda x: seen.append(_intercepting()) or x + 1, torch.ones(2), check_trace=False)
    assert "transforms_active" in seen[0] and "is_tracing" in seen[1] and not _intercepting()


def test_current_device_and_stream_are_those_of_torch_cuda() -> None:
    if torch.cuda.is_available():
        torch.cuda.init()
        assert torch_private.current_device() == torch.cuda.current_device()
        assert torch_private.current_stream(0) == torch.cuda.current_stream(0).cuda_stream
        assert torch_private.is_capturing() is torch.cuda.is_current_stream_capturing() is False
    elif torch.version.cuda is None:
        assert torch_private.current_device() == torch_private.current_stream(0) == -1


def test_scaled_mm_is_that_of_functional() -> None:
    from torch.nn.functional import ScalingType
    from torch.nn.functional import scaled_mm as public

    a, b = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    scale, kind = torch.ones(1), ScalingType.TensorWise
    device = "cuda" if torch.cuda.is_available() else "meta"
    a, b, scale = a.to(device), b.to(device), scale.to(device)
    want = public(a, b.t(), scale, kind, scale, kind, output_dtype=torch.bfloat16, use_fast_accum=True)
    got = torch_private.scaled_mm(a, b.t(), scale, kind.value, scale, kind.value, None, torch.bfloat16, True)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert device == "meta" or torch.equal(got, want)


def test_backward_id_is_that_of_the_pass() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)

    def look() -> None:
        seen.append(torch_private.backward_id())

    (Spy.apply(x, look) + Spy.apply(x, look)).sum().backward()
    run_backward(look)
    assert seen[0] == seen[1] != seen[2] and -1 not in seen
    assert torch_private.backward_id() == -1


def test_a_backward_inside_a_backward_has_an_id_of_its_own() -> None:
    seen: list[int] = []

    def outer() -> None:
        seen.append(torch_private.backward_id())
        with torch.enable_grad():
            run_backward(lambda: seen.append(torch_private.backward_id()))
        seen.append(torch_private.backward_id())

    run_backward(outer)
    assert seen[0] == seen[2] != seen[1]


def test_at_end_of_backward_runs_once_after_the_last_gradient() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: order.append("gradient"))

    def look() -> None:
        order.append("function")
        torch_private.at_end_of_backward(lambda: order.append("end"))

    Spy.apply(x, look).sum().backward()
    assert order == ["function", "gradient", "end"]
    run_backward(lambda: None)
    assert order.count("end") == 1


def test_is_fake() -> None:
    with FakeTensorMode():
        fake = torch.empty(2)
    assert torch_private.is_fake(fake)
    assert not torch_private.is_fake(torch.empty(2)) and not torch_private.is_fake(torch.empty(2, device="meta"))


def test_copy_all() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)], [torch.ones(2), torch.full((3,), 2.5)]
    torch_private.copy_all(targets, sources)
    assert [t.tolist() for t in targets] == [[1.0, 1.0], [2.5, 2.5, 2.5]] and targets[1].dtype == torch.bfloat16


def test_add_to_all() -> None:
    tensors = [torch.zeros(()), torch.ones(2)]
    torch_private.add_to_all(tensors, 1.0)
    assert [t.tolist() for t in tensors] == [1.0, [2.0, 2.0]]


def test_is_compiled() -> None:
    module = torch.nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    module.compile(backend="eager")
    assert torch_private.is_compiled(module)


def test_largest_magnitudes_of_many_with_their_nan() -> None:
    tensors = [
        torch.tensor([1.0, -3.0]),
        torch.tensor([[torch.inf]]),
        torch.tensor([1.0, torch.nan]),
        torch.zeros(2).bfloat16(),
    ]
    found = [float(m) for m in torch_private.largest_magnitudes(tensors)]
    assert found[:2] == [3.0, torch.inf] and math.isnan(found[2]) and found[3] == 0.0


def test_map_instances() -> None:
    assert torch_private.map_instances(int, lambda n: n + 1, (1, ["a", 2], {"k": 3.0})) == (2, ["a", 3], {"k": 3.0})


def test_is_exporting_tells_export_from_compile() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 if torch_private.is_exporting() else 3)

    one = torch.ones(1)
    assert torch.compile(Asks(), backend="eager", fullgraph=True)(one).item() == 3
    assert torch.export.export(Asks(), (one,)).module()(one).item() == 2


def test_generator_state_is_a_state_that_torch_takes() -> None:
    def numbers(key: bytes) -> Tensor:
        generator = torch.Generator()
        generator.set_state(torch_private.generator_state(key))
        return torch.randn(1000, generator=generator)

    assert torch.equal(numbers(b"a"), numbers(b"a")) and not torch.equal(numbers(b"a"), numbers(b"b"))
    assert abs(float(numbers(b"a").mean())) < 0.15 and abs(float(numbers(b"a").std()) - 1) < 0.1


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


def test_in_reentrant_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_private.in_reentrant_checkpoint())
        return x * 2

    for reentrant in (True, False):
        checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
    # recomputed in the reentrant form only: multiplying by a number keeps nothing that would have to be
    assert seen[:2] == [False, True] and not any(seen[2:])


def test_saved_tensor_hooks_active() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_private.saved_tensor_hooks_active())
        return x.sin()

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        function(torch.ones(2))
    assert seen == [True, True, True] and not torch_private.saved_tensor_hooks_active()


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


def test_persistent_buffers() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("left_out", torch.ones(1), persistent=False)
    module.register_buffer("none", None)
    assert [name for name, _ in torch_private.persistent_buffers(module)] == list(module.state_dict()) == ["kept"]


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


def test_flight_record_is_json() -> None:
    assert isinstance(json.loads(torch_private.flight_record()), dict)


def test_without_a_gpu_there_is_nothing_to_abort() -> None:
    if not torch.cuda.is_available():  # with one: tests/gpu/test_restart.py
        assert torch_private.abort_device_groups() == 0


def test_what_a_group_knows_of_itself(tmp_path: Path) -> None:
    timeout = datetime.timedelta(seconds=77)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timeout
    )
    try:
        assert torch_private.group_timeout_s(None, torch.device("cpu")) == 77.0
        group = torch.distributed.group.WORLD
        assert torch_private.group_timeout_s(group, torch.device("cpu")) == 77.0
        assert torch_private.first_report(group, "who", "me") == "me"
        assert torch_private.first_report(None, "who", "another") == "me"
        assert torch_private.first_report("no group", "who", "me") is None
    finally:
        torch.distributed.destroy_process_group()


def test_symmetric_memory_is_where_torch_has_it() -> None:
    import torch.distributed._symmetric_memory as symmetric

    assert torch_private.has_symmetric_memory()
    parameters = list(inspect.signature(symmetric.rendezvous).parameters)
    assert parameters == ["tensor", "group"], "symmetric_memory calls it so; tests/gpu/test_overlap.py runs it"
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert all(hasattr(handle, name) for name in ("get_buffer", "put_signal", "wait_signal"))
    assert callable(torch_private.symmetric_memory)


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


def test_a_slice_of_a_mesh_knows_the_whole() -> None:
    torch.distributed.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=4)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert torch_private.root_mesh(mesh["tp"]) == mesh and torch_private.root_mesh(mesh) == mesh
    finally:
        torch.distributed.destroy_process_group()


def test_reshaped_shares_memory_and_is_no_view() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    made = x * 2
    found = torch_private.reshaped(made, (2, 12))
    assert found.data_ptr() == made.data_ptr() and not found._is_view() and found.shape == (2, 12)
    found.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 6), 2.0))


def test_has_multicast_answers_for_a_device() -> None:
    assert torch_private.has_multicast(0) in ((True, False) if torch.cuda.is_available() else (False,))


def test_torchruns_agent_has_what_ours_overrides():
    """What it does is seen in tests/launch/test_agent.py, with real ranks."""
    from torch.distributed.launcher import api

    usual = api.LocalElasticAgent
    assert inspect.signature(usual._monitor_workers).parameters.keys() == {"self", "worker_group"}
    assert list(inspect.signature(usual._shutdown).parameters)[:2] == ["self", "death_sig"]
    assert "_remaining_restarts" in inspect.getsource(usual.__mro__[1])
    with torch_private.elastic_agent(lambda codes: False, grace_s=1.0):
        assert issubclass(api.LocalElasticAgent, usual) and api.LocalElasticAgent is not usual
    assert api.LocalElasticAgent is usual


def test_weak_storage_knows_its_memory_and_takes_no_other_for_it() -> None:
    tensor = torch.randn(4, 6)
    reference = torch_private.weak_storage(tensor)
    assert torch_private.is_storage_of(reference, tensor) and torch_private.is_storage_of(
        reference, tensor.view(24)[3:]
    )
    assert not torch_private.is_storage_of(reference, tensor.clone())
    del tensor
    assert reference.expired()  # it keeps nothing
    assert not any(torch_private.is_storage_of(reference, torch.randn(4, 6)) for _ in range(100))


@pytest.mark.parametrize("keeps", [False, True])
def test_release_saved_frees_unless_the_graph_is_kept(keeps: bool) -> None:
    seen: list[Any] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            inner = x.detach() + 1
            ctx.save_for_backward(inner)
            seen[:] = [torch_private.weak_storage(inner)]
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            kept = list(ctx.saved_tensors)
            torch_private.release_saved(ctx)
            assert not seen[0].expired()
            kept.clear()
            assert seen[0].expired() is not keeps
            return 2 * dy

    x = torch.ones(3, requires_grad=True)
    y = Doubled.apply(x).sum()
    y.backward(retain_graph=keeps)
    if keeps:
        y.backward(retain_graph=True)
    else:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
    assert bool((x.grad == (4 if keeps else 2)).all())


def test_every_function_is_tested_here() -> None:
    functions = {
        name
        for name, value in inspect.getmembers(torch_private, inspect.isfunction)
        if value.__module__ == torch_private.__name__
    }
    tested = {
        "bare_apply",
        "first_report",
        "gather_without_streams",
        "group_timeout_s",
        "has_symmetric_memory",
        "symmetric_memory",
        "tree_flatten",
        "tree_unflatten",
        "scaled_mm",
        "_no_gpu",
        "current_device",
        "current_stream",
        "fake_mode",
        "fake_store",
        "peak_memory",
        "flight_record",
        "abort_device_groups",
        "elastic_agent",
        "inside_backward",
        "at_end_of_backward",
        "is_fake",
        "copy_all",
        "add_to_all",
        "map_instances",
        "is_compiled",
        "largest_magnitudes",
        "generator_state",
        "is_exporting",
        "forget_gathered",
        "around_fsdp_waits",
        "local_box",
        "in_reentrant_checkpoint",
        "local_tensor",
        "saved_tensor_hooks_active",
        "storage_info",
        "fsdp1_replicas",
        "fsdp2_groups",
        "around_reduce_scatter",
        "ddp_hook_dtype",
        "persistent_buffers",
        "fsdp1_stretches",
        "root_mesh",
        "reshaped",
        "has_multicast",
        "weak_storage",
        "is_storage_of",
        "cudnn_attention_backward",
        "constant_when_traced",
        "release_saved",
        "wait_for_work",
    }
    functions |= {"current_device", "current_stream"}  # builtins where torch was built with CUDA
    assert functions == tested, "add a test for what is new"


def test_cudnn_attention_backward_has_the_signature_that_is_called() -> None:
    """On the meta device: shapes and the order of arguments. tests/gpu compares its numbers."""

    def meta(heads: int, *last: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, heads, 32, *last, dtype=dtype, device="meta")

    q, k, v = meta(8, 64), meta(2, 64), meta(2, 64)
    grads = torch_private.cudnn_attention_backward(
        [meta(8, 64), q, k, v, meta(8, 64)], meta(8, dtype=torch.float32), True, 0.125
    )
    assert [tuple(x.shape) for x in grads] == [(1, 8, 32, 64), (1, 2, 32, 64), (1, 2, 32, 64)]
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:8] == ["grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset"]
    assert names[8:] == ["attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale"]
    # Sums as torch's own forward gives them: [b, heads, s, 1], float32.
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=0.125)
    assert forward[1].shape == (1, 8, 32, 1) and forward[1].dtype is torch.float32


def test_constant_when_traced() -> None:
    calls = []

    @torch_private.constant_when_traced
    def seen(text: str) -> int:
        calls.append(text)
        return len(text)

    compiled = torch.compile(lambda x: x * seen("abc"), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0] and compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert calls == ["abc"]  # by the tracer, once


def test_wait_for_work() -> None:
    """Collectives of a tensor subclass arrive as ops of c10d, whose schemas say of no argument that it is written."""
    seen = []

    class Wrapped(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod
        def __new__(cls, inner: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, inner.shape)

        def __init__(self, inner: Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = torch_private.map_instances(Wrapped, lambda w: w.inner, args)
            result = func(*plain, **(kwargs or {}))
            torch_private.wait_for_work(result)
            seen.append((func.namespace, func._schema.is_mutable, [a.name for a in func._schema.arguments][:1]))
            return result

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.distributed.broadcast(Wrapped(torch.ones(2)), 0, async_op=True)
        torch.distributed.all_reduce(Wrapped(torch.ones(2)))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [("c10d", False, ["tensors"])] * 2
