"""Copies in memory: of which step every part is left, and that what is put back is what was there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.ranks import Ranks
from ottava.train.copies import Copies, newest_whole


def test_the_newest_step_of_which_every_part_is_left():
    both = (2, [7, 8], [7, 8])
    nothing = (0, [-1, -1], [-1, -1])
    assert newest_whole([both, both], 2) == 8
    assert newest_whole([both, nothing], 2) == 8  # rank 0 has what rank 1 lost
    assert newest_whole([(2, [7, 8], [7, -1]), nothing], 2) == 7  # rank 1 died before it had sent its part
    assert newest_whole([nothing, nothing], 2) is None
    assert newest_whole([both, both, both], 3) is None  # of another mesh
    three = (3, [5, -1], [5, -1])
    assert newest_whole([three, nothing, three], 3) == 5
    assert newest_whole([three, nothing, nothing], 3) is None  # two neighbours at a time
    four = (4, [5, -1], [5, -1])
    pair = (0, [-1, -1], [-1, -1])
    assert newest_whole([four, four, pair, pair], 4) is None
    assert newest_whole([four, four, pair, pair], 4, apart=2) == 5  # the neighbour is on the next machine


class World:
    """As much of the trainer's as copies need."""

    def __init__(self) -> None:
        self.rank, self.size, self.local_size = dist.get_rank(), dist.get_world_size(), dist.get_world_size()
        self.device = torch.device("cpu")

    def max(self, values: Any) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum(self, values: Any) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Any, how: Any) -> list[float]:
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, how)
        return numbers.tolist()


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 5 + dist.get_rank())  # parts of different sizes
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _content(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone() for t in (*model.parameters(), *states)]


def case() -> list[str]:
    world: Any = World()
    problems = []
    copies = Copies(share=0.01)
    model, optimizer = _model(world.rank)
    assert copies.due(1) and not Copies(share=0.0).due(10)
    copies.make(3, world, model, optimizer, step_seconds=1.0)
    wanted = _content(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    if world.rank == 1:  # it has died: another process, with nothing
        copies = Copies(share=0.01)
    model, optimizer = _model(100 + world.rank)
    if copies.newest(world) != 3:
        problems.append("not the step of the copies")
    copies.restore(3, world, model, optimizer)
    found = _content(model, optimizer)
    if len(found) != len(wanted) or any(not torch.equal(a, b) for a, b in zip(found, wanted)):
        problems.append("not what was there")
    if optimizer.param_groups[0]["lr"] != 0.1:
        problems.append("not the settings of then")
    if not copies.due(4):
        problems.append("a new rank has no copy of its neighbour")
    copies.make(4, world, model, optimizer, step_seconds=1.0)
    copies.make(5, world, model, optimizer, step_seconds=1.0)
    if [copy.step for copy in copies.own] != [4, 5]:
        problems.append(f"steps {[copy.step for copy in copies.own]}")
    copies.forget()
    if not copies.due(1) or copies.newest(world) is not None:
        problems.append("copies that were forgotten came back")
    if Copies(share=0.01).newest(world) is not None:
        problems.append("something out of nothing")
    rare = Copies(share=5e-324)
    rare.make(3, world, model, optimizer, step_seconds=0.1)
    if rare.due(10**6):
        problems.append("no share of the time is a million steps enough for")
    return problems


@pytest.mark.parametrize("count", [2])
def test_what_a_dead_rank_held_comes_back_from_its_neighbour(count):
    with Ranks(count) as ranks:
        assert ranks.run(case, timeout=120) == [[]] * count
        assert ranks.run(harmed, timeout=120) == [[]] * count


def harmed() -> list[str]:
    """A copy in which a bit has changed since is as good as lost: its neighbour's is used, or the step before, or none."""
    world: Any = World()
    problems = []
    copies = Copies(share=0.01)
    model, optimizer = _model(world.rank)
    wanted = {}
    for step in (3, 4):
        copies.make(step, world, model, optimizer, step_seconds=1.0)
        wanted[step] = _content(model, optimizer)
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    def found(step: int | None, why: str) -> None:
        model, optimizer = _model(100 + world.rank)
        if copies.newest(world) != step:
            problems.append(f"{why}: {copies.newest(world)}, not {step}")
        elif step is not None:
            copies.restore(step, world, model, optimizer)
            if not all(map(torch.equal, _content(model, optimizer), wanted[step])):
                problems.append(f"{why}: not what was there")

    state = (list(copies.own), list(copies.neighbours))
    if world.rank == 1:
        copies.own[1].content[0] ^= 1  # rank 0 has it too
    found(4, "one part")
    copies.own, copies.neighbours = map(list, state)
    if world.rank == 0:
        copies.neighbours[1].content[0] ^= 1
    found(3, "both of one part")
    copies.own, copies.neighbours = map(list, state)
    for copy in (*copies.own, *copies.neighbours):
        copy.about = copy.about.replace(b"0.1", b"0.2")  # the learning rate
    found(None, "what is said of them")
    return problems
