"""Ranks that are late, gone, or hold another number of tokens: what ranks run."""

from __future__ import annotations

import datetime
import gc
import os
import random
import resource
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ottava
from distributed.tp_ranks import ALL_RECIPES
from ottava import recipe
from ottava.nn.operand import Operand
from ottava.nn.options import OverlapOptions
from ottava.overlap import Engine, Exchange, Hop, Schedule, Transport, transport_of, wrapping
from overlap.cases import HIDDEN, Case, build, options


class Late(Transport):
    """A transport whose ranks dawdle, each by its own dice."""

    def __init__(self, inner: Transport, longest_s: float) -> None:
        self.inner, self.size, self.rank, self.name = inner, inner.size, inner.rank, inner.name
        self.longest_s, self.dice = longest_s, random.Random(1000 + inner.rank)

    def dawdle(self) -> None:
        if self.dice.random() < 0.3:
            time.sleep(self.dice.random() * self.longest_s)

    def exchange(self, name: str, hops: Sequence[Hop]) -> Exchange:
        self.dawdle()
        exchange = self.inner.exchange(name, hops)
        send, wait = exchange.send, exchange.wait

        def late_send(hop: int, tensors: list[Tensor]) -> None:
            self.dawdle()
            send(hop, tensors)

        def late_wait(hop: int) -> None:
            self.dawdle()
            wait(hop)

        exchange.send, exchange.wait = late_send, late_wait  # type: ignore[method-assign]
        return exchange


def _pair(method: str) -> nn.Module:
    common = {"device": "cpu", "sequence_parallel": True, "tp_size": dist.get_world_size()}
    layers = [ottava.Linear(32, 32, parallel_mode=mode, **common) for mode in ("column", "row")]  # type: ignore[arg-type]
    for layer in layers:
        layer.overlap = OverlapOptions(method=method, minimum_tokens=0)
        layer.set_tensor_parallel_group(dist.group.WORLD)
    return nn.Sequential(*layers)


def train_late(iterations: int, longest_s: float) -> dict[str, Any]:
    """Steps of a column and a row layer with every method in turn: (losses, resident MiB early and late, tensors alive)."""
    models = [_pair(method) for method in ("ring", "pipeline", "bulk")]
    x = torch.randn(32, 32, requires_grad=True)
    found: dict[str, Any] = {"losses": []}
    with wrapping(lambda transport: Late(transport, longest_s)):
        for step in range(iterations):
            model = models[step % len(models)]
            with ottava.autocast(enabled=model is models[0], recipe=recipe.Float8CurrentScaling()):
                loss = model(x).square().sum()
            loss.backward()
            model.zero_grad(set_to_none=True)
            x.grad = None
            if step < len(models):
                found["losses"].append(loss.item())
            elif step >= iterations - len(models):
                assert loss.item() in found["losses"]
            if step == iterations // 5:
                gc.collect()
                found["early"] = _resident_mib()
                found["tensors early"] = _tensors()
    gc.collect()
    return found | {"late": _resident_mib(), "tensors late": _tensors(), "steps": iterations}


def _resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def _tensors() -> int:
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def different_tokens(method: str) -> str:
    """What a rank says when the other has another number of tokens."""
    model = _pair(method)
    x = torch.randn(32 if dist.get_rank() == 0 else 24, 32)
    try:
        with torch.no_grad():
            model(x)
    except ValueError as error:
        time.sleep(0.5)  # the other rank finds it out too
        return str(error)
    return "nothing"


def die_in_the_middle(pipe: Any, rank: int, size: int, store: str, method: str, victim: int, timeout_s: float) -> None:
    """A process: rank `victim` kills itself in its second product; the others send what happened to them, and after how long."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    products = 0

    def multiply(operands: list[Operand]) -> Tensor:
        nonlocal products
        products += 1
        if rank == victim and products == 2:
            os.kill(os.getpid(), 9)
        return operands[0].data @ torch.ones(64, 64)

    engine = Engine(dist.group.WORLD, Schedule.of(method, minimum_tokens=0))
    transport_of(dist.group.WORLD, "auto", torch.device("cpu"))
    dist.barrier()
    began = time.monotonic()
    try:
        steps: Callable[[], Any] = {
            "ring": lambda: engine.gather_multiply([Operand(torch.ones(256, 64))], multiply, 64),
            "pipeline": lambda: engine.multiply_scatter([Operand(torch.ones(256, 64))], multiply, 64)(None),  # type: ignore[misc]
        }[method]
        for _ in range(3):
            steps()
        pipe.send(("finished", time.monotonic() - began))
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", time.monotonic() - began))
    pipe.close()
    os._exit(1)


def group_that_ends() -> tuple[bool, str]:
    """(whether a transport outlives its group, what it says of it)."""
    group = dist.new_group([0, 1])
    transport = transport_of(group, "auto", torch.device("cpu"))
    assert transport is not None and transport.group is group
    Engine(group, Schedule.of("bulk")).begin_gather([Operand(torch.ones(4, 4))])()  # type: ignore[misc]
    alive = weakref.ref(transport)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    try:
        said = str(transport.group)
    except RuntimeError as error:
        said = str(error)
    del transport
    gc.collect()
    return alive() is not None, said


def two_open_at_once() -> list[float]:
    """What arrives in two exchanges that are both open before either sends."""
    transport = transport_of(None, "auto", torch.device("cpu"))
    assert transport is not None
    other = 1 - transport.rank
    into = [torch.zeros(4), torch.zeros(4)]
    exchanges = [transport.exchange(f"number {n}", [Hop(other, other, [into[n]])]) for n in range(2)]
    for n in (1, 0) if transport.rank else (0, 1):
        exchanges[n].send(0, [torch.full((4,), 10.0 * n + transport.rank)])
    for exchange in exchanges:
        exchange.wait(0)
        exchange.finish()
    return [float(tensor[0]) for tensor in into]


def no_tokens(method: str) -> list[tuple[int, ...]]:
    """Shapes of outputs and gradients of layers that nobody gives a token."""
    shapes = []
    for layer, features in zip(_pair(method), (32, 16)):
        x = torch.zeros(0, features, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert x.grad is not None
        shapes += [tuple(y.shape), tuple(x.grad.shape)]
    return shapes


def idle_expert(kind: str, method: str, name: str) -> list[str]:
    """Which results differ from those without overlap, of experts of which one has no token on any rank."""
    found = []
    for overlap in ("none", method):
        case = Case(kind, name, overlap)
        layer = build(case, options(overlap))
        rows = case.tokens if "row" in kind else case.tokens // dist.get_world_size()
        x = torch.randn(rows, HIDDEN // 2 if "row" in kind else HIDDEN, generator=torch.Generator().manual_seed(3))
        x.requires_grad_()
        with ottava.autocast(enabled=name != "none", recipe=ALL_RECIPES[name]):
            y = layer(x, [0, rows])
        y.square().sum().backward()
        assert x.grad is not None
        gradients = {key: parameter.grad for key, parameter in layer.named_parameters()}
        found.append({"y": y.detach(), "dx": x.grad, **gradients})
    return [key for key, value in found[0].items() if not torch.equal(value, found[1][key])]
