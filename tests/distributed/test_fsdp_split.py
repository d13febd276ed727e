"""Weights in several parameters that are multiplied as one, weights that are recomputed, frozen or tied: all equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from distributed.fsdp_cases import ONE_DIRECTION, RECIPES, adamw, local_of, two_ranks, unsharded
from distributed.ranks import Ranks
from ottava.distributed import fsdp


def losses_of(model: nn.Module, name: str, group: Any, recompute: bool, features: int = 128) -> list[float]:
    """Losses of two steps; both ranks see the same data, so their mean gradient is that of one."""
    optimizer, losses = adamw(model), []
    if any(True for _ in fsdp._mastered(model)):
        fsdp.attach(optimizer, model)
    for number in range(2):
        x = torch.randn(16, 2, features, generator=torch.Generator().manual_seed(number)).requires_grad_()
        with ottava.autocast(recipe=RECIPES[name], amax_reduction_group=group):
            y = ottava.checkpoint(model, x) if recompute else model(x)
            loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def transformer(name: str, recompute: bool) -> bool | None:
    """A TransformerLayer with query, key and value in parameters of their own, one weight of it frozen."""
    mesh = two_ranks()
    if mesh is None:
        return None
    results = []
    for sharded in (True, False):
        torch.manual_seed(3)
        layer: nn.Module = ottava.TransformerLayer(
            128, 256, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=False, device="cpu"
        )
        model = nn.Sequential(layer)
        next(p for n, p in model.named_parameters() if n.endswith("fc1_weight")).requires_grad_(False)
        if sharded:
            fsdp.shard_model(model, mesh, RECIPES[name], recomputed=[layer] if recompute else [])
        results.append(losses_of(model, name, mesh.get_group(), recompute))
    return results[0] == results[1]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_split_weights_with_one_frozen(four_ranks: Ranks, name: str, recompute: bool) -> None:
    assert [a for a in four_ranks.run(transformer, name, recompute) if a is not None] == [True, True]


def shared_memory(name: str) -> bool | None:
    """The parts of one matrix are stacked without copying the bytes that backward multiplies by, or transposes."""
    mesh = two_ranks()
    if mesh is None:
        return None
    model = ottava.Linear(128, 384, parameters_split=("q", "k", "v"), device="cpu")
    fsdp.shard_model(model, mesh, RECIPES[name])
    data = "columnwise_data" if name == "mxfp8" else "rowwise_data"
    with unsharded(model, "columnwise"):
        parts: list[Any] = [getattr(model, n) for n in model.weight_names]
        whole = {id(p.memory.group.joined[data]) for p in parts}
        storages = {p._parts[data].untyped_storage().data_ptr() for p in parts}
    empty = all(p._parts[data].untyped_storage().size() == 0 for p in parts)
    return len(whole) == len(storages) == 1 and empty


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_stacked_rows_lie_in_one_memory_that_is_freed(four_ranks: Ranks, name: str) -> None:
    assert [a for a in four_ranks.run(shared_memory, name) if a is not None] == [True, True]


def not_named(name: str) -> str | None:
    """A forward that runs again in backward, of which shard_model was not told."""
    mesh = two_ranks()
    if mesh is None:
        return None
    model = nn.Sequential(ottava.Linear(128, 128, device="cpu"))
    fsdp.shard_model(model, mesh, RECIPES[name])
    with pytest.raises(ValueError) as error:
        losses_of(model, name, mesh.get_group(), recompute=True)
    return str(error.value)


@pytest.mark.parametrize("name", ONE_DIRECTION)
def test_a_recomputed_module_has_to_be_named(four_ranks: Ranks, name: str) -> None:
    for message in filter(None, four_ranks.run(not_named, name)):
        assert message.startswith("0.weight") and "recomputed=" in message


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ottava.Linear(160, 160, device="cpu")
        self.second = ottava.LayerNormLinear(160, 160, device="cpu")
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def tied(name: str) -> bool | None:
    mesh = two_ranks()
    if mesh is None:
        return None
    results = []
    for sharded in (True, False):
        torch.manual_seed(3)
        model = Tied()
        if sharded:
            fsdp.shard_model(model, mesh, RECIPES[name])
            assert model.first.weight is model.second.weight
        results.append(losses_of(model, name, mesh.get_group(), False, 160))
        weight = model.first.weight
        results[-1].append(float(local_of(weight.full_tensor() if sharded else weight).double().sum()))  # type: ignore[operator]
    return results[0] == results[1]


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_tied_weights(four_ranks: Ranks, name: str) -> None:
    assert [a for a in four_ranks.run(tied, name) if a is not None] == [True, True]
