"""Weights by name and global index: any part on any mesh has the bits of the whole matrix in one process."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

import ottava
from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead
from ottava.nn import initialize
from ottava.nn.initialize import (
    Constant,
    Elementwise,
    InitSlice,
    Normal,
    Uniform,
    Whole,
    ZeroRows,
    as_method,
    draw,
    elementwise,
    materialize_,
    swap_parameter_,
)

METHODS: dict[str, Any] = {
    "normal": Normal(std=0.02),
    "uniform": Uniform(-0.5, 0.25),
    "constant": Constant(3.0),
    "elementwise": Elementwise(lambda w: w.normal_().mul_(0.1)),
    "truncated": functools.partial(nn.init.trunc_normal_, std=0.02),
    "whole": nn.init.orthogonal_,
    "zero rows": ZeroRows(Normal(), 100, 170),
}
SHAPE = (200, 24)


# -------------------------------------------------------------------------------------------------------------------- draw


@pytest.mark.strict
@pytest.mark.parametrize("method", METHODS)
def test_every_part_has_the_bits_of_the_whole(method: str) -> None:
    whole = draw("w", SHAPE, METHODS[method], seed=3)
    rows = [slice(0, 50), slice(50, 100), slice(63, 65), slice(199, 200), slice(0, 0), slice(150, None), slice(None)]
    columns = [slice(None), slice(0, 7), slice(7, 24), slice(3, 3)]
    for r, c in itertools.product(reversed(rows), columns):
        part = draw("w", SHAPE, METHODS[method], seed=3, rows=r, columns=c)
        assert torch.equal(part, whole[r, c]), (r, c)


@pytest.mark.strict
@pytest.mark.parametrize("shape", [(), (0,), (1,), (63,), (130,), (0, 5), (5, 0), (65, 3, 4)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    whole = draw("w", shape, Normal())
    assert whole.shape == shape and torch.equal(whole, draw("w", shape, Normal()))
    if shape:
        assert torch.equal(draw("w", shape, Normal(), rows=slice(1, 70)), whole[1:70])


@pytest.mark.strict
@pytest.mark.parametrize("method", METHODS)
def test_torchs_stream_neither_matters_nor_moves(method: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    once = draw("w", SHAPE, METHODS[method])
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(once, draw("w", SHAPE, METHODS[method]))


def test_names_slabs_and_seeds_are_independent() -> None:
    draws = [draw(name, (128, 32), Normal(std=1.0), seed=seed) for name in ("a", "b", "a.b") for seed in (0, 1, 2**32)]
    slabs = torch.stack([slab.flatten() for d in draws for slab in d.split(64)])
    correlation = torch.corrcoef(slabs) - torch.eye(len(slabs))
    assert correlation.abs().max() < 5 / 2048**0.5


def test_numbers_have_the_distribution_that_was_asked_for() -> None:
    x = draw("w", (512, 512), Normal(mean=0.5, std=0.02)).double()
    assert abs(x.mean() - 0.5) < 2e-4 and abs(x.std() - 0.02) < 1e-4
    z = (x - x.mean()) / x.std()
    assert abs(z.pow(3).mean()) < 0.02 and abs(z.pow(4).mean() - 3) < 0.05
    u = draw("w", (512, 512), Uniform(-1.0, 3.0)).double()
    assert u.min() >= -1 and u.max() < 3 and abs(u.mean() - 1) < 0.02 and abs(u.var() - 16 / 12) < 0.02
    t = draw("w", (512, 512), functools.partial(nn.init.trunc_normal_, std=1.0, a=-2.0, b=2.0))
    assert t.abs().max() <= 2 and abs(t.mean()) < 0.01
    q = draw("w", (64, 64), nn.init.orthogonal_)
    assert torch.allclose(q @ q.T, torch.eye(64), atol=1e-5)


def test_low_precision_is_the_float32_start_rounded() -> None:
    wide = draw("w", SHAPE, Normal())
    assert torch.equal(draw("w", SHAPE, Normal(), torch.bfloat16), wide.bfloat16())
    assert torch.equal(draw("w", SHAPE, Normal(), torch.float64), wide.double())


def test_an_elementwise_method_never_sees_more_than_a_slab() -> None:
    seen: list[tuple[int, ...]] = []

    @elementwise
    def method(w: Tensor) -> None:
        seen.append(tuple(w.shape))
        w.normal_()

    draw("w", (1000, 8), method, rows=slice(100, 300))
    assert seen == [(64, 8)] * 4
    draw("w", (1000, 8), method, rows=slice(999, 1000))
    assert seen[-1] == (40, 8)


def test_which_functions_are_elementwise() -> None:
    mine = elementwise(lambda w: w.normal_())
    assert as_method(None) == Normal(std=0.023)
    for method in (mine, nn.init.zeros_, functools.partial(mine), functools.partial(nn.init.trunc_normal_, std=0.1)):
        assert isinstance(as_method(method), Elementwise)
    assert as_method(nn.init.normal_) == as_method(functools.partial(nn.init.normal_)) == Normal(std=1.0)
    assert as_method(functools.partial(nn.init.uniform_, b=3.0)) == Uniform(0.0, 3.0)
    for method in (lambda w: w.normal_(), nn.init.orthogonal_, nn.init.xavier_uniform_, nn.init.kaiming_normal_):
        assert isinstance(as_method(method), Whole)
    with pytest.raises(ValueError, match="must be a function"):
        as_method("normal")


@pytest.mark.parametrize(
    "function",
    [functools.partial(nn.init.normal_, std=0.02), functools.partial(nn.init.uniform_, a=-1.0, b=2.0), nn.init.normal_],
)
def test_threads_and_torchs_stream_give_the_same_bits(function: Any) -> None:
    expected = draw("w", (1000, 33), Elementwise(function))
    before = torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert torch.equal(draw("w", (1000, 33), function), expected)
    finally:
        torch.set_num_threads(before)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="contiguous parts"):
        draw("w", SHAPE, rows=slice(0, 10, 2))
    with pytest.raises(ValueError, match="has no columns"):
        draw("w", (5,), columns=slice(0, 1))


def test_fifty_nine_million_numbers_take_seconds() -> None:
    start = time.perf_counter()
    draw("w", (14336, 4096), Normal())
    assert time.perf_counter() - start < 10  # 0.5 s on an idle core


# ------------------------------------------------------------------------------------------------------------ materialize_


class Block(nn.Module):
    """One of everything that starts in a way of its own."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "params_dtype": torch.float32}
        self.norm = ottava.RMSNorm(16, zero_centered_gamma=True, **options)
        self.qkv = ottava.LayerNormLinear(16, 24, parameters_split={"query": 16, "kv": 8}, **options)
        self.mlp = ottava.LayerNormMLP(
            16, 32, init_method=nn.init.normal_, output_layer_init_method=nn.init.xavier_normal_, **options
        )
        self.experts = ottava.GroupedLinear(2, 16, 16, **options)
        self.rotary = ottava.attention.RotaryPositionEmbedding(8, device=device)
        self.attention = ottava.DotProductAttention(2, 8, softmax_type="off-by-one", device=device)  # type: ignore[call-arg]
        self.table = nn.Embedding(70, 16, padding_idx=65, device=device)
        self.linear = nn.Linear(16, 70, device=device)
        self.torch_norm = nn.LayerNorm(16, device=device)
        self.batch_norm = nn.BatchNorm1d(16, device=device)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.strict
