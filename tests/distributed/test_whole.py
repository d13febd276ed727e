"""Names that modules have in one process, whatever is around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ottava.distributed.whole import modules_of, whole_state


class Holder(nn.Module):
    """Calls a part of its own as DDP calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        DistributedDataParallel,
        torch.compile,
        lambda model: torch.compile(DistributedDataParallel(model)),
        lambda model: DistributedDataParallel(torch.compile(model)),
    ],
)
def test_wrappers_leave_names_alone(one_rank: None, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Holder()
    names = {id(module): name for name, module in modules_of(wrap(model))}
    assert names[id(model)] == "" and names[id(model.module)] == "module"
    assert list(whole_state(wrap(model))) == ["module.weight"]
