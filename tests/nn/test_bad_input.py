"""What a user gets wrong: each with the message that says what was given, what was expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import ottava
from ottava import recipe
from quant_cases import QUANTIZING, RECIPES, casting

MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda width=64, **o: ottava.Linear(width, 64, device="cpu", **o),
    "LayerNormLinear": lambda width=64, **o: ottava.LayerNormLinear(width, 64, device="cpu", **o),
    "LayerNormMLP": lambda width=64, **o: ottava.LayerNormMLP(width, 64, device="cpu", **o),
}


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("scheme", ["none", "block"])
def test_wrong_last_dimension(name: str, scheme: str) -> None:
    message = f"{name} expects a last dimension of 64, got an input of shape (4, 63)."
    with casting(scheme), pytest.raises(ValueError, match=re.escape(message)):
        MODULES[name]()(torch.randn(4, 63))


def test_a_named_module_is_called_by_its_name() -> None:
    module = ottava.Linear(64, 64, name="decoder.3.proj", device="cpu")
    with pytest.raises(ValueError, match=r"Linear 'decoder\.3\.proj' expects a last dimension of 64"):
        module(torch.randn(4, 63))


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("scheme", QUANTIZING)
def test_a_dimension_that_fp8_cannot_take(name: str, scheme: str) -> None:
    """Says which multiple is needed: 16, or 32 for MXFP8. Without autocast any size runs."""
    multiple, width = (32, 48) if scheme == "mxfp8" else (16, 40)
    kind = type(RECIPES[scheme]).__name__
    size = "hidden_size" if name == "LayerNormMLP" else "in_features"
    following = 64 if scheme == "mxfp8" else 48
    message = (
        f"{name}: {size}={width} must be a multiple of {multiple} to run with {kind}; the next one is {following}."
    )
    module, x = MODULES[name](width), torch.randn(4, width)
    with casting(scheme), pytest.raises(ValueError, match=re.escape(message) + r".*autocast\(enabled=False\)"):
        module(x)
    assert module(x).isfinite().all()


def test_out_features_and_ffn_size_are_checked_too() -> None:
    with casting("current"), pytest.raises(ValueError, match="out_features=40 must be a multiple of 16"):
        ottava.Linear(64, 40, device="cpu")(torch.randn(4, 64))
    with casting("mxfp8"), pytest.raises(ValueError, match="ffn_hidden_size=48 must be a multiple of 32"):
        ottava.LayerNormMLP(64, 48, device="cpu")(torch.randn(4, 64))


def test_nvfp4_needs_whole_blocks_of_tokens_for_training() -> None:
    module = MODULES["Linear"]()
    with casting("nvfp4"):
        with pytest.raises(
            ValueError, match=r"NVFP4 needs a product of all dimensions but the last that is a multiple of 16, got 15"
        ):
            module(torch.randn(3, 5, 64))
        with torch.no_grad():  # evaluation sums over features only
            assert module(torch.randn(3, 5, 64)).isfinite().all()


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float8_e4m3fn])
def test_dtype_that_is_not_taken(name: str, dtype: torch.dtype) -> None:
    message = (
        f"The input of {name} must be float32, bfloat16 or float16, got {dtype}: convert it with .to(torch.bfloat16)."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        MODULES[name]()(torch.ones(4, 64).to(dtype))


def test_float64_parameters_are_refused_by_a_quantized_product() -> None:
    module = ottava.Linear(64, 64, device="cpu").double()  # the constructor refuses params_dtype=torch.float64 itself
    with (
        casting("current"),
        pytest.raises(ValueError, match=r"Linear\.weight must be float32, bfloat16 or float16, got torch\.float64"),
    ):
        module(torch.randn(4, 64))


@pytest.mark.parametrize("name", list(MODULES))
def test_input_on_another_device(name: str) -> None:
    """meta stands in for a second device where there is no GPU."""
    message = (
        f"{name} is on cpu but its input is on meta: move the input with .to('cpu'), or the module with .to('meta')."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        MODULES[name]()(torch.randn(4, 64, device="meta"))
    module = MODULES[name]().to("meta")
    with pytest.raises(ValueError, match=f"{name} is on meta but its input is on cpu"):
        module(torch.randn(4, 64))


def test_unknown_activation() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown activation 'gellu'\. Did you mean 'gelu'\? Known: gelu, qgelu, relu, silu"
    ):
        ottava.LayerNormMLP(64, 64, activation="gellu", device="cpu")
    with pytest.raises(ValueError, match=r"Unknown activation 'softmax'\. Known: "):
        ottava.LayerNormMLP(64, 64, activation="softmax", device="cpu")


def test_unknown_recipe_field() -> None:
    with pytest.raises(
        ValueError, match=r"DelayedScaling has no field 'amax_history_length'\. Did you mean 'amax_history_len'\?"
    ):
        recipe.DelayedScaling(amax_history_length=16)


def test_sizes_that_are_not_positive() -> None:
    module = ottava.Linear(16, 16, device="cpu")
    with pytest.raises(ValueError, match=r"expects a last dimension of 16, got an input of shape \(0,\)"):
        module(torch.empty(0))


# --------------------------------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("scheme", list(RECIPES))
def test_nan_in_the_input_reaches_the_output_of_its_token(name: str, scheme: str) -> None:
    module, x = MODULES[name](), torch.randn(32, 64)
    x[5, 7] = float("nan")
    with casting(scheme):
        y = module(x)
    assert y[5].isnan().all()
    assert y.isnan().sum() == y.shape[1]  # and of no other: rows do not share scales that a NaN could spoil


@pytest.mark.parametrize("scheme", list(RECIPES))
def test_nan_in_the_gradient_reaches_the_weight_gradient(scheme: str) -> None:
    module, x = MODULES["Linear"](), torch.randn(32, 64, requires_grad=True)
    with casting(scheme):
        y = module(x)
    dy = torch.randn(32, 64)
    dy[5, 7] = float("nan")
    y.backward(dy)
    assert module.weight.grad[7].isnan().all() and x.grad[5].isnan().all()
    assert not x.grad[4].isnan().any()
    assert torch.equal(module.weight.grad.isnan().any(1), torch.arange(64) == 7)


@pytest.mark.parametrize("scheme", [s for s in QUANTIZING if s != "nvfp4"])
@pytest.mark.parametrize("role", ["input", "weight", "grad"])
def test_nan_is_counted_and_never_becomes_the_largest_value(scheme: str, role: str) -> None:
    x = torch.randn(64, 64)
    x[0, 0] = x[33, 60] = float("nan")
    q = ottava.quantize(x, RECIPES[scheme], role=role)
    assert q.nan_count() == 2
    largest = {"e4m3": 0x7E, "e5m2": 0x7B}[q.scheme.format]
    for data, where in ((q.rowwise_data, x.isnan()), (q.columnwise_data, x.isnan().t())):
        assert torch.equal(data == 0x7F, where)
        assert not ((data & 0x7F) == largest)[where].any()


def test_infinity_saturates_and_the_rest_survives() -> None:
    x = torch.randn(32, 64)
    x[5, 7] = float("inf")
    for scheme in ("current", "block"):  # an infinite amax leaves the scale at 1
        q = ottava.quantize(x, RECIPES[scheme])
        assert q.nan_count() == 0 and q.dequantize()[5, 7] == 448.0
        assert (q.dequantize()[:5] - x[:5]).abs().max() < 0.25
    q = ottava.quantize(x, RECIPES["mxfp8"])  # the block's scale is the largest there is: 448 * 2^127
    assert q.nan_count() == 0 and q.dequantize()[5, 7] == float("inf") and q.dequantize()[:5].isfinite().all()
