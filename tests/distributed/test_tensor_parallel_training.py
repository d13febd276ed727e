"""Tensor parallelism beside what else users do: torch's own `fully_shard` and DTensor styles, clipping, frozen and tied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ottava
from distributed.ranks import Ranks
from distributed.tp_ranks import RECIPES, error, local, part, randomize
from ottava.distributed import split_tensors
from ottava.distributed.whole import whole_state

VOCABULARY, HIDDEN, LENGTH = 96, 128, 16


class Model(nn.Module):
    """torch's own embedding and head around layers of Ottava."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        options = {
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "set_parallel_mode": True,
            "device": "cpu",
            **options,
        }
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            ottava.TransformerLayer(HIDDEN, 256, 4, activation="swiglu", **options) for _ in range(2)
        )
        self.norm = ottava.RMSNorm(HIDDEN, device="cpu")
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            self.embedding.weight.mul_(0.1)
        if tied:
            self.head.weight = self.embedding.weight
        if "tp_mesh" not in options:
            randomize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens_of(step: int, part: int) -> Tensor:
    """[LENGTH + 1, 2]: what data-parallel rank `part` sees in a step."""
    return torch.randint(VOCABULARY, (LENGTH + 1, 2), generator=torch.Generator().manual_seed(10 * step + part))


def train(model: nn.Module, recipe: str, parts: list[int]) -> list[float]:
    """Three clipped steps of AdamW; gradient norms before clipping. parts: the microbatches, whose gradients are averaged."""
    chosen, norms = RECIPES[recipe], []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            for part in parts:
                tokens = tokens_of(step, part)
                logits = model(tokens[:-1])
                losses.append(nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[1:].flatten()))
        torch.stack(losses).sum().backward()
        for parameter in model.parameters() if len(parts) > 1 else ():
            if parameter.grad is not None:
                parameter.grad /= len(parts)  # after backward, where data-parallel ranks average theirs
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
    return norms


def make_mesh(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def freeze(model: Model) -> None:
    mlp = model.layers[0].layernorm_mlp
    for name in mlp.gemm_weights[0]:  # one, or gate and up
        getattr(mlp, name).requires_grad_(False)
    model.layers[1].self_attention.layernorm_qkv.layer_norm_weight.requires_grad_(False)


def against_one_process(spread: nn.Module, whole: nn.Module, recipe: str, mesh: DeviceMesh) -> tuple[float, float]:
    """(worst relative error of a gradient norm, of a weight) after training both."""
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    expected, found = train(whole, recipe, list(range(size))), train(spread, recipe, [rank])
    norms = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    weights = whole_state(spread)
    return norms, max(error(weights[name], p.detach()) for name, p in whole.named_parameters())


def torchs_fully_shard(recipe: str, dp: int, tp: int, frozen: bool) -> tuple[float, float]:
    mesh = make_mesh(dp, tp)
    whole, spread = Model(), Model()
    if frozen:
        freeze(whole)
        freeze(spread)
    split_tensors(spread, mesh["tp"])
    for layer in spread.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(spread, mesh=mesh["dp"])
    if frozen:
        assert not spread.layers[0].layernorm_mlp.fc1_gate_weight.requires_grad
    return against_one_process(spread, whole, recipe, mesh)


# Gradients of two data-parallel ranks are averaged in torch's order; the norm is summed over other parts than in one process.
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8", "delayed"])
def test_torchs_own_fully_shard_after_set_device_mesh(four_ranks: Ranks, recipe: str, frozen: bool) -> None:
    for norms, weights in four_ranks.run(torchs_fully_shard, recipe, 2, 2, frozen):
        assert norms <= 1e-5 and weights <= 1e-5, (norms, weights)


def torchs_styles(recipe: str, tied: bool, shard: bool, sequence_parallel: bool) -> tuple[float, float]:
    mesh = make_mesh(2, 2)
    whole, spread = Model(tied), Model(tied)
    styles = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(spread, mesh["tp"], styles)  # type: ignore[arg-type]
    if tied:
        spread.head.weight = spread.embedding.weight
    split_tensors(spread, mesh["tp"])
    if shard:
        for layer in spread.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(spread, mesh=mesh["dp"])
        assert not tied or spread.head.weight is spread.embedding.weight
        return against_one_process(spread, whole, recipe, mesh)
    expected, found = train(whole, recipe, [0]), train(spread, recipe, [0])
    weights = whole_state(spread)
    errors = [error(weights[name], p.detach()) for name, p in whole.named_parameters()]
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True)), max(errors)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_an_embedding_and_a_head_of_torchs_parallel_styles(
    four_ranks: Ranks, recipe: str, tied: bool, shard: bool
) -> None:
    for norms, weights in four_ranks.run(torchs_styles, recipe, tied, shard, False):
        assert norms <= 1e-5 and weights <= 1e-5, (norms, weights)


# ----------------------------------------------------------------------------------------------------------- by constructor


def meshes_in_constructors(recipe: str) -> tuple[float, float]:
    """Layers that were handed their meshes when they were made, then torch's fully_shard."""
    mesh = make_mesh(2, 2)
    weight = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("weight",))
    whole, spread = Model(), Model(tp_mesh=mesh["tp"], weight_mesh=weight)
    for name, parameter in spread.named_parameters():  # vectors, which start as zeros and ones
        if parameter.dim() == 1:
            local(parameter).data.copy_(part(whole, name, whole.get_parameter(name).detach(), spread, mesh["tp"]))
    split_tensors(spread, mesh["tp"])  # the rest of the model
    for layer in spread.layers:
        assert layer.layernorm_mlp.weight_mesh is weight
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(spread, mesh=mesh["dp"])
    return against_one_process(spread, whole, recipe, mesh)


def test_layers_that_were_made_on_meshes(four_ranks: Ranks) -> None:
    for norms, weights in four_ranks.run(meshes_in_constructors, "current"):
        assert norms <= 1e-5 and weights <= 1e-5, (norms, weights)
