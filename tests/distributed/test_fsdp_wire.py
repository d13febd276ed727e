"""What travels: half of bf16's bytes, one amax reduction a step, bytes that are up to date, and memory that is freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ottava
from distributed.fsdp_cases import (
    HIDDEN,
    ONE_DIRECTION,
    RECIPES,
    Counted,
    adamw,
    batch,
    build,
    compare_gathered,
    mesh_of,
    same_layout,
    step,
    two_ranks,
)
from distributed.ranks import Ranks
from ottava.distributed import fsdp
from ottava.quant import weight_gather, weight_renew
from ottava.quant.scale_group import ScaleGroup
from ottava.quant.scheme import Scheme
from ottava.quant.weight import State, Weight
from ottava.quant.weight_memory import WeightMemory
from ottava.quant.weight_place import Place
from ottava.quant.weight_state import fresh, note_made


def wire_bytes(name: str) -> tuple[int, int, int] | None:
    """(bytes of one step with FP8 weights, with bf16 weights, MAX all-reduces of an optimizer step)."""
    mesh = two_ranks()
    if mesh is None:
        return None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def linears() -> nn.Sequential:
        return nn.Sequential(*(ottava.Linear(HIDDEN, HIDDEN, bias=False, device="cpu") for _ in range(3)))

    model, plain = linears(), linears()
    fsdp.shard_model(model, mesh, RECIPES[name], mp_policy=policy)
    for layer in plain:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(plain, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model)
    fsdp.attach(optimizer, model)
    with Counted() as fp8:
        step(model, name, 0, 0, mesh.get_group())
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor) and parameter.grad.dtype == torch.float32
    with Counted() as bf16:
        step(plain, name, 0, 0, mesh.get_group())
    with Counted() as counted:
        optimizer.step()
    return fp8.bytes, bf16.bytes, counted.maxima


@pytest.mark.parametrize(("name", "bar"), [(n, 0.3 if n.startswith("nvfp4") else 0.55) for n in RECIPES])
def test_bytes_on_the_wire_and_one_amax_reduction_a_step(four_ranks: Ranks, name: str, bar: float) -> None:
    for fp8, bf16, maxima in filter(None, four_ranks.run(wire_bytes, name)):
        assert (
            bf16 == 2 * 3 * 2 * HIDDEN * HIDDEN // 2
        )  # forward and backward, 3 weights, 2 bytes, half of each on a rank
        assert 0 < fp8 <= bar * bf16
        assert maxima == 1


def stale() -> list[str] | None:
    """An optimizer's changes are noticed by the next forward; other changes of the masters must be told."""
    mesh = mesh_of("3 uneven")
    if mesh is None:
        return None
    errors: list[str] = []

    def attempt() -> None:
        try:
            step(model, "current", 0, 0)
        except ValueError as error:
            errors.append(str(error))
        else:
            errors.append("")

    model = build(1)
    fsdp.shard_model(model, mesh, RECIPES["current"])
    optimizer = adamw(model)
    attempt()  # fresh from the start, though FSDP moves uneven shards into new memory now
    optimizer.step()
    attempt()  # the forward has seen that an optimizer stepped
    compare_gathered(model, "current")
    fsdp.refresh(model)
    attempt()
    state = model.state_dict()
    next(iter(v for n, v in state.items() if n.endswith("norm_linear.weight")))._local_tensor.mul_(2)
    attempt()  # stale by a write into the state dict, as a checkpoint loader does it
    fsdp.refresh(model)
    compare_gathered(model, "current")
    model.load_state_dict({n: v.clone() for n, v in state.items()})  # refreshes by itself
    compare_gathered(model, "current")
    attempt()
    handle = fsdp.attach(optimizer, model)
    optimizer.step()
    attempt()
    handle.remove()
    optimizer.step()
    attempt()
    compare_gathered(model, "current")
    return errors


def test_copies_follow_the_optimizer_and_other_changes_are_an_error(four_ranks: Ranks) -> None:
    answers = [a for a in four_ranks.run(stale) if a is not None]
    assert len(answers) == 3
    for errors in answers:
        assert [bool(e) for e in errors] == [False, False, False, True, False, False, False]
        assert "has changed since its FP8 copy was made" in errors[3] and "refresh(model)" in errors[3]


