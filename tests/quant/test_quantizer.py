"""`ottava.quantize`: shapes, roles, the scale of delayed scaling, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import ottava
from ottava import recipe
from quant_cases import QUANTIZING, RECIPES, same


@pytest.mark.parametrize("name", QUANTIZING)
@pytest.mark.parametrize("role", ["input", "weight", "grad"])
def test_dimensions_before_the_last_are_rows(name: str, role: str) -> None:
    x = torch.randn(4, 8, 64)
    torch.manual_seed(1)
    q = ottava.quantize(x, RECIPES[name], role=role)
    torch.manual_seed(1)
    flat = ottava.quantize(x.reshape(32, 64), RECIPES[name], role=role)
    assert q.shape == x.shape and q.dtype == x.dtype
    assert same(q.rowwise_data, flat.rowwise_data) and same(q.columnwise_data, flat.columnwise_data)
    assert q.dequantize().shape == x.shape


def test_a_vector_is_one_row() -> None:
    q = ottava.quantize(torch.randn(32), recipe.Float8CurrentScaling())
    assert q.shape == (32,) and q.rowwise_data.shape == (1, 32)


@pytest.mark.parametrize("name", QUANTIZING)
def test_only_the_copies_asked_for_are_made(name: str) -> None:
    x = torch.randn(32, 64)
    row = ottava.quantize(x, RECIPES[name], columnwise=False)
    assert row.rowwise_data is not None and row.columnwise_data is None and row.columnwise_scale_inv is None
    column = ottava.quantize(x, RECIPES[name], rowwise=False)
    assert column.rowwise_data is None and column.rowwise_scale_inv is None
    assert column.columnwise_data.shape[0] == 64
    both = ottava.quantize(x, RECIPES[name])
    assert same(row.rowwise_data, both.rowwise_data) and same(column.columnwise_data, both.columnwise_data)


def test_noncontiguous_input_gives_the_bytes_of_its_copy() -> None:
    x = torch.randn(64, 32).t()
    assert not x.is_contiguous()
    for name in ("current", "block", "mxfp8"):
        a, b = (ottava.quantize(v, RECIPES[name]) for v in (x, x.contiguous()))
        assert same(a.rowwise_data, b.rowwise_data) and same(a.columnwise_data, b.columnwise_data)


def test_delayed_scaling_casts_with_the_given_scale_and_reports_amax() -> None:
    x = torch.randn(16, 32)
    for scale in (37.5, torch.tensor(37.5), torch.tensor([37.5])):
        q = ottava.quantize(x, recipe.DelayedScaling(), scale=scale)
        assert q.rowwise_scale_inv.tolist() == (torch.ones(1) / 37.5).tolist()
        assert q.rowwise_amax.tolist() == [x.abs().max().item()]
    assert ottava.quantize(x, recipe.DelayedScaling()).rowwise_scale_inv.tolist() == [1.0]


def test_gradients_are_not_taken_through_quantize() -> None:
    x = torch.randn(16, 32, requires_grad=True)
    assert not ottava.quantize(x, recipe.Float8CurrentScaling()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_dtypes_that_are_not_taken_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=rf"must be float32, bfloat16 or float16, got {dtype}.*\.to\(torch\.bfloat16\)"
    ):
        ottava.quantize(torch.ones(16, 16).to(dtype), recipe.Float8CurrentScaling())


def test_mistakes_are_named() -> None:
    x = torch.randn(16, 32)
    with pytest.raises(ValueError, match="role must be one of"):
        ottava.quantize(x, recipe.Float8CurrentScaling(), role="activation")
    with pytest.raises(ValueError, match="scale= is for DelayedScaling; Float8CurrentScaling computes its own"):
        ottava.quantize(x, recipe.Float8CurrentScaling(), scale=2.0)
    with pytest.raises(ValueError, match="rowwise copy, a columnwise copy or both"):
        ottava.quantize(x, recipe.Float8CurrentScaling(), rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match="Cannot quantize a scalar"):
        ottava.quantize(torch.tensor(1.0), recipe.Float8CurrentScaling())


def test_nvfp4_says_which_dimension_needs_padding() -> None:
    chosen = recipe.NVFP4BlockScaling()
    with pytest.raises(ValueError, match=r"last dimension that is a multiple of 16, got 24"):
        ottava.quantize(torch.randn(16, 24), chosen)
    with pytest.raises(ValueError, match=r"product of all dimensions but the last that is a multiple of 16, got 10"):
        ottava.quantize(torch.randn(2, 5, 32), chosen)
    assert ottava.quantize(torch.randn(10, 32), chosen, columnwise=False).columnwise_data is None
