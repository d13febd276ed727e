"""Compiled blocks with weights that FSDP2 gathers as FP8, or whose bytes follow masters in one rank: eager bits, one graph for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ottava
from distributed.fsdp_cases import RECIPES, adamw, mesh_of, one_rank_mesh, whole
from distributed.ranks import Ranks
from ottava.distributed import fsdp
from ottava.nn.traced_weights import hand_weights


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = ottava.LayerNormMLP(64, 96, activation="swiglu", device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def _build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(_Block() for _ in range(3)))


def _train(name: str, mesh: Any, backend: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps, and the weights at the end."""
    model, recipe = _build(), RECIPES[name]
    if mesh.size() > 1:
        fsdp.shard_model(model, mesh, recipe)
    else:
        fsdp.keep_whole(model, mesh, recipe, None, None)
    if backend is not None:
        for block in model:
            hand_weights(block)
            block.compile(backend=backend)
    optimizer, losses = adamw(model), []
    group = None if dist.get_world_size() == mesh.size() else mesh.get_group()
    for number in range(2):
        with ottava.autocast(recipe=recipe, amax_reduction_group=group):
            x = torch.randn(
                32, 64, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())
            ).requires_grad_()
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, whole(model)


def compiled_and_eager(name: str, sharded: bool, backend: str) -> tuple[int, int] | None:
    """Compares bits; returns how many graphs were made, and how often tracing was broken off."""
    mesh = mesh_of("2") if sharded else one_rank_mesh()
    if mesh is None:
        return None
    torch._dynamo.reset()
    counters.clear()
    compiled, eager = _train(name, mesh, backend), _train(name, mesh, None)
    assert compiled[0] == eager[0], (compiled[0], eager[0])
    different = [key for key, value in eager[1].items() if not torch.equal(value, compiled[1][key])]
    assert not different, different
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


CASES = [
    ("delayed", True, "aot_eager"),
    *(
        pytest.param(name, sharded, "aot_eager", marks=pytest.mark.extra)
        for name in RECIPES
        for sharded in (True, False)
        if (name, sharded) != ("delayed", True)
    ),
    pytest.param("current", True, "inductor", marks=pytest.mark.extra),
    pytest.param("delayed", False, "inductor", marks=pytest.mark.extra),
]


@pytest.mark.parametrize("name,sharded,backend", CASES)
def test_compiled_blocks_have_the_bits_of_eager_ones(name: str, sharded: bool, backend: str, four_ranks: Ranks) -> None:
    for found in four_ranks.run(compiled_and_eager, name, sharded, backend, timeout=400):
        assert found in (None, (1, 0)), "one graph for all blocks"
