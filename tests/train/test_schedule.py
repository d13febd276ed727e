"""Learning rates, against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch

from ottava.train.config import ScheduleSection
from ottava.train.schedule import lr_fraction


def fractions(steps: int, **options) -> list[float]:
    return [lr_fraction(ScheduleSection(**options), step, steps) for step in range(steps)]


def of_torch(steps: int, warmup: int, after) -> list[float]:
    """Linear warm-up from 1/warmup to 1, then `after`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [up, after(optimizer)], [warmup - 1])
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    return found


def test_cosine_is_torchs():
    want = of_torch(50, 10, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=40, eta_min=0.1))
    assert fractions(50, kind="cosine", warmup_steps=10, final_fraction=0.1) == pytest.approx(want, abs=1e-9)


def test_linear_is_torchs():
    want = of_torch(50, 10, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 40))
    assert fractions(50, kind="linear", warmup_steps=10, final_fraction=0.1) == pytest.approx(want, abs=1e-9)


def test_wsd_is_stable_and_then_comes_down():
    found = fractions(100, kind="wsd", warmup_steps=5, final_fraction=0.0, decay_fraction=0.1)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[4:90] == [1.0] * 86
    assert found[90:] == pytest.approx([0.9 - 0.1 * i for i in range(10)])
    assert fractions(100, kind="wsd", warmup_steps=5)[79:81] == pytest.approx([1.0, 1 - 0.9 / 20])


def test_constant_stays():
    assert fractions(5, kind="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "linear"])
@pytest.mark.parametrize("steps, warmup", [(1, 0), (2, 1), (3, 0), (100, 99)])
def test_ends_are_right_for_short_runs(kind, steps, warmup):
    found = fractions(steps, kind=kind, warmup_steps=warmup, final_fraction=0.25)
    assert all(0 < f <= 1 for f in found)
    if steps > warmup + 1:
        assert found[-1] == pytest.approx(0.25)


def test_warm_up_by_default_is_a_share_of_the_run():
    assert [ScheduleSection().warmup(steps) for steps in (1, 8, 200, 10**6)] == [0, 2, 60, 2000]
    assert fractions(200)[58:61] == pytest.approx([59 / 60, 1.0, 1.0], abs=1e-3)
