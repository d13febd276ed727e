"""What a recipe means to those who multiply."""

from __future__ import annotations

import pytest

from ottava import recipe
from ottava.quant.quantization import Quantization
from ottava.quant.scheme import GatherDims, Scheme


def test_a_recipe_becomes_three_schemes_and_facts() -> None:
    block = Quantization.of(recipe.Float8BlockScaling(backward_override="dequantized"))
    assert [str(s) for s in (block.input, block.weight, block.grad)] == [
        "e4m3:1x128:pow2", "e4m3:128x128:pow2", "e4m3:1x128:pow2",
    ]  # fmt: skip
    assert (block.delayed, block.shares_scales, block.backward, block.precision) == (False, True, "dequantized", "fp8")
    delayed = Quantization.of(recipe.DelayedScaling(reduce_amax=False))
    assert (delayed.delayed, delayed.shares_scales, delayed.split_fprop, delayed.split_dgrad) == (
        True,
        False,
        False,
        True,
    )
    assert str(delayed.gated_grad) == "e5m2:tensor"  # rounded before it is quantized
    assert str(delayed) == "DelayedScaling(input: e4m3:tensor, weight: e4m3:tensor, grad: e5m2:tensor)"
    assert Quantization.of(recipe.NVFP4BlockScaling()).precision == "fp4"
    assert Quantization.of(recipe.MXFP8BlockScaling()).feature_multiple == 32
    assert not Quantization.of(recipe.Float8CurrentScaling()).split_fprop


def test_the_last_recipe_is_not_worked_out_again() -> None:
    one, other = recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()
    assert Quantization.of(one) is Quantization.of(one)
    assert Quantization.of(other).recipe is other
    assert Quantization.of(one).recipe is one


def test_tokens_of_a_scheme_lie_along_one_dimension() -> None:
    tensor, block = Scheme.parse("e4m3:tensor"), Scheme.parse("e4m3:1x128")
    assert tensor.gather_dims("rowwise") == GatherDims(0, None)
    assert tensor.gather_dims("columnwise") == GatherDims(1, None)
    assert block.gather_dims("columnwise") == GatherDims(1, 1)
    with pytest.raises(ValueError, match="direction must be one of"):
        block.gather_dims("rows")
    assert tensor.fills_blocks(3) and block.fills_blocks(256) and not block.fills_blocks(192)
    assert Scheme.parse("e2m1:16x16").fills_blocks(48)


def test_schemes_of_one_layout() -> None:
    kept, fused = Scheme.parse("e4m3:tensor"), Scheme.parse("e4m3:tensor:f32")
    assert fused.rounded == kept and kept.rounded is kept
    assert kept.same_bytes(fused) and not kept.same_bytes(Scheme.parse("e5m2:tensor"))
    assert str(fused) == "e4m3:tensor:f32" and hash(kept) == hash(fused)
