"""What holds for every tensor: shapes with 0, 1 and odd rows, strides, and values from denormal to huge, NaN and infinity."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ottava  # noqa: F401
from ottava.kernels.cast import Buffers
from ottava.quant.formats import e8m0_to_float
from ottava.quant.scheme import Scheme
from quant_cases import SCHEMES, same

ops = torch.ops.ottava
EIGHT_BIT = [s for s in SCHEMES if not s.startswith("e2m1")]
FOUR_BIT = ["e2m1:1x16", "e2m1:16x16"]
DETERMINISTIC = [s for s in SCHEMES if "stochastic" not in s]
POWER_OF_TWO = ["e4m3:tensor:pow2", "e4m3:1x128:pow2", "e5m2:1x128:pow2", "e4m3:128x128:pow2", "e4m3:1x32", "e5m2:1x32"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Magnitudes, from below the smallest float32 denormal of interest to near the largest float32.
SCALES = [1e-44, 1e-38, 1e-20, 1e-4, 1.0, 1e4, 1e20, 1e37]


@st.composite
def matrices(draw: st.DrawFn, multiple: int = 1, special: bool = False, scales: list[float] = SCALES) -> Tensor:
    """[m, k] in a float dtype; rows of different magnitude, some zeros, sometimes a view with other strides."""
    m = draw(st.sampled_from([0, 1, 2, 3, 7, 16, 31, 33, 127, 129, 130])) * multiple
    k = draw(st.sampled_from([1, 2, 5, 16, 31, 32, 33, 64, 127, 128, 129, 200])) * multiple
    if multiple > 1:
        m, k = min(m, 10 * multiple), min(k, 12 * multiple)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layout = draw(st.sampled_from(["plain", "transposed", "every second column", "offset"]))
    shape = {"plain": (m, k), "transposed": (k, m), "every second column": (m, 2 * k), "offset": (m + 1, k)}[layout]
    x = torch.randn(shape, generator=generator)
    x = {
        "plain": lambda: x,
        "transposed": lambda: x.t(),
        "every second column": lambda: x[:, ::2],
        "offset": lambda: x[1:],
    }[layout]()
    dtype = draw(st.sampled_from(DTYPES))
    one, two = draw(st.sampled_from(scales)), draw(st.sampled_from(scales))
    x = torch.where(torch.arange(m)[:, None] % 2 == 0, x * one, x * two)
    x = x.masked_fill(torch.rand(x.shape, generator=generator) < 0.1, 0.0)
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if special and x.numel():
        for value in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=3)):
            x[draw(st.integers(0, m - 1)), draw(st.integers(0, k - 1))] = value
    return x


def quantize(x: Tensor, scheme: str) -> Buffers:
    return Buffers(*ops.quantize(x, scheme, None, None, True, True))


def values(q: Buffers, scheme: str, direction: str = "rowwise", dtype: torch.dtype = torch.float32) -> Tensor:
    if direction == "rowwise":
        return ops.dequantize(q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax, scheme, dtype)
    return ops.dequantize(q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax, scheme, dtype)


def scale_inv(q: Buffers, scheme: Scheme, shape: torch.Size) -> Tensor:
    """The float64 scale of each element, rowwise."""
    scale = e8m0_to_float(q.rowwise_scale_inv) if scheme.kind == "mx" else q.rowwise_scale_inv
    scale = scale.double()
    if scheme.block is None:
        return scale.expand(shape)
    r, c = scheme.block
    return scale.repeat_interleave(r, 0).repeat_interleave(c, 1)[: shape[0], : shape[1]]


def spacing(scheme: Scheme) -> tuple[float, float]:
    """(half a step relative to the value, half a step of the smallest numbers) of the element format."""
    return {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}[scheme.format]


@given(x=matrices(), scheme=st.sampled_from(EIGHT_BIT))
@settings(max_examples=480)
def test_error_is_half_a_step(x: Tensor, scheme: str) -> None:
    """|x - dequantize(quantize(x))| is at most half the distance of neighbouring values, and what the scale saturates."""
    parsed = Scheme.parse(scheme)
    q = quantize(x, scheme)
    back = values(q, scheme).double()
    scale = scale_inv(q, parsed, x.shape)
    relative, absolute = spacing(parsed)
    x64 = x.double()
    # An overflowing scale (denormal input) is capped, so nothing saturates; a scale that rounds does, by an ulp of float32.
    bound = torch.maximum(x64.abs() * relative, absolute * scale) * (1 + 1e-6) + x64.abs() * 2.0**-22
    # Products that leave float32's normal range round to its denormals.
    bound = bound + 2.0**-149
    assert ((x64 - back).abs() <= bound).all(), (x64 - back).abs().max()


@given(x=matrices(multiple=16, scales=[1e-4, 1.0, 1e4]), scheme=st.sampled_from(FOUR_BIT))
@settings(max_examples=160)
def test_error_of_four_bits(x: Tensor, scheme: str) -> None:
    """Half of the widest gap (2 of 6) of the block's largest value, plus the rounding of the block's scale (1/16 of it),
    and for blocks far below the tensor's largest value, whose scale has a floor, half of the smallest step."""
    q = quantize(x, scheme)
    back = values(q, scheme).double()
    assert back.shape == x.shape
    if not x.numel():
        return
    parsed = Scheme.parse(scheme)
    assert parsed.block is not None
    r, c = parsed.block
    amax = x.double().abs().reshape(x.shape[0] // r, r, x.shape[1] // c, c).amax((1, 3))
    amax = amax.repeat_interleave(r, 0).repeat_interleave(c, 1)
    floor = (q.rowwise_amax.double() / (448 * 6)) * 2.0**-6 * 0.25
    assert ((x.double() - back).abs() <= amax * (1 / 6 + 1 / 16 + 0.01) + floor).all()


@given(x=matrices(special=True), scheme=st.sampled_from([s for s in EIGHT_BIT if "rht" not in s]))
@settings(max_examples=480)
def test_columnwise_copy_is_that_of_the_transpose(x: Tensor, scheme: str) -> None:
    q, t = quantize(x, scheme), quantize(x.t(), scheme)
    assert same(q.columnwise_data, t.rowwise_data) and same(q.columnwise_scale_inv, t.rowwise_scale_inv)
    assert same(q.rowwise_data, t.columnwise_data) and same(q.rowwise_scale_inv, t.columnwise_scale_inv)


@given(x=matrices(special=True), scheme=st.sampled_from(EIGHT_BIT))
@settings(max_examples=480)
def test_nan_stays_and_nothing_else_becomes_nan(x: Tensor, scheme: str) -> None:
    q = quantize(x, scheme)
    assert torch.equal(q.rowwise_data == 0x7F, x.isnan())
    assert torch.equal(q.columnwise_data == 0x7F, x.isnan().t())
    assert torch.equal(values(q, scheme).isnan(), x.isnan())


@given(x=matrices(special=True), scheme=st.sampled_from(EIGHT_BIT))
@settings(max_examples=480)
def test_scales_are_positive_and_finite(x: Tensor, scheme: str) -> None:
    q = quantize(x, scheme)
    for scale in (q.rowwise_scale_inv, q.columnwise_scale_inv):
        if scale.dtype == torch.uint8:
            assert (scale < 255).all()  # 255 would be NaN
        else:
            assert scale.isfinite().all() and (scale > 0).all()


@given(x=matrices(special=True), scheme=st.sampled_from(POWER_OF_TWO))
@settings(max_examples=320)
def test_power_of_two_scales_are_powers_of_two(x: Tensor, scheme: str) -> None:
    q = quantize(x, scheme)
    scale = q.rowwise_scale_inv if q.rowwise_scale_inv.dtype == torch.float32 else e8m0_to_float(q.rowwise_scale_inv)
    mantissa = torch.frexp(scale).mantissa
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))


