"""The strategy owns placement: what overlaps, or is spread in another way, is a class of its own, and the core runs it as it is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ottava
from distributed.ranks import Ranks
from distributed.tp_ranks import RECIPES
from ottava.distributed.tensor_parallel import Column, Row
from ottava.nn.product import Product
from ottava.nn.strategy import ALONE, Operands, backend


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


class RingColumn(Column):
    """Gather and product as one step: the tokens of each rank are multiplied by themselves, own ones first."""

    multiplied = 0

    def fprop(self, operands: Operands, multiply: Product, biases: list[Tensor]) -> Tensor:
        (operand,) = operands
        tokens = operand.data.shape[0]
        whole = self.gather_tokens(operand)
        parts: dict[int, Tensor] = {}
        for turn in range(self.size):
            rank = (self.rank + turn) % self.size
            rows = slice(rank * tokens, (rank + 1) * tokens)
            scale = whole.scale_inv
            scale = scale[rows] if scale is not None and scale.dim() == 2 else scale
            parts[rank] = multiply([whole._replace(data=whole.data[rows], scale_inv=scale)], biases)
            self.multiplied += 1
        return torch.cat([parts[rank] for rank in range(self.size)])


class PipelinedRow(Row):
    """Product and sum as one step, in two halves of the tokens of each rank."""

    def fprop(self, operands: Operands, multiply: Product, biases: list[Tensor]) -> Tensor:
        (operand,) = operands
        bytes_of = operand.data.unflatten(0, (self.size, 2, -1))  # [rank, half, tokens, k]
        halves = []
        for half in range(2):
            data = bytes_of[:, half].flatten(0, 1)
            product = multiply([operand._replace(data=data)], [])
            halves.append(self.after_gemm(product, biases, [data.shape[0]]))
        return torch.cat(halves)


class _Linear(ottava.Linear):
    """A Linear whose stage asks for a strategy by another name."""

    name_of_strategy = ""

    @property
    def modes(self) -> tuple[str | None, ...]:
        return (self.name_of_strategy or self.parallel.mode,)


def results(mode: str, name: str, recipe: str) -> list[Tensor]:
    """Output and gradients of a layer of small integers, whose sums are exact in any order."""
    group = dist.group.WORLD
    layer = _Linear(64, 64, device="cpu", parallel_mode=mode, sequence_parallel=True, tp_size=2)
    layer.name_of_strategy = name
    layer.set_tensor_parallel_group(group)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator))
    tokens = 16 if mode == "column" else 32
    x = torch.randint(-4, 5, (tokens, layer.in_features), generator=generator).float().requires_grad_()
    with ottava.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    strategy = layer.strategy()
    assert not isinstance(strategy, RingColumn) or strategy.multiplied == 2
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def overlapped_equals_bulk() -> list[tuple[str, str]]:
    """What differs between a strategy that multiplies in chunks and the one that gathers or sums at once."""
    backend().strategies.update({"ring": RingColumn, "pipeline": PipelinedRow})
    wrong = []
    for recipe in ("none", "current pow2", "delayed"):
        for mode, name in (("column", "ring"), ("row", "pipeline")):
            pairs = zip(results(mode, "", recipe), results(mode, name, recipe), strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                wrong.append((mode, recipe))
    return wrong


def test_a_schedule_that_multiplies_chunk_by_chunk_is_a_strategy(ranks: Ranks) -> None:
    for wrong in ranks.run(overlapped_equals_bulk):
        assert wrong == []


def test_one_rank_has_a_strategy_too() -> None:
    layer = ottava.Linear(32, 32, device="cpu")
    assert layer.strategy() is ALONE
    assert copy.deepcopy(layer).strategy() is ALONE
    assert pickle.loads(pickle.dumps(ALONE)) is ALONE
    assert (ALONE.size, ALONE.output_tokens(7)) == (1, 7)
