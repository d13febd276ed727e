"""`ottava::record_amax_`, `ottava::delayed_update_` and `ottava::delayed_updates_`: what they write, and that nothing else is touched."""

from __future__ import annotations

import pytest
import torch

import ottava  # noqa: F401
from ottava.quant.scaling import delayed_update

ops = torch.ops.ottava


def test_record_raises_one_cell_of_row_0() -> None:
    history = torch.arange(12.0).reshape(4, 3)
    want = history.clone()
    ops.record_amax_(history, torch.tensor([0.5]), 1, 0)
    assert torch.equal(history, want)  # 1 is more than 0.5
    ops.record_amax_(history, torch.tensor([9.0]), 1, 0)
    want[0, 1] = 9.0
    assert torch.equal(history, want)


def test_record_for_an_owner_outside_of_a_backward_pass_schedules_nothing() -> None:
    history = torch.zeros(4, 3)
    ops.record_amax_(history, torch.tensor([9.0]), 0, 123456)
    assert history[0, 0] == 9.0


@pytest.mark.parametrize("window", [1, 2, 4, 6])
@pytest.mark.parametrize("most_recent", [False, True])
def test_update_is_the_rule_in_place(window: int, most_recent: bool) -> None:
    history = torch.rand(6, 5)
    history[0, 2] = 0.0
    history[0, 3] = float("inf")
    scale = torch.rand(5)
    want_history, want_scale = delayed_update(history.clone(), scale.clone(), window, 448.0, 1, most_recent)
    address = history.data_ptr()
    ops.delayed_update_(history, scale, None, window, 448.0, 1, most_recent)
    assert torch.equal(history, want_history) and torch.equal(scale, want_scale) and history.data_ptr() == address


@pytest.mark.parametrize("keeps", [False, True])
def test_updates_of_many_are_those_of_each(keeps: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    histories = [torch.rand(6, n, generator=generator) for n in (3, 5, 1, 3)]
    scales = [torch.rand(h.shape[1], generator=generator) for h in histories]
    want = [(h.clone(), s.clone(), torch.zeros_like(s)) for h, s in zip(histories, scales, strict=True)]
    for history, scale, previous in want:
        ops.delayed_update_(history, scale, previous if keeps else None, 4, 448.0, 0, False)
    previous = [torch.zeros_like(s) for s in scales] if keeps else []
    ops.delayed_updates_(histories, scales, previous, 4, 448.0, 0, False)
    for number, (history, scale, kept) in enumerate(want):
        assert torch.equal(histories[number], history) and torch.equal(scales[number], scale)
        assert not keeps or torch.equal(previous[number], kept)


def test_opcheck() -> None:
    torch.library.opcheck(ops.record_amax_.default, (torch.zeros(4, 3), torch.ones(1), 2, 0))
    torch.library.opcheck(
        ops.delayed_update_.default, (torch.rand(4, 3), torch.ones(3), torch.ones(3), 4, 448.0, 0, False)
    )
    torch.library.opcheck(
        ops.delayed_updates_.default,
        ([torch.rand(4, 3), torch.rand(4, 2)], [torch.ones(3), torch.ones(2)], [], 4, 448.0, 0, False),
    )