# Inside the normal range, where multiplying and dividing by a power of two is exact.
ORDINARY = [1e-20, 1e-4, 1.0, 1e4, 1e20]


@given(x=matrices(scales=ORDINARY), scheme=st.sampled_from(POWER_OF_TWO))
@settings(max_examples=320)
def test_quantizing_what_was_dequantized_changes_no_value(x: Tensor, scheme: str) -> None:
    """Powers of two only: other scales round again. The scale itself may move where the largest value was rounded up."""
    x = x.float()
    once = values(quantize(x, scheme), scheme)
    again = values(quantize(once, scheme), scheme)
    assert torch.equal(again, once)


@given(x=matrices(special=True), scheme=st.sampled_from(EIGHT_BIT))
@settings(max_examples=240)
def test_strides_do_not_matter(x: Tensor, scheme: str) -> None:
    assert all(same(a, b) for a, b in zip(quantize(x, scheme), quantize(x.contiguous(), scheme), strict=True))


@given(x=matrices(scales=ORDINARY), scheme=st.sampled_from(EIGHT_BIT), sign=st.booleans())
@settings(max_examples=240)
def test_sign_is_symmetric(x: Tensor, scheme: str, sign: bool) -> None:
    a, b = quantize(x, scheme), quantize(-x, scheme)
    assert torch.equal(values(a, scheme), -values(b, scheme)) and same(a.rowwise_scale_inv, b.rowwise_scale_inv)


