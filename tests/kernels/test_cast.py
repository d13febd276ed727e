"""`ottava::quantize`, `amax`, `dequantize`, `column_sum`: shapes, fakes, and the rules again by another road."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ottava  # noqa: F401
from ottava.kernels.cast import Buffers, hadamard16
from ottava.quant.scheme import Scheme
from quant_cases import SCHEMES, all_same, same

ops = torch.ops.ottava
SHAPES = [(64, 64), (144, 272), (16, 16), (1, 128), (0, 64), (129, 32), (256, 128)]


def quantize(
    x: Tensor, scheme: str, row: bool = True, col: bool = True, scale: Tensor | None = None, amax: Tensor | None = None
):
    return Buffers(*ops.quantize(x, scheme, scale, amax, row, col))


def fits(shape: tuple[int, int], scheme: str) -> bool:
    """NVFP4 packs two values a byte and needs whole blocks."""
    return not scheme.startswith("e2m1") or (shape[0] % 16 == 0 and shape[1] % 16 == 0)


# ------------------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("row,col", [(True, True), (True, False), (False, True)])
def test_fake_tensors_have_the_real_shapes(scheme: str, row: bool, col: bool) -> None:
    for shape in SHAPES:
        if not fits(shape, scheme):
            continue
        x = torch.randn(shape, dtype=torch.bfloat16)
        real = quantize(x, scheme, row, col)
        with FakeTensorMode() as mode:
            fake = quantize(mode.from_tensor(x), scheme, row, col)
        for name, a, b in zip(Buffers._fields, real, fake, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (shape, name)
        if row:
            again = ops.dequantize(real.rowwise_data, real.rowwise_scale_inv, real.rowwise_amax, scheme, torch.bfloat16)
            assert again.shape == shape and again.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_opcheck(scheme: str) -> None:
    x = torch.randn(32, 64)
    if "stochastic" not in scheme:
        torch.library.opcheck(ops.quantize.default, (x, scheme, None, None, True, True))
    q = quantize(x, scheme)
    args = (q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax, scheme, torch.float32)
    torch.library.opcheck(ops.dequantize.default, args)


def test_opcheck_of_reductions() -> None:
    torch.library.opcheck(ops.amax.default, (torch.randn(8, 16),))
    torch.library.opcheck(ops.column_sum.default, (torch.randn(8, 16, dtype=torch.bfloat16),))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_copy_does_not_depend_on_whether_the_other_is_made(scheme: str) -> None:
    x = torch.randn(32, 64)

    def run(row: bool, col: bool) -> Buffers:
        torch.manual_seed(3)
        return quantize(x, scheme, row, col)

    both = run(True, True)
    assert same(run(True, False).rowwise_data, both.rowwise_data)
    if "stochastic" not in scheme:  # the column copy would draw the row copy's random numbers
        alone = run(False, True)
        assert same(alone.columnwise_data, both.columnwise_data) and same(
            alone.columnwise_scale_inv, both.columnwise_scale_inv
        )
    assert run(True, False).columnwise_data.numel() == 0 and run(False, True).rowwise_data.numel() == 0


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if "rht" not in s])
def test_columnwise_copy_is_the_rowwise_copy_of_the_transpose(scheme: str) -> None:
    x = torch.randn(144, 272)
    q, t = quantize(x, scheme), quantize(x.t().contiguous(), scheme)
    assert same(q.columnwise_data, t.rowwise_data)
    assert same(q.columnwise_scale_inv, t.rowwise_scale_inv)
    # One scale for the whole tensor: one amax too, in rowwise_amax.
    assert q.columnwise_amax.numel() == 0 if ":tensor" in scheme else same(q.columnwise_amax, t.rowwise_amax)


# -------------------------------------------------------------------------------------------------------------------- rules


def test_given_scale_beats_given_amax_beats_own_amax() -> None:
    x = torch.randn(16, 16)
    four, two = torch.tensor([4.0]), torch.tensor([2.0])
    assert quantize(x, "e4m3:tensor", scale=four, amax=two).rowwise_scale_inv.tolist() == [0.25]
    by_amax = quantize(x, "e4m3:tensor", amax=two)
    assert torch.equal(by_amax.rowwise_scale_inv, 1 / torch.tensor([224.0])) and by_amax.rowwise_amax.tolist() == [2.0]
    own = quantize(x, "e4m3:tensor")
    assert own.rowwise_amax.tolist() == [x.abs().max().item()]
    # A given scale still reports what the values were: delayed scaling records it.
    assert quantize(x, "e4m3:tensor", scale=four).rowwise_amax.tolist() == own.rowwise_amax.tolist()


def test_edge_blocks_are_as_if_padded_with_zeros() -> None:
    x = torch.randn(130, 200)
    padded = torch.zeros(256, 256)
    padded[:130, :200] = x
    for scheme in ("e4m3:1x128:pow2", "e4m3:128x128", "e4m3:1x32"):
        a, b = quantize(x, scheme), quantize(padded, scheme)
        assert torch.equal(a.rowwise_data, b.rowwise_data[:130, :200])
        rows, columns = a.rowwise_scale_inv.shape
        assert torch.equal(a.rowwise_scale_inv, b.rowwise_scale_inv[:rows, :columns])


def test_block_scale_that_overflows_is_the_largest_value_of_the_input_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.full((1, 128), 1e-38).to(dtype)
        scale_inv = quantize(x, "e4m3:1x128", col=False).rowwise_scale_inv
        assert torch.equal(scale_inv, torch.ones(1, 1) / torch.tensor([[torch.finfo(dtype).max]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_dtype_does_not_matter_where_the_values_are_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    for scheme in SCHEMES:
        if "stochastic" not in scheme:
            assert all_same(quantize(x, scheme), quantize(x.float(), scheme)), scheme


def test_hadamard_is_a_rotation_that_cancels_in_a_product() -> None:
    a, b = torch.randn(8, 64), torch.randn(8, 64)
    torch.testing.assert_close(hadamard16(a) @ hadamard16(b).t(), a @ b.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard16(a).norm(), a.norm())
    spike = torch.zeros(1, 16)
    spike[0, 5] = 4.0
    assert torch.equal(hadamard16(spike).abs(), torch.ones(1, 16))  # an outlier is spread over its group


def test_hadamard_turns_the_columnwise_copy_only() -> None:
    x = torch.randn(64, 32)
    plain, turned = quantize(x, "e2m1:1x16"), quantize(x, "e2m1:1x16:rht")
    assert same(plain.rowwise_data, turned.rowwise_data)
    want = quantize(hadamard16(x.t().contiguous()), "e2m1:1x16", col=False)
    assert same(turned.columnwise_data, want.rowwise_data) and same(turned.columnwise_amax, want.rowwise_amax)


def test_transposed_bytes_of_packed_squares() -> None:
    """E2M1 16x16: the transpose is of values, not of bytes, since two values share a byte."""
    x = torch.randn(32, 48)
    q = quantize(x, "e2m1:16x16")
    row = ops.dequantize(q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax, "e2m1:16x16", torch.float32)
    col = ops.dequantize(q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax, "e2m1:16x16", torch.float32)
    assert torch.equal(row.t(), col)


def test_column_sum_is_float32_and_rounds_once() -> None:
    x = torch.ones(4096, 3, dtype=torch.bfloat16)  # bf16 addition would stop at 256
    assert ops.column_sum(x).tolist() == [4096.0] * 3 and ops.column_sum(x).dtype == torch.bfloat16
    assert ops.column_sum(x[:0]).tolist() == [0.0] * 3


def test_amax_of_any_shape() -> None:
    assert ops.amax(torch.tensor(-3.0)).tolist() == [3.0]
    assert ops.amax(torch.randn(2, 3, 4) * 0 - 2).tolist() == [2.0]
    assert ops.amax(torch.empty(0, 5)).tolist() == [0.0]


def test_unknown_scheme_is_named() -> None:
    with pytest.raises(ValueError, match="e9m9"):
        quantize(torch.ones(2, 2), "e9m9:tensor")
    assert Scheme.parse("e4m3:tensor").per_tensor
