"""Weights that are stored in FP8, sharded by torch's own `fully_shard` or by `shard_model`, trained by FusedAdam.

Compared with one process: the same layers, stored in FP8 too, on the batches of all ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ottava
from distributed.fsdp_cases import (
    RECIPES,
    Counted,
    gathered_weights,
    local_of,
    mesh_of,
    one_rank_mesh,
    two_ranks,
    unsharded,
)
from distributed.ranks import Ranks
from ottava.distributed import fsdp
from ottava.optimizers import FusedAdam
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import State, Weight

HIDDEN, FFN = 160, 288


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    with ottava.quantized_model_init(recipe=RECIPES[name], **options):
        return nn.Sequential(
            ottava.LayerNormMLP(HIDDEN, FFN, activation="swiglu", params_dtype=dtype, device="cpu"),
            ottava.Linear(HIDDEN, 96, params_dtype=dtype, device="cpu"),
        )


def batch(number: int, part: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(10 * number + part)).to(dtype)


def backward(model: nn.Module, name: str, xs: list[Tensor], group: Any = None) -> list[float]:
    """One step's forwards and their backward; the losses."""
    with ottava.autocast(recipe=RECIPES[name], amax_reduction_group=group):
        losses = [model(x).float().square().mean() for x in xs]
    torch.stack(losses).sum().backward()
    return [loss.item() for loss in losses]


def shard(model: nn.Module, name: str, mesh: DeviceMesh, how: str, **options: Any) -> None:
    if how == "shard_model":
        fsdp.shard_model(model, mesh, RECIPES[name], **options)
        return
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def compare(model: nn.Module, alone: nn.Module) -> int:
    """Asserts that gathered bytes and scales are those of the other model's weights; returns how many."""
    expected = dict(alone.named_parameters())
    for direction in ("rowwise", "columnwise"):
        with unsharded(model, direction):
            gathered = gathered_weights(model)
            for key, weight in gathered.items():
                other: Any = expected[key]
                for part in (n for n in weight._parts if n.startswith(direction)):
                    assert torch.equal(weight._parts[part], other._parts[part]), (key, part)
    return len(gathered)


def train(name: str, mesh_name: str, how: str, dtype: torch.dtype) -> tuple[int, bool] | None:
    """(all-reduces of an optimizer step, whether losses and weights are those of one process)"""
    mesh = one_rank_mesh() if mesh_name == "1" else mesh_of(mesh_name)
    if mesh is None:
        return None
    ranks = list(range(mesh.size()))
    me = mesh.mesh.flatten().tolist().index(dist.get_rank())
    model, alone = build(name, dtype), build(name, dtype)
    shard(model, name, mesh, how)
    optimizer, optimizer_alone = FusedAdam(model.parameters(), lr=1e-2), FusedAdam(alone.parameters(), lr=1e-2)
    equal = True
    for number in range(2):
        (own,) = backward(model, name, [batch(number, me, dtype)], mesh.get_group())
        losses = backward(alone, name, [batch(number, part, dtype) for part in ranks], mesh.get_group())
        equal &= own == losses[me]
        for parameter in alone.parameters():
            parameter.grad /= len(ranks)  # type: ignore[operator]
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(parameter.grad, DTensor)
            if len(ranks) <= 2:
                equal &= torch.equal(parameter.grad.full_tensor(), other.grad)  # type: ignore[arg-type]
            else:  # three ranks add in another order: go on from the same gradients
                torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)
                other.grad = parameter.grad.full_tensor()
        with Counted() as counted:
            optimizer.step()
        optimizer_alone.step()
        optimizer.zero_grad(), optimizer_alone.zero_grad()
        assert compare(model, alone) == 3
    return counted.maxima, equal


CASES = [
    *((name, "2", "fully_shard") for name in RECIPES),
    *((name, "3 uneven", "shard_model") for name in ("current", "block", "mxfp8", "nvfp4_1d")),
    ("mxfp8", "1", "fully_shard"),
    ("nvfp4", "1", "shard_model"),
]


@pytest.mark.parametrize(("name", "mesh", "how"), CASES)
def test_training_equals_one_process(four_ranks: Ranks, name: str, mesh: str, how: str) -> None:
    answers = [a for a in four_ranks.run(train, name, mesh, how, torch.float32) if a is not None]
    assert [equal for _, equal in answers] == [True] * len(answers)
    assert {maxima for maxima, _ in answers} == {0 if mesh == "1" else 1}


def test_in_bfloat16(four_ranks: Ranks) -> None:
    answers = [a for a in four_ranks.run(train, "block", "2", "fully_shard", torch.bfloat16) if a is not None]
    assert answers == [(1, True)] * 2


