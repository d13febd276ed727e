"""TransformerEngine's quantizers, called by a program itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ottava
from ottava import compat, recipe


@pytest.fixture
def te() -> Iterator[Any]:
    with compat.installed():
        import transformer_engine.pytorch as module

        yield module


def test_they_quantize_as_their_recipes_do(te: Any) -> None:
    torch.manual_seed(0)
    x, e4m3 = torch.randn(128, 256, dtype=torch.bfloat16), te.DType.kFloat8E4M3
    for quantizer, made_by, role in (
        (te.Float8CurrentScalingQuantizer(e4m3, device="cpu"), recipe.Float8CurrentScaling(), "input"),
        (te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True), recipe.Float8BlockScaling(), "weight"),
        (te.MXFP8Quantizer(e4m3), recipe.MXFP8BlockScaling(), "input"),
        (te.NVFP4Quantizer(with_2d_quantization=True), recipe.NVFP4BlockScaling(), "weight"),
    ):
        made, expected = quantizer(x), ottava.quantize(x, made_by, role)
        assert made.scheme == expected.scheme.rounded
        for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            assert torch.equal(getattr(made, name), getattr(expected, name)), (type(quantizer), name)
        into = quantizer.copy().make_empty(x.shape, dtype=x.dtype)
        quantizer.update_quantized(x, into, noop_flag=torch.ones(1))
        assert not into.dequantize().any()
        assert quantizer.quantize(x, out=into) is into and torch.equal(into.dequantize(), made.dequantize())


def test_a_given_scale_is_used_and_the_amax_grows(te: Any) -> None:
    amax = torch.zeros(1, 1)
    quantizer = te.Float8Quantizer(scale=torch.full((1,), 4.0), amax=amax, fp8_dtype=te.DType.kFloat8E4M3)
    x = torch.tensor([[0.3, -2.5], [1.0, 0.0]])
    q = quantizer(x)
    assert isinstance(q, te.Float8Tensor) and q._scale_inv.item() == 0.25 and amax.item() == 2.5
    assert q.dequantize().tolist() == [[0.3125, -2.5], [1.0, 0.0]]
    quantizer.update_quantized(x / 2, q)
    assert q._scale_inv.item() == 0.25 and amax.item() == 2.5
    assert q.quantize_(x, noop_flag=torch.ones(1)) is q and q._scale_inv.item() == 0.25
    quantizer.set_usage(columnwise=False)
    assert quantizer(x).columnwise_data is None and not quantizer.columnwise_usage


def test_copy_and_data_quantize_as_the_quantizer_does(te: Any) -> None:
    """With its scale of now, where that is given; of any number of dimensions, whose bytes have the tensor's shape."""
    torch.manual_seed(0)
    x, new = torch.randn(4, 32, 64), torch.randn(4, 32, 64)
    e4m3, scale, amax = te.DType.kFloat8E4M3, torch.full((1,), 4.0), torch.zeros(1)
    for quantizer in (
        te.Float8Quantizer(scale, amax, e4m3),
        te.Float8CurrentScalingQuantizer(e4m3),
        te.MXFP8Quantizer(e4m3),
    ):
        q = quantizer(x)
        assert q._data.shape == x.shape and torch.equal(q.detach().clone().copy_(new), quantizer(new))
        scale.mul_(2.0)
        for write in (lambda q: q.copy_(new), lambda q: q.quantize_(new), lambda q: setattr(q, "data", new)):
            write(q)
            assert torch.equal(q, quantizer(new)) and torch.equal(q._data, quantizer(new)._data)
            q.copy_(x)
    assert amax == torch.stack([x, new]).abs().max()


def test_gradients_pass_through_them(te: Any) -> None:
    e4m3 = te.DType.kFloat8E4M3
    for quantizer in (te.Float8CurrentScalingQuantizer(e4m3), te.MXFP8Quantizer(e4m3)):
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        q = quantizer(x)
        assert q.requires_grad and q.grad_fn is not None
        (q.dequantize().float() * 3.0).sum().backward()
        assert x.grad is not None and x.grad.unique().tolist() == [3.0]
        with torch.no_grad():
            assert not quantizer(x).requires_grad


def test_what_they_do_not_offer_is_refused(te: Any) -> None:
    x, e4m3 = torch.ones(32, 32), te.DType.kFloat8E4M3
    with pytest.raises(ValueError, match="with_2d_quantization=True"):
        te.MXFP8Quantizer(e4m3, with_2d_quantization=True)(x)
    with pytest.raises(ValueError, match="row_scaled_nvfp4"):
        te.NVFP4Quantizer(row_scaled_nvfp4=True)(x)
    with pytest.raises(ValueError, match="with_random_sign_mask=False"):
        te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False)(x)
    assert torch.equal(
        te.NVFP4Quantizer(with_random_sign_mask=False)(x), te.NVFP4Quantizer()(x)
    )  # nothing is transformed
    with pytest.raises(ValueError, match="cannot write into e4m3:1x32"):
        te.Float8CurrentScalingQuantizer(e4m3, device="cpu").update_quantized(x, te.MXFP8Quantizer(e4m3)(x))
    assert te.IdentityQuantizer(dtype=torch.bfloat16)(x).dtype == torch.bfloat16


def test_element_types_have_both_names(te: Any) -> None:
    from transformer_engine.pytorch.constants import TE_DType, TE_DType_To_Torch
    from transformer_engine.pytorch.quantization import get_fp8_torch_dtype

    assert TE_DType[torch.float8_e4m3fn] is te.DType.kFloat8E4M3
    assert TE_DType_To_Torch[te.DType.kBFloat16] is torch.bfloat16
    assert get_fp8_torch_dtype(recipe.DelayedScaling(), fprop_tensor=False) is torch.float8_e5m2


def test_copies_that_are_not_there_are_none(te: Any) -> None:
    """Programs ask for a direction and go another way where there is none."""
    x, quantizer = torch.randn(32, 64), te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    both = quantizer(x)
    assert both.get_usages() == {"rowwise": True, "columnwise": True}
    quantizer.set_usage(columnwise=False)
    rows = quantizer(x)
    assert rows._columnwise_storage is rows.columnwise_sub_storage is None and rows._rowwise_storage is not None
    assert rows.get_usages() == {"rowwise": True, "columnwise": False}
    before = both.dequantize()
    both.update_usage(rowwise_usage=True)  # nothing to do
    both.update_usage(rowwise_usage=False)
    assert both._rowwise_storage is both._rowwise_data is None and both.columnwise_sub_storage is not None
    assert (both.dequantize() - before).abs().max() < 0.2  # the values by columns
    with pytest.raises(ValueError, match="the rowwise copy is not there; quantize the tensor again"):
        both.update_usage(rowwise_usage=True)
    with pytest.raises(ValueError, match="only copy left"):
        both.update_usage(columnwise_usage=False)


def test_what_a_hybrid_quantizer_makes_is_known(te: Any) -> None:
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizedTensor

    rows, columns = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3), te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    x = torch.randn(32, 64)
    q = te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)(x)
    assert isinstance(q, HybridQuantizedTensor) and not isinstance(columns(x), HybridQuantizedTensor)
    assert q._rowwise_storage is not None and q._columnwise_storage is not None
