"""The element formats: extremes, steps, the cast and its NaN."""

from __future__ import annotations

import torch

from ottava.kernels.cast import to_e2m1_codes, to_fp8_bytes, unpack
from ottava.quant.formats import E2M1_VALUES, ELEMENTS, NAN_BYTE, e8m0_to_float
from ottava.quant.scheme import Scheme


def test_largest_values_are_those_of_torch() -> None:
    for name in ("e4m3", "e5m2"):
        assert ELEMENTS[name].max == torch.finfo(ELEMENTS[name].dtype).max
    assert ELEMENTS["e2m1"].max == max(E2M1_VALUES) and ELEMENTS["e2m1"].dtype is None


def test_every_finite_byte_survives_a_round_trip() -> None:
    for name in ("e4m3", "e5m2"):
        element = ELEMENTS[name]
        bytes_ = torch.arange(256, dtype=torch.uint8)
        values = bytes_.view(element.dtype).float()
        finite = values.isfinite()
        assert torch.equal(to_fp8_bytes(values, element)[finite], bytes_[finite])


def test_out_of_range_saturates_in_both_formats() -> None:
    for name in ("e4m3", "e5m2"):
        element = ELEMENTS[name]
        big = torch.tensor([element.max * 1.01, 1e30, float("inf"), -1e30, float("-inf")])
        values = to_fp8_bytes(big, element).view(element.dtype).float()
        assert torch.equal(values, element.max * big.sign())


def test_every_nan_becomes_one_byte() -> None:
    nans = torch.tensor([0x7FC00000, 0xFFC00000 - (1 << 32), 0x7F800001], dtype=torch.int32).view(torch.float32)
    for name in ("e4m3", "e5m2"):
        assert set(to_fp8_bytes(nans, ELEMENTS[name]).tolist()) == {NAN_BYTE[name]}
        assert torch.full((1,), NAN_BYTE[name], dtype=torch.uint8).view(ELEMENTS[name].dtype).isnan().all()


def test_ties_go_to_even_in_fp8() -> None:
    # e4m3 near 1 has steps of 1/8: 1 + 1/16 lies between 1 (even) and 1.125, 1 + 3/16 between 1.125 and 1.25 (even).
    got = to_fp8_bytes(torch.tensor([1.0625, 1.1875]), ELEMENTS["e4m3"]).view(torch.float8_e4m3fn).float()
    assert got.tolist() == [1.0, 1.25]


def test_e2m1_rounds_to_nearest_with_ties_to_even() -> None:
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 6.0, -0.25, -5.0, -0.0])
    want = [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 0.0, -4.0, 0.0]
    codes = to_e2m1_codes(x, stochastic=False)
    packed = codes.reshape(1, -1)
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    assert table[packed[0].int()].tolist() == want
    assert codes[-1] == 8  # minus zero keeps its sign


def test_e2m1_packs_the_even_column_in_the_low_half() -> None:
    data = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8)
    assert unpack(data, Scheme.parse("e2m1:1x16")).tolist() == [[0.5, 1.0, 6.0, -6.0]]


def test_stochastic_rounding_keeps_the_mean() -> None:
    x = torch.full((200_000,), 2.3)
    values = torch.tensor(E2M1_VALUES)[to_e2m1_codes(x, stochastic=True).int()]
    assert set(values.unique().tolist()) == {2.0, 3.0}
    # The mean of n draws of variance p(1-p) = 0.21 lies within five standard errors.
    assert abs(values.mean().item() - 2.3) < 5 * (0.21 / 200_000) ** 0.5


def test_stochastic_rounding_leaves_exact_values_alone() -> None:
    exact = torch.tensor(E2M1_VALUES).repeat(1000)
    assert torch.equal(to_e2m1_codes(exact, stochastic=True).int(), torch.arange(8).repeat(1000).int())


def test_exponents_of_blocks_are_exact_at_both_ends() -> None:
    ends = e8m0_to_float(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert ends[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and ends[4].isnan()