def test_a_meta_model_starts_as_a_real_one_that_is_redrawn() -> None:
    torch.manual_seed(1)
    meta = materialize_(Block("meta"), seed=5, device="cpu")
    torch.manual_seed(2)
    real = Block("cpu")
    untouched = {n: p.detach().clone() for n, p in real.named_parameters()}
    materialize_(real, seed=5)
    assert all(torch.equal(p, untouched[n]) for n, p in real.named_parameters())  # nothing was on the meta device
    materialize_(real, seed=5, redraw=True)
    a, b = state(meta), state(real)
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["mlp.fc1_weight"], state(materialize_(Block(), seed=6, device="cpu"))["mlp.fc1_weight"])


def test_every_kind_of_parameter_starts_as_its_module_says() -> None:
    block = materialize_(Block(), device="cpu")
    values = state(block)
    assert all(v.isfinite().all() for v in values.values())
    for name in ("qkv.layer_norm_weight", "mlp.layer_norm_weight", "torch_norm.weight", "batch_norm.running_var"):
        assert (values[name] == 1).all(), name
    zeros = ("norm.weight", "qkv.query_bias", "qkv.layer_norm_bias", "mlp.fc1_bias", "mlp.fc2_bias", "experts.bias1")
    for name in (*zeros, "torch_norm.bias", "batch_norm.running_mean", "attention.softmax_offset"):
        assert not values[name].any(), name
    std = {
        "qkv.query_weight": 0.023, "experts.weight1": 0.023, "mlp.fc1_weight": 1.0, "mlp.fc2_weight": (2 / 48) ** 0.5,
        "table.weight": 1.0, "linear.weight": 0.25 / 3**0.5,
    }  # fmt: skip
    for name, expected in std.items():
        assert 0.8 * expected < values[name].std() < 1.2 * expected, name
    assert not torch.equal(values["experts.weight0"], values["experts.weight1"])
    assert not values["table.weight"][65].any() and values["linear.weight"].abs().max() <= 0.25
    assert torch.equal(values["rotary.inv_freq"], ottava.attention.RotaryPositionEmbedding(8, device="cpu").inv_freq)
    assert (values["mlp.delayed.fwd_scale"] == 1).all() and not values["mlp.delayed.bwd_amax_history"].any()