def evaluate_and_free() -> tuple[Tensor, int] | None:
    """Output outside autocast, and the bytes of gathered weights that are left after a forward."""
    mesh = two_ranks()
    if mesh is None:
        return None
    model = build(1)
    fsdp.shard_model(model, mesh, RECIPES["current"])
    kept: list[Tensor] = []

    def look(module: nn.Module, args: Any) -> None:
        weight = module.weight
        assert isinstance(weight, Weight) and weight.state is State.GATHERED
        kept.append(weight.rowwise_data)  # type: ignore[arg-type]

    block: Any = model.blocks[0]
    block.norm_linear.register_forward_pre_hook(look)
    with torch.no_grad():
        y = model(batch(0, 0))
    return y, sum(t.untyped_storage().size() for t in kept)


def test_evaluation_in_high_precision_and_freed_memory(four_ranks: Ranks) -> None:
    model = build(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("weight", "weight0", "weight1")) and "layer_norm" not in name:
                parameter.copy_(ottava.quantize(parameter, RECIPES["current"], role="weight").dequantize())
        expected = model(batch(0, 0))
    for y, left in filter(None, four_ranks.run(evaluate_and_free)):
        assert torch.equal(y, expected)
        assert left == 0


def memories_of(weight: Tensor, scheme: Scheme, world: int, monkeypatch: pytest.MonkeyPatch) -> list[WeightMemory]:
    """What `world` ranks hold, renewed, with the reductions done here."""
    padded = -(-weight.shape[0] // world)
    memories, shards = [], list(weight.chunk(world))
    shards += [weight[:0]] * (world - len(shards))  # as FSDP does
    for rank, shard in enumerate(shards):
        start = min(rank * padded, weight.shape[0])
        place = Place.whole(weight.shape).shard(start, start + shard.shape[0], padded)
        memories.append(WeightMemory("weight", place, ScaleGroup(scheme)))
        memories[-1].bind(("all",))  # type: ignore[arg-type]

    def reduce(known: dict[Any, Tensor], groups: Any) -> None:
        for kind in {key[0] for key in known}:
            keys = [key for key in known if key[0] == kind]
            known.update(dict.fromkeys(keys, torch.stack([known[key] for key in keys]).amax(dim=0)))

    monkeypatch.setattr(weight_renew, "_reduce", reduce)
    weight_renew.renew([(shard.contiguous(), memory) for shard, memory in zip(shards, memories, strict=True)])
    return memories


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 7, 40])
def test_any_shards_of_a_weight_give_the_whole(
    name: str, dtype: torch.dtype, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also empty shards, shards smaller than a block, NaN and infinity."""
    weight = torch.randn(304, 208).to(dtype)
    weight[7, 3], weight[290, 200] = float("nan"), float("inf")
    weight[16:48] = 0
    expected = ottava.quantize(weight, RECIPES[name], role="weight")
    memories = memories_of(weight, Scheme.of(RECIPES[name], "weight"), world, monkeypatch)
    directions = ["rowwise", "columnwise", "both"] if name in ONE_DIRECTION else ["rowwise"]
    for direction in directions:
        for memory in memories:
            memory.gathers_both = direction == "both"
        outputs = [torch.cat(m) for m in zip(*(weight_gather._bytes(m, direction) for m in memories), strict=True)]
        state, _ = weight_gather.fill(memories[-1], outputs, direction, None)
        compared = 0
        for part, tensor in state.parts.items():
            if name not in ONE_DIRECTION or direction == "both" or part.startswith(direction):
                assert torch.equal(tensor, expected._parts[part]), (direction, part)
                assert same_layout(tensor, expected._parts[part])
                compared += 1
        assert compared >= 2


def test_a_weight_with_a_master_is_an_ordinary_tensor_to_others() -> None:
    weight = Weight.mastered("weight", torch.ones(4, 16))
    weight.memory.group.scheme = Scheme("e4m3")
    weight_renew.renew([(weight.master, weight.memory)])  # type: ignore[list-item]
    note_made(weight)
    assert fresh(weight)
    for made in (weight + 1, weight.clone(), torch.zeros_like(weight), weight.to(torch.bfloat16), weight.sum()):
        assert type(made) is Tensor
    for kept in (weight.detach(), weight.view(-1), weight[:2], torch.empty_like(weight), weight.new_zeros(2, 16)):
        assert isinstance(kept, Weight)
    assert fresh(weight)
    assert weight.add_(1) is weight and not fresh(weight)
    assert torch.equal(weight.master, torch.full((4, 16), 2.0))  # type: ignore[arg-type]
    assert "e4m3:tensor" in repr(weight)
