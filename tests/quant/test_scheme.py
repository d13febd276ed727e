"""`Scheme`: one string for one quantization, and what each recipe asks for."""

from __future__ import annotations

import pytest
import torch

import ottava
from ottava import recipe
from ottava.quant.scheme import Scheme
from ottava.recipe import Format, QParams
from quant_cases import SCHEMES


@pytest.mark.parametrize(
    "text", [*SCHEMES, "e4m3:tensor:f32", "e5m2:1x128:pow2:eps=1e-06:f32", "e4m3:1x32:f32/e4m3:tensor"]
)
def test_string_and_back(text: str) -> None:
    assert str(Scheme.parse(text)) == text
    assert Scheme.parse(str(Scheme.parse(text))) == Scheme.parse(text)


@pytest.mark.parametrize(
    "chosen,roles",
    [
        (recipe.DelayedScaling(), ("e4m3:tensor:f32", "e4m3:tensor:f32", "e5m2:tensor:f32")),
        (recipe.DelayedScaling(fp8_format=Format.E4M3), ("e4m3:tensor:f32",) * 3),
        (recipe.Float8CurrentScaling(), ("e4m3:tensor", "e4m3:tensor", "e5m2:tensor")),
        (
            recipe.Float8CurrentScaling(use_power_2_scales=True, fp8_quant_fwd_weight=QParams(amax_epsilon=0.5)),
            ("e4m3:tensor:pow2", "e4m3:tensor:eps=0.5", "e5m2:tensor:pow2"),
        ),
        (recipe.Float8BlockScaling(), ("e4m3:1x128:pow2", "e4m3:128x128:pow2", "e4m3:1x128:pow2")),
        (
            recipe.Float8BlockScaling(
                use_f32_scales=True, fp8_format=Format.HYBRID, x_block_scaling_dim=2, w_block_scaling_dim=1
            ),
            ("e4m3:128x128", "e4m3:1x128", "e5m2:1x128"),
        ),
        (recipe.MXFP8BlockScaling(), ("e4m3:1x32:f32",) * 3),
        (recipe.NVFP4BlockScaling(), ("e2m1:1x16:rht", "e2m1:16x16", "e2m1:1x16:rht:stochastic")),
        (
            recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
            ("e2m1:1x16",) * 3,
        ),
        (
            recipe.HybridScaling(recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling()),
            ("e4m3:1x32:f32/e4m3:tensor", "e4m3:1x32:f32/e4m3:tensor", "e5m2:tensor"),
        ),
        (recipe.HybridScaling(recipe.MXFP8BlockScaling(), recipe.MXFP8BlockScaling()), ("e4m3:1x32:f32",) * 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, recipe.Recipe) else None,
)
def test_schemes_of_the_recipes(chosen: recipe.Recipe, roles: tuple[str, str, str]) -> None:
    assert tuple(str(Scheme.of(chosen, role)) for role in ("input", "weight", "grad")) == roles


def test_transposable_are_whole_tensors_and_squares() -> None:
    exact = {text for text in SCHEMES if Scheme.parse(text).transposable}
    assert exact == {text for text in SCHEMES if ":tensor" in text or "128x128" in text or "16x16" in text}


def test_two_ways_answer_by_direction() -> None:
    scheme = Scheme.parse("e4m3:1x32:f32/e4m3:tensor")
    rows, columns = scheme.along("rowwise"), scheme.along("columnwise")
    assert (str(rows), str(columns)) == ("e4m3:1x32:f32", "e4m3:tensor") and rows.along("columnwise") is rows
    assert scheme.two_copies and scheme.needs_tensor_amax and not rows.needs_tensor_amax
    assert scheme.of_tensor == columns and rows.of_tensor is None and scheme.feature_multiple == 32
    assert scheme.fills_blocks(7) and not rows.fills_blocks(7)  # tokens of a columnwise copy with one scale
    assert str(scheme.rounded) == "e4m3:1x32/e4m3:tensor" and scheme.same_bytes(scheme.rounded)
    assert not scheme.same_bytes(rows)
    assert bytes(scheme.as_bytes().tolist()).rstrip(b"\0") == b"e4m3:1x32/e4m3:tensor"


def test_unknown_role_and_format_are_named() -> None:
    with pytest.raises(ValueError, match=r"role must be one of .*'input', 'weight', 'grad'.*got 'output'"):
        Scheme.of(recipe.DelayedScaling(), "output")
    with pytest.raises(ValueError, match="Unknown element format 'e3m4'"):
        Scheme.parse("e3m4:tensor")
    with pytest.raises(ValueError, match="Unknown recipe Recipe"):
        Scheme.of(recipe.Recipe(), "input")


def test_a_class_in_the_place_of_a_recipe_is_told_how_to_make_one() -> None:
    x, made = torch.ones(16, 16), r"got the class DelayedScaling: write DelayedScaling\(\)"
    for use in (
        lambda: ottava.quantize(x, recipe.DelayedScaling),
        lambda: ottava.autocast(recipe=recipe.DelayedScaling),
        lambda: ottava.quantized_model_init(recipe=recipe.DelayedScaling),
    ):
        with pytest.raises(ValueError, match=made):
            use()
    with pytest.raises(ValueError, match=r"got str; for example recipe=ottava.recipe.Float8CurrentScaling\(\)"):
        ottava.quantize(x, "fp8")
