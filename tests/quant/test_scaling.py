"""amax -> scale: every rule at its edges, written out again in plain Python where that is possible."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ottava.quant.formats import e8m0_to_float
from ottava.quant.scaling import (
    FLOAT32_MAX,
    amax_of,
    delayed_scale,
    delayed_update,
    e8m0_from_amax,
    roll_history,
    round_down_to_power_of_two,
    scale_from_amax,
)

INF, NAN = math.inf, math.nan


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------------------- amax


def test_amax_ignores_nan_and_keeps_infinity() -> None:
    assert amax_of(t(1.0, NAN, -3.0)).tolist() == [3.0]
    assert amax_of(t(1.0, -INF)).tolist() == [INF]
    assert amax_of(t(NAN, NAN)).tolist() == [0.0]


def test_amax_of_nothing_is_zero() -> None:
    assert amax_of(torch.empty(0, 16)).tolist() == [0.0]


def test_amax_is_float32_for_every_input_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert amax_of(torch.tensor([[-2.5]], dtype=dtype)).dtype == torch.float32


# --------------------------------------------------------------------------------------------------------- current scaling


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
def test_scale_is_one_float32_division(fp8_max: float) -> None:
    """numpy divides float32 by float32 and rounds once."""
    amax = torch.rand(10_000) * 100 + 1e-3
    want = np.float32(fp8_max) / amax.numpy()
    assert np.array_equal(scale_from_amax(amax, fp8_max, 0.0, False).numpy(), want)


@pytest.mark.parametrize("amax", [0.0, INF, NAN])
def test_scale_is_one_where_amax_says_nothing(amax: float) -> None:
    assert scale_from_amax(t(amax), 448.0, 0.0, False).tolist() == [1.0]
    assert scale_from_amax(t(amax), 448.0, 0.0, True).tolist() == [1.0]


def test_scale_that_overflows_becomes_the_given_largest() -> None:
    tiny = t(1e-42)
    assert scale_from_amax(tiny, 448.0, 0.0, False).tolist() == [FLOAT32_MAX]
    bf16_max = torch.finfo(torch.bfloat16).max
    assert scale_from_amax(tiny, 448.0, 0.0, False, bf16_max).tolist() == [bf16_max]
    assert scale_from_amax(tiny, 448.0, 0.0, True).tolist() == [2.0**127]


def test_epsilon_is_a_floor_for_amax() -> None:
    got = scale_from_amax(t(0.0, 0.1, 2.0), 448.0, 0.5, False)
    assert got.tolist() == [896.0, 896.0, 224.0]


def test_power_of_two_rounds_down() -> None:
    assert round_down_to_power_of_two(t(1.0, 1.99, 2.0, 3.0, 0.75)).tolist() == [1.0, 1.0, 2.0, 2.0, 0.5]
    scale = scale_from_amax(torch.rand(1000) * 9 + 0.1, 448.0, 0.0, True)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


# ------------------------------------------------------------------------------------------------------------------ MXFP8


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
def test_e8m0_is_the_smallest_power_of_two_that_fits(fp8_max: float) -> None:
    amax = torch.rand(5000) * torch.exp2(torch.randint(-100, 100, (5000,)).float())
    ratio = amax * (torch.ones(1) / torch.full((1,), fp8_max))
    exponent = e8m0_from_amax(amax, fp8_max).int()
    scale = torch.ldexp(torch.ones(5000), exponent - 127)
    assert (scale >= ratio).all() and (scale / 2 < ratio).all()


def test_e8m0_edges() -> None:
    assert e8m0_from_amax(t(0.0), 448.0).tolist() == [0]
    assert e8m0_from_amax(t(INF), 448.0).tolist() == [254]
    assert e8m0_from_amax(t(448.0), 448.0).tolist() == [127]
    assert e8m0_from_amax(t(1e-45), 448.0).tolist() == [0]  # 2^-127 is as small as it goes


def test_e8m0_to_float_is_exact_down_to_the_subnormal() -> None:
    bytes_ = torch.arange(255, dtype=torch.uint8)
    want = [math.ldexp(1.0, e - 127) for e in range(255)]
    assert e8m0_to_float(bytes_).tolist() == want


# --------------------------------------------------------------------------------------------------------- delayed scaling


def column(*rows: float) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)[:, None]


def test_window_includes_the_row_that_drops_out_now() -> None:
    """[newest, oldest, ..., ]: the 8 in row 1 is dropped by this update, and still counts for its scale."""
    history, scale = delayed_update(column(2.0, 8.0, 1.0), t(1.0), 3, 448.0, 0, False)
    assert history.flatten().tolist() == [0.0, 1.0, 2.0]
    assert scale.tolist() == [56.0]


def test_columns_that_recorded_nothing_do_not_roll() -> None:
    history = torch.tensor([[0.0, 3.0], [5.0, 5.0], [7.0, 7.0]])
    rolled = roll_history(history, 3)
    assert rolled[:, 0].tolist() == [0.0, 5.0, 7.0]
    assert rolled[:, 1].tolist() == [0.0, 7.0, 3.0]


def test_a_step_that_recorded_nothing_keeps_the_scale_of_the_window() -> None:
    history, scale = delayed_update(column(0.0, 4.0), t(112.0), 2, 448.0, 0, False)
    assert history.flatten().tolist() == [0.0, 4.0] and scale.tolist() == [112.0]


def test_fresh_state_stays_fresh() -> None:
    history, scale = delayed_update(column(0.0, 0.0), t(1.0), 2, 448.0, 0, False)
    assert not history.any() and scale.tolist() == [1.0]


@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_amax_that_is_not_finite_leaves_the_scale(bad: float) -> None:
    assert delayed_scale(t(bad), t(3.0), 448.0, 0).tolist() == [3.0]
    history, scale = delayed_update(column(INF, 1.0, 2.0), t(3.0), 3, 448.0, 0, False)
    assert scale.tolist() == [3.0] and history.flatten().tolist() == [0.0, 2.0, INF]


def test_margin_halves_the_scale_for_each_step() -> None:
    for margin, want in ((0, 224.0), (1, 112.0), (3, 28.0)):
        assert delayed_scale(t(2.0), t(1.0), 448.0, margin).tolist() == [want]


def test_most_recent_looks_at_row_0_alone() -> None:
    history = column(2.0, 8.0, 1.0)
    assert delayed_update(history, t(1.0), 3, 448.0, 0, True)[1].tolist() == [224.0]
    # Nothing recorded: row 0 is 0, so the scale stays though the window knows more.
    assert delayed_update(column(0.0, 8.0), t(5.0), 2, 448.0, 0, True)[1].tolist() == [5.0]


def test_a_scale_that_overflows_becomes_the_largest_float32() -> None:
    assert delayed_scale(t(1e-42), t(1.0), 448.0, 0).tolist() == [FLOAT32_MAX]


def test_window_of_one() -> None:
    history, scale = delayed_update(column(2.0), t(1.0), 1, 448.0, 0, False)
    assert history.flatten().tolist() == [0.0] and scale.tolist() == [224.0]


def test_rows_beyond_the_window_are_left_alone() -> None:
    history, scale = delayed_update(column(2.0, 1.0, 100.0, 200.0), t(1.0), 2, 448.0, 0, False)
    assert history.flatten().tolist() == [0.0, 2.0, 100.0, 200.0] and scale.tolist() == [224.0]


def test_window_longer_than_the_default() -> None:
    history = torch.zeros(2000, 1)
    history[0], history[1999] = 1.0, 64.0
    rolled, scale = delayed_update(history, t(1.0), 2000, 448.0, 0, False)
    assert scale.tolist() == [7.0] and rolled[1998] == 64.0 and rolled[1999] == 1.0
