"""FSDP1 equals one process, and only what is equal on all ranks is ever cut into shares."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import ottava
from distributed.data_parallel import (
    HIDDEN,
    RECIPES,
    STEPS,
    Model,
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
from ottava.distributed import apply_recompute, fsdp1, prepare_te_modules_for_fsdp, shard_model_fsdp1, shares
from ottava.nn.base import QuantizedModule
from ottava.nn.initialize import materialize_

CPU = torch.device("cpu")
WEIGHTS_A_LAYER = 4  # qkv, proj, fc1, fc2
reference = cached(one_process)


def whole(model: FSDP) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}


def pairs() -> Any:
    """The group of ranks (0, 1) or (2, 3), whichever this rank is in."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def grid() -> DeviceMesh:
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))


# --------------------------------------------------------------------------------------------------------------- one process


def trained(name: str, world: int, strategy: str, orig: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, scales). Of two ranks there are two pairs; the second sees larger data, which must not reach the first."""
    warnings.simplefilter("ignore")
    group: Any = pairs() if world == 2 else grid() if strategy == "HYBRID_SHARD" else None
    model = shard_model_fsdp1(build(), group, strategy=ShardingStrategy[strategy], use_orig_params=orig, device=CPU)
    rank = dist.get_rank()
    train(model, name, rank % world, scale=1.0 if rank < world else 5.0)
    return whole(model), scales_of(model)


CASES = [
    *((name, 2, "FULL_SHARD", True) for name in RECIPES),
    ("delayed", 2, "FULL_SHARD", False),
    ("block", 4, "FULL_SHARD", True),
    ("delayed", 4, "SHARD_GRAD_OP", True),
    ("current", 4, "SHARD_GRAD_OP", False),
    ("delayed", 4, "NO_SHARD", True),
    ("delayed", 4, "HYBRID_SHARD", True),
    ("current", 4, "HYBRID_SHARD", False),
]


@pytest.mark.parametrize(("name", "world", "strategy", "orig"), CASES)
def test_training_equals_one_process(four_ranks: Ranks, name: str, world: int, strategy: str, orig: bool) -> None:
    answers = four_ranks.run(trained, name, world, strategy, orig)[:world]
    expected = reference(name, world)
    weights = {k: v for k, v in expected.items() if ".delayed." not in k}
    for own, scales in answers:
        assert own.keys() == weights.keys()
        assert largest_error(own, weights) <= 1e-5
        assert largest_error(scales, {k: v for k, v in expected.items() if k in scales}) <= 1e-5
        assert all(torch.equal(scales[k], answers[0][1][k]) for k in scales)
    if name == "delayed":
        assert any((v != 1).any() for k, v in answers[0][1].items() if k.endswith("_scale"))


def mixed() -> float:
    """Largest error against masters in float32 and a copy in bfloat16, made by hand."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_model_fsdp1(build(), mixed_precision=precision, device=CPU)
    train(model, "current", dist.get_rank())
    masters = build()
    low, optimizer = copy.deepcopy(masters).bfloat16(), adamw(masters)
    for step in range(STEPS):
        low.load_state_dict(masters.state_dict())
        for master in masters.parameters():
            master.grad = torch.zeros_like(master)
        for part in range(dist.get_world_size()):
            low.zero_grad()
            with ottava.autocast(recipe=RECIPES["current"]):
                loss_of(low(batch(step, part).bfloat16())).backward()
            for master, parameter in zip(masters.parameters(), low.parameters(), strict=True):
                assert parameter.grad is not None and master.grad is not None
                master.grad += parameter.grad.float() / dist.get_world_size()
        optimizer.step()
    return largest_error(whole(model), dict(masters.named_parameters()))


def test_mixed_precision_keeps_float32_masters(four_ranks: Ranks) -> None:
    assert max(four_ranks.run(mixed)) <= 1e-5


def accumulated(name: str) -> tuple[float, float, float]:
    """(largest error of weights, norms of gradients here and in one process) with two microbatches, the first under no_sync."""
    group, part = pairs(), dist.get_rank() % 2
    model = shard_model_fsdp1(build(), group, device=CPU)
    single = build()
    mine, theirs = adamw(model), adamw(single)
    for step in range(2):
        for micro in range(2):
            first, last = micro == 0, micro == 1
            with ottava.autocast(recipe=RECIPES[name]):
                loss = loss_of(model(batch(step, 2 * micro + part), first=first))
            if last:
                loss.backward()
            else:
                with model.no_sync():
                    loss.backward()
            with ottava.autocast(recipe=RECIPES[name]):
                losses = [loss_of(single(batch(step, 2 * micro + p), first=first)) for p in range(2)]
            torch.stack(losses).sum().backward()
        for parameter in single.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        norm = model.clip_grad_norm_(0.5).item()
        expected = nn.utils.clip_grad_norm_(single.parameters(), 0.5).item()
        mine.step(), theirs.step(), mine.zero_grad(), theirs.zero_grad()
    return largest_error(whole(model), dict(single.named_parameters())), norm, expected