def test_the_model_trains_afterwards() -> None:
    model = materialize_(
        nn.Sequential(ottava.LayerNormMLP(32, 64, device="meta"), nn.Linear(32, 8, device="meta")), device="cpu"
    )
    with ottava.autocast(recipe=ottava.recipe.DelayedScaling()):
        model(torch.randn(16, 32)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.strict
def test_wrappers_order_and_prefix_do_not_change_the_start() -> None:
    def model(reverse: bool = False) -> nn.Module:
        names = ["a", "b"]
        return nn.ModuleDict({n: nn.Linear(8, 8, device="meta") for n in (reversed(names) if reverse else names)})

    plain = state(materialize_(model(), device="cpu"))
    assert not torch.equal(plain["a.weight"], plain["b.weight"])
    swapped = state(materialize_(model(reverse=True), device="cpu"))
    wrapped = model()
    wrapped["a"] = checkpoint_wrapper(wrapped["a"])  # type: ignore[index, operator]
    inside = state(materialize_(wrapped, device="cpu"))
    alone = state(materialize_(model()["b"], device="cpu", prefix="b"))  # type: ignore[index, operator]
    assert all(torch.equal(plain[n], swapped[n]) for n in plain)
    assert torch.equal(plain["a.weight"], inside["a._checkpoint_wrapped_module.weight"])
    assert torch.equal(plain["b.weight"], alone["weight"])


def test_parameters_stay_the_same_objects() -> None:
    head = VocabParallelEmbedding(10, 4, device="meta")
    model = nn.ModuleList([head, VocabParallelHead(10, 4, weight=head.weight)])
    model[0].weight.color = "red"  # type: ignore[union-attr]
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)  # type: ignore[list-item]
    materialize_(model, device="cpu")
    weight: Any = model[1].weight
    assert weight is model[0].weight and weight is optimizer.param_groups[0]["params"][0]
    assert weight.device.type == "cpu" and weight.color == "red" and not weight.requires_grad


