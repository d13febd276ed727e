"""Steps that the device itself leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ottava.optimizers import FusedAdam
from ottava.train.optimizer import can_step_if, clip_gradients, step_if


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))]
    return [tensor.detach().clone() for tensor in kept]


@pytest.mark.parametrize("kind", ["FusedAdam", "AdamW"])
def test_a_step_that_is_not_fine_changes_nothing_and_a_fine_one_is_a_step(kind: str) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.load_state_dict(model.state_dict())
    fused = {"fused": True} if kind == "AdamW" else {}
    make = FusedAdam if kind == "FusedAdam" else torch.optim.AdamW
    optimizer, plain = make(model.parameters(), lr=0.1, **fused), make(other.parameters(), lr=0.1, **fused)
    assert can_step_if(optimizer)
    x = torch.randn(4, 8)
    for number, fine in enumerate([True, False, True]):
        for module, chosen in ((model, optimizer), (other, plain)):
            chosen.zero_grad()
            module(x).square().sum().backward()
            _, options = clip_gradients(module, chosen, 1.0)
            before = _state(module, chosen)
            if module is model:
                step_if(torch.tensor(fine), chosen, options)
                changed = any(not torch.equal(a, b) for a, b in zip(before, _state(module, chosen)))
                assert changed == fine or number == 0
            elif fine:
                chosen.step(**options)
    assert all(torch.equal(a, b) for a, b in zip(_state(model, optimizer), _state(other, plain), strict=True))


def test_an_optimizer_that_steps_in_eager_torch_cannot_be_asked() -> None:
    assert not can_step_if(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