@pytest.mark.parametrize("name", ["delayed", "block", "mxfp8"])
def test_cached_weights_no_sync_and_clipping_equal_one_process(four_ranks: Ranks, name: str) -> None:
    for error, norm, expected in four_ranks.run(accumulated, name):
        assert error <= 1e-5
        assert norm > 0.5 and abs(norm / expected - 1) <= 1e-5


# -------------------------------------------------------------------------------------------------------------------- shares


class Counted(shares.Share):
    """Counts shares and gathers."""

    made: list[tuple[int, int]] = []  # (bytes of the tensor, bytes kept)
    gathers = 0

    def __init__(self, tensor: Tensor, group: Any) -> None:
        super().__init__(tensor, group)
        Counted.made.append((self.nbytes, self.part.numel()))

    def gather(self) -> Tensor:
        Counted.gathers += 1
        return super().gather()


def cut(strategy: str, recompute: str) -> tuple[list[tuple[int, int]], int, bool, list[bool]]:
    """(shares made in one step, gathers, gradients equal to those without preparation, modules with the right group)."""
    warnings.simplefilter("ignore")
    Counted.made, Counted.gathers = [], 0
    fsdp1.Share = Counted  # type: ignore[misc]
    group = pairs()
    gradients = []
    for prepared in (False, True):
        model = apply_recompute(build(), recompute)
        wrapped = FSDP(
            model, process_group=group, sharding_strategy=ShardingStrategy[strategy], use_orig_params=True,
            auto_wrap_policy=fsdp1.wrap_layers(model), device_id=CPU,
        )  # fmt: skip
        if prepared:
            prepare_te_modules_for_fsdp(wrapped)
            prepare_te_modules_for_fsdp(wrapped)  # a second time changes nothing
        with ottava.autocast(recipe=RECIPES["block"]):
            loss = loss_of(wrapped(batch(0, dist.get_rank())))
        loss.backward()
        gradients.append([p.grad.clone() for p in wrapped.parameters() if p.grad is not None])
    fsdp1.Share = shares.Share  # type: ignore[misc]
    groups = [m.fsdp_group is group and m.delayed.data_groups == (group,) for m in _quantized(wrapped)]
    return Counted.made, Counted.gathers, all(map(torch.equal, *gradients)), groups


def _quantized(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, QuantizedModule)]


