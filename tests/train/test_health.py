"""What counts as healthy, and which gates pass."""

from __future__ import annotations

import math

import pytest

import ottava
from ottava.train.config import GateSection, HealthSection
from ottava.train.exits import NonFinite
from ottava.train.fp8_health import _Passing
from ottava.train.gates import judge
from ottava.train.health import Health

NAN = math.nan


def test_skips_then_rolls_back_then_gives_up():
    health = Health(HealthSection(retries=2))
    assert [health.judge(s, NAN, 1.0) for s in (5, 6, 7)] == ["skip", "skip", "roll back"]
    health.rolled_back()
    assert [health.judge(s, 2.0, math.inf) for s in (5, 6, 7)] == ["skip", "skip", "roll back"]
    health.rolled_back()
    assert [health.judge(s, NAN, NAN) for s in (5, 6)] == ["skip", "skip"]
    with pytest.raises(NonFinite, match=r"Step 7: .* 2 skipped steps in a row and 2 rollbacks"):
        health.judge(7, NAN, NAN)


def test_a_finite_step_beyond_the_failure_forgives():
    health = Health(HealthSection(retries=1))
    assert [health.judge(5, NAN, 1.0), health.judge(6, NAN, 1.0)] == ["skip", "roll back"]
    health.rolled_back()
    assert health.judge(5, 1.0, 1.0) == "fine" and health.rollbacks == 1
    assert health.judge(7, 1.0, 1.0) == "fine" and health.rollbacks == 0
    assert health.trusted and health.judge(8, NAN, 1.0) == "skip" and not health.trusted


def test_a_spike_stands_out_from_the_median_of_the_window():
    health = Health(HealthSection(spike_factor=2.0, spike_window=20))
    assert not any(health.spike(3.0 + 0.01 * i) for i in range(20))
    assert health.spike(6.5) and not health.spike(5.0)
    assert not Health(HealthSection(spike_factor=0.0)).spike(1e9)


def test_gates_look_at_the_steps_after_the_warm_up():
    steps = [{"step": i, "mfu": 0.1 if i <= 2 else 0.4 + 0.01 * i, "peak_reserved_gib": 10.0} for i in range(1, 6)]
    mfu, memory = judge(GateSection(min_mfu=0.5, max_reserved_gib=10.0, warmup_steps=2), steps)
    assert mfu.value == pytest.approx(0.44) and not mfu.passed and mfu.row()[3] == "FAILED by 6.0%"
    assert memory.passed and memory.row() == ("max_reserved_gib", "10.000", "10.000", "passed")
    (nothing,) = judge(GateSection(min_mfu=0.5, warmup_steps=9), steps)
    assert not nothing.passed and nothing.row()[2] == "nothing"


def test_the_operands_of_every_product_of_a_module_have_a_name():
    experts = _Passing("layers.0.experts", ottava.GroupedLinear(3, 32, 32, device="cpu"))
    assert [experts.next_forward() for _ in range(3)] == [f"layers.0.experts.{g}." for g in range(3)]
    experts = _Passing("experts", ottava.GroupedLinear(2, 32, 32, device="cpu"))
    assert [experts.next_backward() for _ in range(4)] == ["experts.0.", "experts.1.", None, None]
    mlp = _Passing("mlp", ottava.LayerNormMLP(32, 64, device="cpu"))
    assert [mlp.next_backward() for _ in range(4)] == ["mlp.fc2.", None, "mlp.", None]