def test_a_user_module_says_how_it_starts() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4, device="meta"))
            self.register_buffer("steps", torch.empty(2, device="meta"))

        def initial_values(self) -> dict[str, Any]:
            return {"scale": Constant(2.0)}

        def reset_buffers(self) -> None:
            self.steps.fill_(7)

    values = state(materialize_(Named(), device="cpu"))
    assert values["scale"].tolist() == [2.0] * 4 and values["steps"].tolist() == [7.0] * 2

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4, device="meta"))

    with pytest.raises(ValueError, match=r"Silent 'x' holds scale on the meta device .* initial_values\(\)"):
        materialize_(nn.ModuleDict({"x": Silent()}))

    class Forgetful(Silent):
        def initial_values(self) -> dict[str, Any]:
            return {"other": Normal()}

    with pytest.raises(ValueError, match="says nothing about 'scale'"):
        materialize_(Forgetful())


def test_a_part_outside_its_matrix_is_refused() -> None:
    class Wrong(nn.Linear):
        def initial_values(self) -> dict[str, Any]:
            return {"weight": InitSlice(Normal(), (16, 8), (12, 0))}

    with pytest.raises(ValueError, match=r"starting at \(12, 0\) does not lie inside its full shape \(16, 8\)"):
        materialize_(Wrong(8, 8, bias=False, device="meta"), device="cpu")


def test_swapping_keeps_the_object() -> None:
    weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    kept = weight
    swap_parameter_(weight, torch.ones(2, 2))
    assert kept is weight and weight.tolist() == [[1.0, 1.0], [1.0, 1.0]] and weight.requires_grad


# ------------------------------------------------------------------------------------------------------------------ meshes


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process as one of `world` ranks that nobody else plays: enough where no values are exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    debug._clear_sharding_prop_cache()  # it is keyed by mesh, and holds the coordinates of the rank played before
    try:
        yield
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()