@pytest.mark.parametrize(
    ("strategy", "recompute", "expected"),
    [("FULL_SHARD", "none", 2 * WEIGHTS_A_LAYER + 1), ("SHARD_GRAD_OP", "none", 0), ("FULL_SHARD", "full", 1)],
)
def test_fp8_weights_wait_for_backward_as_shares(
    four_ranks: Ranks, strategy: str, recompute: str, expected: int
) -> None:
    kv = HIDDEN + 2 * HIDDEN // 2
    layer = [HIDDEN * kv, HIDDEN * HIDDEN, HIDDEN * 2 * 96, 96 * HIDDEN]
    sizes = [32 * HIDDEN] if expected == 1 else (layer + layer + [32 * HIDDEN])[:expected]
    for made, gathers, equal, groups in four_ranks.run(cut, strategy, recompute):
        assert [whole for whole, _ in made] == sizes, "weights alone are cut, one byte an element"
        assert all(kept == -(-whole // 2) for whole, kept in made)
        assert gathers == expected and equal
        assert len(groups) == 2 * 3 + 1 and all(groups)


def cached_bytes() -> tuple[int, int, bool]:
    """(bytes kept for later microbatches, bytes of whole copies, whether what comes back is the copy)."""
    model = shard_model_fsdp1(
        ottava.Linear(64, 48, device="cpu"), device=CPU
    )  # the root wraps an Ottava module directly
    linear = model.module
    with FSDP.summon_full_params(model, writeback=False):
        weight = ottava.quantize(linear.weight.detach(), RECIPES["current"], role="weight")
    with ottava.autocast(recipe=RECIPES["current"]):
        model(torch.randn(16, 64), is_first_microbatch=True)
    kept = sum(
        t.part.nbytes for t in dict.__getitem__(linear._weight_cache, 0)[0].values() if isinstance(t, shares.Share)
    )
    again = linear._weight_cache.get(0)
    return kept, 64 * 48, torch.equal(again.rowwise_data, weight.rowwise_data)


def test_cached_weights_are_kept_as_shares(four_ranks: Ranks) -> None:
    for kept, everything, same in four_ranks.run(cached_bytes):
        assert kept == everything // 4 and same


def strange_tensors() -> bool:
    """Sizes that do not divide, strides, gaps, dtypes: all come back as they were."""
    group = dist.group.WORLD
    ramp = torch.arange(210, dtype=torch.float32)
    tensors = [
        ramp[:7],
        ramp[:1],
        ramp.view(5, 42).t(),
        ramp.view(5, 6, 7).permute(2, 0, 1),
        ramp.view(10, 21)[:, 3:9],
        ramp.to(torch.bfloat16).view(70, 3),
        ramp.to(torch.float8_e4m3fn)[1:],
        ramp.long(),
    ]
    back = [shares.Share(t, group).gather() for t in tensors]
    equal = all(torch.equal(a.float(), b.float()) and a.dtype == b.dtype for a, b in zip(tensors, back, strict=True))
    return equal and back[2].stride() == tensors[2].stride()


def test_shares_of_any_tensor_come_back(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(strange_tensors))


# ------------------------------------------------------------------------------------------------------------------- groups


def given_group() -> tuple[bool, Tensor]:
    """`autocast` names a group of this rank alone: it wins, and statistics differ between ranks."""
    alone = [dist.new_group([r]) for r in range(4)][dist.get_rank()]
    model = shard_model_fsdp1(build(), device=CPU)
    train(model, "delayed", dist.get_rank(), amax_reduction_group=alone)
    state = model.module.head.delayed
    return state.group is alone, state.fwd_amax_history[:, 0].amax()


def test_the_group_given_to_autocast_wins(four_ranks: Ranks) -> None:
    answers = four_ranks.run(given_group)
    assert all(won for won, _ in answers)
    assert len({amax.item() for _, amax in answers}) == 4


# ------------------------------------------------------------------------------------------------------------- deferred init


class Tied(nn.Module):
    """The deeper of two tied weights comes first by name and last by depth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(ottava.TransformerLayer(HIDDEN, 96, 4, device="meta"))
        self.front = nn.ModuleDict({"embed": nn.Embedding(48, HIDDEN, device="meta")})
        self.head = nn.Linear(HIDDEN, 48, bias=False, device="meta")
        self.head.weight = self.front["embed"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.front["embed"](tokens)))


def deferred() -> tuple[dict[str, Tensor], bool]:
    """(the start, whether a step runs)."""
    model = shard_model_fsdp1(Tied(), seed=7, device=CPU)
    start = whole(model)
    with ottava.autocast(recipe=RECIPES["delayed"]):
        loss = loss_of(model(torch.arange(32).view(16, 2)))
    loss.backward()
    return start, bool(loss.isfinite())


def test_deferred_init_starts_as_one_process(four_ranks: Ranks) -> None:
    expected = dict(materialize_(Tied(), seed=7, device="cpu").named_parameters())
    for start, ran in four_ranks.run(deferred):
        assert ran and start.keys() == expected.keys()
        assert all(torch.equal(start[k], expected[k]) for k in expected)


def documented() -> tuple[Tensor, float]:
    """TransformerEngine's way: on meta, wrapped at TransformerLayer, without a param_init_fn, then prepared."""
    torch.manual_seed(3)
    model = FSDP(
        nn.Sequential(*(ottava.TransformerLayer(HIDDEN, 96, 4, fuse_qkv_params=True, device="meta") for _ in range(2))),
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={ottava.TransformerLayer}),
        device_id=CPU,
    )
    prepare_te_modules_for_fsdp(model)
    start = whole(model)["0.layernorm_mlp.fc1_weight"]
    with ottava.fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"], fp8_group=dist.group.WORLD):
        loss = loss_of(model(batch(0, dist.get_rank())))
    loss.backward()
    return start, loss.item()


def test_the_documented_example_runs(four_ranks: Ranks) -> None:
    answers = four_ranks.run(documented)
    for start, _ in answers:
        assert torch.equal(start, answers[0][0]) and 0.02 < start.float().std() < 0.026
    assert len({loss for _, loss in answers}) == 4


# ------------------------------------------------------------------------------------------------------------------ mistakes


def messages() -> list[str]:
    with ottava.quantized_model_init(recipe=RECIPES["current"]):
        stored = nn.Sequential(ottava.Linear(64, 64, device="cpu"))
    other = fsdp1.param_init_fn(Tied())
    attempts = [
        lambda: shard_model_fsdp1(stored, device=CPU),
        lambda: fsdp1.ddp(stored),
        lambda: prepare_te_modules_for_fsdp(build()),
        lambda: shard_model_fsdp1(build(), strategy=ShardingStrategy.HYBRID_SHARD, device=CPU),
        lambda: shard_model_fsdp1(build(), grid(), strategy=ShardingStrategy.FULL_SHARD, device=CPU),
        lambda: shard_model_fsdp1(Model(device="meta"), param_init_fn=other, device=CPU),
    ]
    said = []
    for attempt in attempts:
        with pytest.raises(ValueError) as error:
            attempt()
        said.append(str(error.value))
    return said


def test_mistakes_are_named(four_ranks: Ranks) -> None:
    for said in four_ranks.run(messages):
        for message, part in zip(
            said,
            [
                "Sequential.0.weight is stored in FP8",
                "Sequential.0.weight is stored in FP8",
                "got Model: wrap it first",
                "HYBRID_SHARD was given one group",
                "FULL_SHARD was given a group of replicas",
                "no part of the model it was made for",
            ],
            strict=True,
        ):
            assert part in message