@given(
    x=matrices(scales=[1e-4, 1.0, 1e4]),
    power=st.integers(-8, 8),
    scheme=st.sampled_from(["e4m3:tensor", "e4m3:1x128", "e4m3:1x32"]),
)
@settings(max_examples=240)
def test_a_power_of_two_moves_into_the_scale(x: Tensor, power: int, scheme: str) -> None:
    """Multiplying the input by a power of two changes scales and no byte (float16 would overflow, so in float32)."""
    x = x.float()
    a, b = quantize(x, scheme), quantize(x * 2.0**power, scheme)
    assert torch.equal(values(b, scheme), values(a, scheme) * 2.0**power)
    nonzero = x.any(1) if ":1x" in scheme else torch.full((x.shape[0],), bool(x.any()))
    assert torch.equal(a.rowwise_data[nonzero], b.rowwise_data[nonzero])


@given(
    rows=st.lists(st.lists(st.floats(0, 100, width=32), min_size=3, max_size=3), min_size=1, max_size=9),
    window=st.integers(1, 9),
    margin=st.integers(0, 3),
    most_recent=st.booleans(),
)
@settings(max_examples=320)
def test_delayed_update_against_a_plain_list(
    rows: list[list[float]], window: int, margin: int, most_recent: bool
) -> None:
    """The rule again, in Python lists: one list of recorded amax a column, the newest last."""
    history, scale = torch.zeros(10, 3), torch.ones(3)
    recorded: list[list[float]] = [[], [], []]
    for row in rows:
        for column, amax in enumerate(row):
            ops.record_amax_(history, torch.tensor([amax]), column, 0)
        before = scale.clone()
        ops.delayed_update_(history, scale, None, window, 448.0, margin, most_recent)
        for column, amax in enumerate(row):
            # A window of n rows holds the step under way and n - 1 earlier ones.
            seen = recorded[column][-(window - 1) :] if window > 1 else []
            top = amax if most_recent else max([amax, *seen])
            want = (
                before[column] if top == 0 else torch.tensor(448.0 / 2**margin) / torch.tensor(top, dtype=torch.float32)
            )
            want = torch.tensor(torch.finfo(torch.float32).max) if want.isinf() else want
            assert scale[column] == want
            if amax != 0:
                recorded[column].append(amax)
