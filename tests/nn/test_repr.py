"""Printing a module says what is quantized and how."""

from __future__ import annotations

import pytest

import ottava
from quant_cases import RECIPES, casting

SAYS = {
    "delayed": "DelayedScaling(input: e4m3:tensor, weight: e4m3:tensor, grad: e5m2:tensor)",
    "current": "Float8CurrentScaling(input: e4m3:tensor, weight: e4m3:tensor, grad: e5m2:tensor)",
    "block": "Float8BlockScaling(input: e4m3:1x128:pow2, weight: e4m3:128x128:pow2, grad: e4m3:1x128:pow2)",
    "mxfp8": "MXFP8BlockScaling(input: e4m3:1x32, weight: e4m3:1x32, grad: e4m3:1x32)",
    "nvfp4": "NVFP4BlockScaling(input: e2m1:1x16:rht, weight: e2m1:16x16, grad: e2m1:1x16:rht:stochastic)",
}


def test_outside_of_autocast() -> None:
    text = repr(ottava.Linear(32, 64, device="cpu"))
    assert text.startswith("Linear(\n  in_features=32, out_features=64, bias=True, quantized by autocast\n")


@pytest.mark.parametrize("scheme", list(SAYS))
def test_inside_of_autocast(scheme: str) -> None:
    modules = [
        ottava.Linear(32, 64, device="cpu"),
        ottava.LayerNormLinear(32, 64, device="cpu"),
        ottava.LayerNormMLP(32, 64, device="cpu"),
    ]
    with casting(scheme):
        for module in modules:
            assert module.extra_repr().endswith(SAYS[scheme])


@pytest.mark.parametrize(
    "scheme,stored", [("delayed", "e4m3:tensor"), ("block", "e4m3:128x128:pow2"), ("nvfp4", "e2m1:16x16")]
)
def test_weights_in_fp8_storage(scheme: str, stored: str) -> None:
    with ottava.quantized_model_init(recipe=RECIPES[scheme]):
        module = ottava.LayerNormMLP(32, 64, device="cpu")
    assert module.extra_repr().endswith(f"weights stored as {stored}")
    with casting(scheme):  # what is stored does not depend on the recipe in force
        assert f"weights stored as {stored}" in module.extra_repr()


def test_what_else_is_shown() -> None:
    assert "normalization=RMSNorm" in repr(ottava.LayerNormLinear(32, 64, normalization="RMSNorm", device="cpu"))
    text = repr(ottava.LayerNormMLP(32, 64, activation="swiglu", bias=False, device="cpu"))
    assert "hidden_size=32, ffn_hidden_size=64, bias=False, normalization=LayerNorm, activation=swiglu" in text
    assert "(delayed): DelayedState(columns=6+4, used=False)" in text


def test_a_whole_layer_can_be_printed() -> None:
    layer = ottava.TransformerLayer(32, 64, 2, device="cpu")
    with casting("block"):
        assert repr(layer).count(SAYS["block"]) == 3  # qkv, proj, MLP
