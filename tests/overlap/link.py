"""Layers on a virtual link, with products of a known length: what ranks run.

The engine, its messages and its products are real. A product then lasts until `operations * seconds` have passed since it began, and a
message until its bytes have passed a link of known bandwidth; so what is measured is the schedule, on a machine however loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.nn import product as products
from ottava.nn import wgrad
from ottava.overlap import Engine, VirtualLink, bulk, wrapping
from ottava.overlap.engine import Multiply, Operands
from overlap.cases import Case, build, options

GEMM_S = 0.4  # of one whole product
TOKENS, WIDTH = 512, 256


@contextlib.contextmanager
def stretched(seconds_per_row: float) -> Iterator[None]:
    """Every product of a row takes this long: m rows of forward and dgrad m times, wgrad's as many as its contraction."""
    real = products.product

    def product(a: Any, b: Any, *rest: Any) -> Tensor:
        began = time.perf_counter()
        out = real(a, b, *rest)
        x, y = a[0].data, b[0].data
        operations = x.shape[0] * x.shape[1] * y.shape[0] / (WIDTH * 2 * WIDTH / dist.get_world_size())
        time.sleep(max(0.0, began + operations * seconds_per_row - time.perf_counter()))
        return out

    products.product, wgrad.product = product, product  # type: ignore[assignment]
    try:
        yield
    finally:
        products.product, wgrad.product = real, real  # type: ignore[assignment]


class Sequential(Engine):
    """The same messages, waited for where they are sent."""

    def gather_multiply(
        self, operands: Operands, multiply: Multiply, features: int, under: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Operands]:
        transport = self.transport(operands[0].data)
        assert transport is not None
        whole = bulk.begin_gather(transport, operands)()
        under()
        return multiply(whole), whole

    def multiply_scatter(self, operands: Operands, multiply: Multiply, *rest: Any, **options: Any) -> Any:
        return self.begin_scatter(multiply(operands), [operand.data.shape[0] for operand in operands])

    def begin_gather(self, operands: Operands) -> Callable[[], Operands]:
        transport = self.transport(operands[0].data)
        assert transport is not None
        whole = bulk.begin_gather(transport, operands)()
        return lambda: whole

    def begin_scatter(self, y: Tensor, groups: Any) -> Callable[[Tensor | None], Tensor]:
        transport = self.transport(y)
        assert transport is not None
        total = bulk.begin_scatter(transport, y, groups)(None)
        return lambda bias: total if bias is None else total + bias


def ratios(kind: str, method: str, direction: str, attempts: int, bar: float) -> dict[str, float]:
    """Seconds of forward or backward of a layer with `method`, and one after the other, over those that its parts take together.

    Repeated until the first is below `bar` in all ranks: a stall of the machine makes it longer, nothing makes it shorter.
    """
    size = dist.get_world_size()
    rows = TOKENS if kind == "row" else TOKENS // size
    x = torch.randn(rows, WIDTH // size if kind == "row" else WIDTH, requires_grad=True)
    collectives, moved = _communication(kind, direction, size)
    gemms = 2 if direction == "backward" else 1
    # Each collective is as long as one whole product.
    ideal = GEMM_S * (collectives + gemms)
    best = {"overlapped": float("inf"), "sequential": float("inf")}
    with wrapping(lambda transport: VirtualLink(transport, moved / collectives / GEMM_S)), stretched(GEMM_S / TOKENS):
        for _ in range(attempts):
            for name in best:
                layer = build(Case(kind, "none", method, bias=False), options(method))
                strategy: Any = layer.strategy()  # type: ignore[operator]
                if name == "sequential":
                    strategy.engine = Sequential(strategy.group, strategy.schedule)
                best[name] = min(best[name], _time(layer, x, direction) / ideal)
            if best["overlapped"] <= bar:
                break
    return best


def _communication(kind: str, direction: str, size: int) -> tuple[int, float]:
    """(collectives of a pass, bytes that a rank sends in it), in float32."""
    share = TOKENS * (size - 1) / size * 4
    wide, narrow = 2 * WIDTH, WIDTH
    if direction == "forward":
        return 1, share * (narrow if kind == "column" else wide)
    return (2, share * 2 * narrow) if kind == "column" else (1, share * wide)


def _time(layer: torch.nn.Module, x: Tensor, direction: str) -> float:
    dist.barrier()
    began = time.perf_counter()
    y = layer(x)
    if direction == "backward":
        grad = torch.ones_like(y)
        dist.barrier()
        began = time.perf_counter()
        y.backward(grad)
    took = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)