def preserved() -> tuple[bool, bool, bool] | None:
    """Masters start from the rows that were preserved; torch's optimizers change weights, and ranks keep one scale."""
    mesh = two_ranks()
    if mesh is None:
        return None
    model = build("current", preserve_high_precision_init_val=True)
    wholes = {n: p.get_high_precision_init_val() for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    shard(model, "current", mesh, "fully_shard")
    optimizer = FusedAdam(model.parameters(), lr=0.0)
    backward(model, "current", [batch(0, 0)])
    optimizer.step()
    kept = all(
        torch.equal(optimizer.state[p]["master_param"].full_tensor(), wholes[n])
        for n, p in model.named_parameters()
        if n in wholes
    )
    stored = next(local_of(p) for n, p in model.named_parameters() if n in wholes)
    assert isinstance(stored, Weight) and stored.state is State.SHARD and "rows" in repr(stored)
    assert type(stored + 1) is Tensor and torch.equal(stored.dequantize(), stored + 0)
    freed = stored.memory.preserved is None
    for write in (lambda: stored.drop_columnwise(), lambda: torch.save(stored, "/dev/null")):
        with pytest.raises(ValueError):
            write()
    changed = True
    for stock in (torch.optim.AdamW(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=10.0)):
        before = [p.full_tensor() for n, p in model.named_parameters() if n in wholes]
        backward(model, "current", [batch(0, 0)])
        stock.step()
        after = [p.full_tensor() for n, p in model.named_parameters() if n in wholes]
        changed &= not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    scales = [torch.empty(1) for _ in range(mesh.size())]
    dist.all_gather(scales, stored.memory.group.scale_inv, group=mesh.get_group())
    return kept, freed, changed and len(set(map(float, scales))) == 1


def test_preserved_values_and_stock_optimizers(four_ranks: Ranks) -> None:
    for kept, freed, trained in filter(None, four_ranks.run(preserved)):
        assert kept and freed and trained


def mixed() -> bool | None:
    """bf16 compute over weights that stand for float32: do two ranks that see the same data end as one?"""
    alone, pair = one_rank_mesh(), two_ranks()
    if pair is None:
        return None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = []
    for mesh in (pair, alone):
        models.append(build("current"))
        shard(models[-1], "current", mesh, "shard_model", mp_policy=policy)
        optimizer = FusedAdam(models[-1].parameters(), lr=1e-3)
        for number in range(2):
            backward(models[-1], "current", [batch(number, 0)])
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in models[-1].parameters())
            optimizer.step()
            optimizer.zero_grad()
    with unsharded(models[0]), unsharded(models[1]):
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        return all(torch.equal(a.dequantize(), b.dequantize()) for a, b in pairs if isinstance(a, Weight))


def test_bf16_compute(four_ranks: Ranks) -> None:
    assert [a for a in four_ranks.run(mixed) if a is not None] == [True, True]


def load(name: str) -> bool | None:
    """A state dict goes into another model of the same mesh, which then lives on its own."""
    mesh = mesh_of("3 uneven")
    if mesh is None:
        return None
    source, target, start = build(name), build(name), build(name)
    for model in (source, target):
        shard(model, name, mesh, "shard_model")
        backward(model, name, [batch(0, 0)], mesh.get_group())
    FusedAdam(source.parameters(), lr=1e-2).step()
    FusedAdam(target.parameters(), lr=1e-2).step()
    same = build(name)
    same.load_state_dict(start.state_dict())
    shard(same, name, mesh, "fully_shard")
    target.load_state_dict(same.state_dict())
    assert compare(target, start) == 3
    target.load_state_dict(source.state_dict())
    optimizer = FusedAdam(source.parameters(), lr=1e-2)
    before = [local_of(p).dequantize() for p in target.parameters() if isinstance(local_of(p), Weight)]
    backward(source, name, [batch(1, 0)], mesh.get_group())
    optimizer.step()
    after = [local_of(p).dequantize() for p in target.parameters() if isinstance(local_of(p), Weight)]
    moved = [local_of(p).dequantize() for p in source.parameters() if isinstance(local_of(p), Weight)]
    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return unchanged and not any(torch.equal(a, b) for a, b in zip(after, moved, strict=True))


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_state_dicts(four_ranks: Ranks, name: str) -> None:
    assert [a for a in four_ranks.run(load, name) if a is not None] == [True] * 3


def resumed(name: str, kind: type) -> bool | None:
    """`get_state_dict` of a model that has run no forward, as a resumed run asks for: torch takes a step to make the optimizer's state."""
    mesh = mesh_of("3 uneven")
    if mesh is None:
        return None
    saved, fresh = build(name), build(name)
    for model in (saved, fresh):
        shard(model, name, mesh, "fully_shard")
    optimizers = [kind(model.parameters(), lr=1e-2) for model in (saved, fresh)]
    backward(saved, name, [batch(0, 0)], mesh.get_group())
    optimizers[0].step()
    state = get_state_dict(saved, optimizers[0])
    get_state_dict(fresh, optimizers[1])
    set_state_dict(fresh, optimizers[1], model_state_dict=state[0], optim_state_dict=state[1])
    losses = [backward(model, name, [batch(1, 0)], mesh.get_group()) for model in (saved, fresh)]
    return losses[0] == losses[1]


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_states_before_the_first_forward(four_ranks: Ranks, kind: type) -> None:
    assert [a for a in four_ranks.run(resumed, "current", kind) if a is not None] == [True] * 3