class Pair(nn.Module):
    """A column-parallel and a row-parallel weight, a norm and an uneven table."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ottava.RMSNorm(48, device="meta")
        self.fc1 = ottava.Linear(48, 264, bias=True, device="meta")
        self.fc2 = nn.Linear(264, 48, bias=False, device="meta")
        self.table = nn.Embedding(71, 48, device="meta")


PLACEMENTS = {"fc1": Shard(0), "fc2": Shard(1), "norm": Replicate(), "table": Replicate()}


def split_over_tp(model: nn.Module, mesh: Any) -> None:
    for name, placement in PLACEMENTS.items():
        module = getattr(model, name)
        for key, p in list(module.named_parameters(recurse=False)):
            shape = list(p.shape)
            if isinstance(placement, Shard):
                shape[placement.dim] //= mesh.size()
            local = torch.empty(shape, device="meta")
            setattr(module, key, nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False)))


def expected_part(name: str, full: Tensor, dp: tuple[int, int], tp: tuple[int, int]) -> Tensor:
    placement = PLACEMENTS[name.split(".")[0]]
    if isinstance(placement, Shard):
        full = full.chunk(tp[1], placement.dim)[tp[0]]
    parts = full.chunk(dp[1], 0)
    return parts[dp[0]] if dp[0] < len(parts) else full[:0]


@pytest.mark.strict
@pytest.mark.parametrize(
    "dp, tp, replicate", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (3, 2, 1), (2, 2, 2)]
)
def test_every_rank_of_every_mesh_starts_with_its_part(dp: int, tp: int, replicate: int) -> None:
    whole = {n: p.detach() for n, p in materialize_(Pair(), seed=9, device="cpu").named_parameters()}
    for rank in range(replicate * dp * tp):
        with as_rank(rank, replicate * dp * tp):
            mesh = init_device_mesh("cpu", (replicate, dp, tp), mesh_dim_names=("replicate", "dp", "tp"))
            model = Pair()
            split_over_tp(model, mesh["tp"])
            fully_shard(model, mesh=mesh["replicate", "dp"] if replicate > 1 else mesh["dp"])
            assert all(p.is_meta for p in model.parameters())
            materialize_(model, seed=9)
            _, d, t = mesh.get_coordinate()  # type: ignore[misc]
            for name, p in model.named_parameters():
                assert isinstance(p, DTensor)
                assert torch.equal(p.to_local(), expected_part(name, whole[name], (d, dp), (t, tp))), (rank, name)


@pytest.mark.strict
def test_uneven_shards_and_ranks_without_rows() -> None:
    whole = materialize_(nn.Linear(6, 5, device="meta"), device="cpu").weight
    for rank in range(4):  # 5 rows over 4 ranks: 2, 2, 1, 0
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            model = nn.Linear(6, 5, device="meta")
            fully_shard(model, mesh=mesh)
            local = materialize_(model).weight.to_local()  # type: ignore[operator]
            assert torch.equal(local, whole[2 * rank : 2 * rank + 2]) and local.shape[0] == (2, 2, 1, 0)[rank]


@pytest.mark.strict
def test_a_process_group_and_fsdp_together() -> None:
    """The table is split by a plain process group, then its rows by FSDP, which knows nothing of the former."""
    whole = materialize_(
        nn.ModuleDict({"t": VocabParallelEmbedding(250, 8, pad_to_multiple=64, device="meta")}), device="cpu"
    )
    full = whole["t"].weight  # type: ignore[index, operator, union-attr]
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            for group in (mesh["tp"].get_group(), mesh["tp"]):
                table = VocabParallelEmbedding(250, 8, group, pad_to_multiple=64, device="meta")
                model = nn.Sequential()
                model.add_module("t", table)
                fully_shard(model, mesh=mesh["dp"])
                materialize_(model)
                expected = full.chunk(2)[rank % 2].chunk(2)[rank // 2]
                assert torch.equal(table.weight.to_local(), expected)  # type: ignore[operator, attr-defined]


@pytest.mark.strict
def test_two_dimensional_shards() -> None:
    whole = draw("weight", (130, 50), Normal())
    for rank in range(6):
        with as_rank(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))

            class Matrix(nn.Module):
                def initial_values(self) -> dict[str, Any]:
                    return {"weight": Normal()}

            module = Matrix()
            shape = [len(range(130)[rank // 2 * 44 :][:44]), 25]
            local = torch.empty(shape, device="meta")
            split = DTensor.from_local(
                local, mesh, [Shard(0), Shard(1)], run_check=False, shape=torch.Size((130, 50)), stride=(50, 1)
            )
            module.weight = nn.Parameter(split)
            materialize_(module)
            part = whole[rank // 2 * 44 :][:44, rank % 2 * 25 :][:, :25]
            assert torch.equal(module.weight.to_local(), part)  # type: ignore[attr-defined]


def test_unequal_tensor_parallel_parts_under_fsdp_are_refused_by_name() -> None:
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(4, 7, bias=False, device="meta")
        local = torch.empty(4, 4, device="meta")
        split = DTensor.from_local(
            local, mesh["tp"], [Shard(0)], run_check=False, shape=torch.Size((7, 4)), stride=(4, 1)
        )
        model.weight = nn.Parameter(split)
        fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(ValueError, match="make 7 a multiple of 2"):
            materialize_(model)


def test_a_sharded_weight_is_never_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal largest
        result = empty(*args, **kwargs)
        largest = max(largest, 0 if result.is_meta else result.numel())
        return result

    with as_rank(1, 8):
        model = ottava.Linear(64, 4096, bias=False, device="meta")
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        monkeypatch.setattr(initialize.torch, "empty", watched)
        materialize_(model)
        assert 0 < largest <= 64 * 64  # one slab; the shard itself has 512 rows
        assert model.weight.to_local().shape == (512, 64)  # type: ignore[operator]
