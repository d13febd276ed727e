"""A block with overlapped layers, compiled whole and run as it is: what ranks run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ottava
from distributed.tp_ranks import RECIPES
from ottava.overlap import measuring
from overlap.cases import options


class Block(nn.Module):
    """A layer by columns, torch's own between, one by rows, and what surrounds them."""

    def __init__(self, method: str) -> None:
        super().__init__()
        common: dict[str, Any] = {"device": "cpu", "sequence_parallel": True, "tp_size": dist.get_world_size()}
        self.first = ottava.LayerNormLinear(64, 64, parallel_mode="column", **common)
        self.second = ottava.Linear(64, 64, parallel_mode="row", **common)
        for layer in (self.first, self.second):
            layer.overlap = options(method)
            layer.set_tensor_parallel_group(dist.group.WORLD)
        generator = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(x))) * 0.5


def compiled_equals_eager(method: str, recipe: str) -> dict[str, Any]:
    """By tensor, whether the compiled block, without a single break in its graph, gives the same bits; and who moved bytes in it."""
    torch._dynamo.reset()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5 + dist.get_rank()))

    def step(block: Block, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        inp = x.clone().requires_grad_()
        with ottava.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = function(inp)
        y.square().sum().backward()
        grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        assert inp.grad is not None
        with torch.no_grad():  # evaluation
            again = function(x)
        return {"y": y.detach(), "x": inp.grad, "evaluated": again, **grads}

    eager = Block(method)
    expected = step(eager, eager)
    block = Block(method)  # delayed scaling has a state: both begin with the same
    with measuring() as meter:
        found = step(block, torch.compile(block, backend="aot_eager", fullgraph=True))
    return {name: torch.equal(value, found[name]) for name, value in expected.items()} | {
        "moved": sorted(meter.by_name)
    }
