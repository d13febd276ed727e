"""FSDP2 with FP8 on the wire equals one process: bytes, scales, losses and weights, for every recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import ottava
from distributed.fsdp_cases import (
    MESHES,
    ONE_DIRECTION,
    OTHER_RECIPES,
    RECIPES,
    STEPS,
    Counted,
    adamw,
    batch,
    build,
    compare_gathered,
    local_of,
    mesh_of,
    one_process,
    one_rank_mesh,
    step,
    two_ranks,
    whole,
)
from distributed.ranks import Ranks
from ottava.distributed import fsdp


def train(name: str, mesh_name: str, reshard: bool) -> tuple[list[float], dict[str, Tensor], int] | None:
    """Losses, weights at the end, and how many gathered weights were compared."""
    mesh = mesh_of(mesh_name)
    if mesh is None:
        return None
    model = build()
    fsdp.shard_model(model, mesh, RECIPES[name], reshard_after_forward=reshard)
    optimizer, losses = adamw(model), []
    fsdp.attach(optimizer, model)
    group = None if dist.get_world_size() == mesh.size() else mesh.get_group()
    for number in range(STEPS):
        with ottava.autocast(recipe=RECIPES[name], amax_reduction_group=group):
            loss = model(batch(number, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    compared = compare_gathered(model, name)
    assert all(type(t) is Tensor for s in optimizer.state.values() for t in map(local_of, s.values()))
    state = model.state_dict()
    assert all(type(local_of(t)) is Tensor for t in state.values())
    return losses, whole(model), compared


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], Any]:
    return {}


CASES = [
    *((name, "2", True) for name in RECIPES),
    ("current", "2", False),
    ("block", "2", False),
    ("nvfp4", "2", False),
    ("block", "3 uneven", True),
    ("nvfp4", "3 uneven", True),
    *((name, "3 uneven", False) for name in ONE_DIRECTION),
    ("current", "4", True),
    ("delayed", "3 uneven", False),
    *((name, "hsdp", True) for name in ("current", "block", "delayed", "mxfp8")),
]


@pytest.mark.parametrize(("name", "mesh", "reshard"), CASES)
def test_training_equals_one_process(four_ranks: Ranks, references: dict, name: str, mesh: str, reshard: bool) -> None:
    parts = torch.tensor(MESHES[mesh]).numel()
    answers = [a for a in four_ranks.run(train, name, mesh, reshard) if a is not None]
    if (name, parts) not in references:
        torch.set_num_threads(1)
        references[name, parts] = one_process(name, parts)
    losses, weights = references[name, parts]
    assert len(answers) == parts
    for part, (own, own_weights, compared) in enumerate(answers):
        assert compared == 2 * 5 + 1
        assert own[0] == losses[0][part]
        for key, weight in weights.items():
            if name == "delayed" and key.endswith(
                "fwd_amax_history"
            ):  # `refresh` has recorded the amax that the next forward would record
                assert own_weights[key][0, 1::3].all()
                own_weights[key][0] = 0
            if parts == 2:
                assert torch.equal(own_weights[key], weight), key
            else:
                error = (own_weights[key] - weight).norm() / weight.norm().clamp_min(1e-12)
                assert error <= 1e-5, (key, error)
        if parts == 2:
            assert own == [step[part] for step in losses]


def train_alone(name: str) -> bool:
    mesh = one_rank_mesh()
    model, alone = build(1), build(1)
    fsdp.shard_model(model, mesh, (RECIPES | OTHER_RECIPES)[name])
    compare_gathered(model, name)
    optimizer, optimizer_alone = adamw(model), adamw(alone)
    fsdp.attach(optimizer, model)
    for number in range(2):
        losses = step(model, name, number, 0), step(alone, name, number, 0)
        assert torch.equal(*losses)
        optimizer.step(), optimizer_alone.step()
        optimizer.zero_grad(), optimizer_alone.zero_grad()
    # `refresh` has recorded the amax that the next forward would record.
    state = {key: value for key, value in alone.state_dict().items() if not key.endswith("amax_history")}
    weights = whole(model)
    return all(torch.equal(weights[key], value) for key, value in state.items())


@pytest.mark.parametrize("name", [*RECIPES, "dequantized"])
def test_world_size_one(four_ranks: Ranks, name: str) -> None:
    assert all(four_ranks.run(train_alone, name))


def mixed_precision(name: str) -> bool | None:
    """Whether 2 ranks end with the weights of 1 rank that runs their two microbatches, both computing in bf16."""
    alone, pair = one_rank_mesh(), two_ranks()
    if pair is None:
        return None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ends = []
    for mesh, parts in ((pair, [dist.get_rank()]), (alone, [0, 1])):
        model: Any = build()
        fsdp.shard_model(model, mesh, RECIPES[name], mp_policy=policy)
        optimizer = adamw(model)
        fsdp.attach(optimizer, model)
        for number in range(STEPS):
            for part in parts:
                model.set_requires_gradient_sync(part == parts[-1])
                step(model, name, number, part)
            for parameter in model.parameters():
                assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype == torch.float32
                parameter.grad /= len(parts)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(whole(model))
    return all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_bf16_compute_with_float32_masters(four_ranks: Ranks, name: str) -> None:
    assert [a for a in four_ranks.run(mixed_precision, name) if a is not None] == [True, True]


def accumulate(name: str, reshard: bool) -> tuple[dict[str, Tensor], float, int] | None:
    """Gradients of 2 microbatches on each of 2 ranks, their norm, and the all-reduces meanwhile."""
    mesh = two_ranks()
    if mesh is None:
        return None
    model = build(1)
    fsdp.shard_model(model, mesh, RECIPES[name], reshard_after_forward=reshard)
    with Counted() as counted:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            step(model, name, micro, dist.get_rank())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    assert isinstance(norm, DTensor)
    return grads, float(norm.full_tensor()), counted.maxima


@pytest.mark.parametrize(("name", "reshard"), [("block", True), ("block", False), ("mxfp8", True)])
def test_gradient_accumulation(four_ranks: Ranks, name: str, reshard: bool) -> None:
    model = build(1)
    for part in range(2):
        for micro in range(2):
            step(model, name, micro, part)
    norm = torch.stack([p.grad.norm() / 2 for p in model.parameters() if p.grad is not None]).norm()
    for grads, own_norm, maxima in filter(None, four_ranks.run(accumulate, name, reshard)):
        assert maxima == 0
        assert own_norm == pytest.approx(float(norm), rel=1e-6)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(grads[key], parameter.grad / 2, rtol=1e-5, atol=1e-6)


OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "FusedAdam": ottava.optimizers.FusedAdam,
}


def optimize() -> dict[str, bool] | None:
    """For each optimizer: do 2 ranks that see the same data end with the weights of one that is alone?"""
    mesh = two_ranks()
    if mesh is None:
        return None
    equal = {}
    for key, make in OPTIMIZERS.items():
        model, alone = build(1), build(1)
        fsdp.shard_model(model, mesh, RECIPES["block"])
        pairs = [(model, make(model.parameters())), (alone, make(alone.parameters()))]
        fsdp.attach(pairs[0][1], model)
        for number in range(2):
            for each, optimizer in pairs:
                step(each, "block", number, 0)
                optimizer.step()
                optimizer.zero_grad()
        compare_gathered(model, "block")
        weights = whole(model)
        equal[key] = all(torch.equal(weights[n], w) for n, w in alone.state_dict().items())
    return equal


def test_any_optimizer(four_ranks: Ranks) -> None:
    expected = dict.fromkeys(OPTIMIZERS, True)
    assert [a for a in four_ranks.run(optimize) if a is not None] == [expected, expected]


def options_make_no_difference(name: str) -> bool | None:
    """CPU offload, explicit prefetch, and forwards that run before the first backward."""
    mesh = two_ranks()
    if mesh is None:
        return None
    ends = []
    for special in (False, True):
        model: Any = build()
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if special else {}
        fsdp.shard_model(model, mesh, RECIPES[name], **policy)
        if special:
            first, second = model.blocks
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
        optimizer = adamw(model)
        fsdp.attach(optimizer, model)
        for _ in range(2):
            with ottava.autocast(recipe=RECIPES[name]):
                losses = [model(batch(0, part)).square().mean() for part in range(2)]
            losses[0].backward()
            losses[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(whole(model))
    return all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_offload_and_prefetch(four_ranks: Ranks, name: str) -> None:
    assert [a for a in four_ranks.run(options_make_no_difference, name) if a is not None] == [True, True]
