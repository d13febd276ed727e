"""`quantized_model_init`: weights that are stored in FP8 only."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe
from quant_cases import DETERMINISTIC, QUANTIZING, RECIPES, casting, relative, same

STORED = [name for name in DETERMINISTIC if name != "none"]
MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **o: ottava.Linear(64, 96, device="cpu", **o),
    "LayerNormLinear": lambda **o: ottava.LayerNormLinear(64, 96, device="cpu", **o),
    "LayerNormMLP": lambda **o: ottava.LayerNormMLP(64, 96, activation="swiglu", device="cpu", **o),
    "TransformerLayer": lambda **o: ottava.TransformerLayer(
        64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **{"fuse_qkv_params": True, **o}
    ),
}


def stored(scheme: str, name: str = "Linear", preserve: bool = False, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe=RECIPES[scheme], preserve_high_precision_init_val=preserve):
        return MODULES[name](**options)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in module.named_parameters() if isinstance(p, ottava.QuantizedTensor)}


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("name", list(MODULES))
def test_weights_are_stored_quantized_and_the_rest_is_not(name: str, scheme: str) -> None:
    module = stored(scheme, name)
    for key, parameter in module.named_parameters():
        assert isinstance(parameter, ottava.QuantizedTensor) == (parameter.dim() == 2), key
        assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    assert weights(module)


def test_only_inside_the_block_and_only_if_enabled() -> None:
    with ottava.quantized_model_init(recipe=RECIPES["block"]):
        with ottava.quantized_model_init(enabled=False):
            assert not weights(MODULES["Linear"]())
        assert weights(MODULES["Linear"]())
    assert not weights(MODULES["Linear"]())


def test_default_recipe_is_delayed_scaling_with_scales_from_the_values() -> None:
    """Scale 1, delayed scaling's start, would flush initial weights of 0.02 to a few bits: the first scale is the values' own."""
    torch.manual_seed(0)
    with ottava.quantized_model_init():
        module = MODULES["Linear"]()
    torch.manual_seed(0)
    plain = MODULES["Linear"]()
    assert str(module.weight.scheme) == "e4m3:tensor"
    want = ottava.quantize(plain.weight, recipe.Float8CurrentScaling(), "weight")
    assert same(module.weight.rowwise_data, want.rowwise_data) and same(
        module.weight.rowwise_scale_inv, want.rowwise_scale_inv
    )


@pytest.mark.parametrize("scheme", [s for s in STORED if s != "delayed"])
@pytest.mark.parametrize("name", list(MODULES))
def test_forward_and_backward_equal_those_of_plain_weights_with_the_same_values(name: str, scheme: str) -> None:
    """Quantizing the initial weight once at construction, or again in every forward, gives the same bytes and results."""
    module = stored(scheme, name)
    torch.manual_seed(0)
    plain = MODULES[name]()
    x = torch.randn(16, 2, 64)
    with casting(scheme):
        y, want = module(x), plain(x)
    assert same(y, want)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy)
    for (key, a), b in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert same(a.grad, b.grad), key
        assert type(a.grad) is Tensor


def test_delayed_scaling_with_stored_weights_uses_their_own_scale() -> None:
    module = stored("delayed")
    x = torch.randn(16, 64)
    with casting("delayed"):
        y = module(x)
    a = ottava.quantize(x, RECIPES["delayed"]).dequantize()
    torch.testing.assert_close(y, a @ module.weight.dequantize().t() + module.bias)
    y.sum().backward()
    assert module.delayed.fwd_scale[0] != 1.0 and module.delayed.bwd_scale[0] != 1.0


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_without_autocast_the_values_are_dequantized(scheme: str) -> None:
    module, x = stored(scheme), torch.randn(16, 64, requires_grad=True)
    y = module(x)
    assert relative(y, x @ module.weight.dequantize().t() + module.bias) < 1e-6
    y.sum().backward()
    assert module.weight.grad.shape == (96, 64)
    torch.testing.assert_close(x.grad, torch.ones(16, 96) @ module.weight.dequantize())


def test_another_recipe_than_the_stored_one_is_refused() -> None:
    message = r"Linear holds its weight as e4m3:128x128:pow2, but the recipe of this autocast needs e4m3:1x32.*quantized_model_init"
    for first in (None, True):  # which makes nothing anew: the weight has no other values
        with casting("mxfp8"), pytest.raises(ValueError, match=message) as refused:
            stored("block")(torch.randn(16, 64), is_first_microbatch=first)
        assert "is_first_microbatch" not in str(refused.value)


def test_another_recipe_than_that_of_a_kept_copy_is_refused() -> None:
    module = ottava.Linear(64, 64, device="cpu")
    with casting("block"):
        module(torch.randn(16, 64), is_first_microbatch=True)
    with (
        casting("mxfp8"),
        pytest.raises(ValueError, match="needs e4m3:1x32.*: pass is_first_microbatch=True to quantize again"),
    ):
        module(torch.randn(16, 64), is_first_microbatch=False)


def test_shapes_that_cannot_be_stored_are_refused() -> None:
    with (
        ottava.quantized_model_init(recipe=RECIPES["mxfp8"]),
        pytest.raises(
            ValueError,
            match=r"Linear\.weight of shape \(48, 64\) cannot be stored by MXFP8BlockScaling.*multiples of 32",
        ),
    ):
        ottava.Linear(64, 48, device="cpu")


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_the_initial_value_can_be_kept_and_let_go(scheme: str) -> None:
    module = stored(scheme, preserve=True)
    torch.manual_seed(0)
    plain = MODULES["Linear"]()
    kept = module.weight.get_high_precision_init_val()
    assert torch.equal(kept, plain.weight) and kept.device.type == "cpu" and type(kept) is Tensor
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    assert not hasattr(stored(scheme).weight, "get_high_precision_init_val")


def test_memory_of_a_stored_weight() -> None:
    """A byte an element, and the scales: backward transposes the bytes."""
    with ottava.quantized_model_init(recipe=RECIPES["block"]):
        module = ottava.Linear(256, 256, params_dtype=torch.bfloat16, device="cpu")
    held = sum(t.numel() * t.element_size() for t in module.weight._parts.values())
    assert held == 256 * 256 + 4 * 4
    module.weight.drop_columnwise()
    assert sum(t.numel() * t.element_size() for t in module.weight._parts.values()) == 256 * 256 + 4 * 4


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("name", list(MODULES))
def test_save_and_load(name: str, scheme: str) -> None:
    module = stored(scheme, name)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    torch.manual_seed(7)
    with ottava.quantized_model_init(recipe=RECIPES[scheme]):
        again = MODULES[name]()
    result = again.load_state_dict(torch.load(file, weights_only=True))
    assert not result.missing_keys and not result.unexpected_keys
    for key, weight in weights(module).items():
        loaded = weights(again)[key]
        assert all(same(part, loaded._parts[n]) for n, part in weight._parts.items()), key
    x = torch.randn(16, 2, 64)
    with torch.no_grad(), casting(scheme):
        assert same(again(x), module(x))


def test_a_plain_checkpoint_loads_into_stored_weights_and_back() -> None:
    torch.manual_seed(0)
    plain, module = MODULES["LayerNormMLP"](), stored("block", "LayerNormMLP")
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_()
    module.load_state_dict(plain.state_dict())
    want = ottava.quantize(plain.fc1_weight, RECIPES["block"], "weight")
    assert same(module.fc1_weight.rowwise_data, want.rowwise_data)
    plain.load_state_dict(module.state_dict())
    assert type(plain.fc1_weight.data) is Tensor and torch.equal(plain.fc1_weight, module.fc1_weight.dequantize())


def test_deepcopy_and_moving() -> None:
    module = stored("block")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.copy_(torch.zeros(96, 64))
    assert module.weight.dequantize().any() and isinstance(twin.weight, ottava.QuantizedTensor)
    assert isinstance(copy.deepcopy(module).to("cpu").weight, ottava.QuantizedTensor)


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("quantized", [True, False])
def test_every_parameter_of_a_stored_layer_gets_a_gradient(scheme: str, quantized: bool) -> None:
    """Queries, keys and values in parameters of their own, the default; inside of autocast and outside."""
    module = stored(scheme, "TransformerLayer", fuse_qkv_params=False)
    x = torch.randn(16, 2, 64)
    with casting(scheme if quantized else "none"):
        y = module(x)
    y.backward(torch.randn_like(y))
    assert not [key for key, p in module.named_parameters() if p.grad is None]


def test_dequantize_passes_the_gradient_on() -> None:
    weight = stored("block").weight
    weight.dequantize(torch.float32).backward(torch.full((96, 64), 3.0))
    assert torch.equal(weight.grad, torch.full((96, 64), 3.0))
    with torch.no_grad():
        assert not weight.dequantize().requires_grad
    assert not weight.detach().dequantize().requires_grad


def test_parameters_split_with_stored_weights() -> None:
    """Parts of their own scales: each is its own tensor, and they still make one product."""
    module = stored("current", parameters_split={"query": 64, "key": 32})
    torch.manual_seed(0)
    assert set(weights(module)) == {"query_weight", "key_weight"}
    x = torch.randn(16, 64)
    with casting("current"):
        y = module(x)
    y.sum().backward()
    assert module.query_weight.grad.shape == (64, 64) and module.key_weight.grad.shape == (32, 64)
    with torch.no_grad():
        want = x @ torch.cat([module.query_weight.dequantize(), module.key_weight.dequantize()]).t()
    assert relative(y - torch.cat([module.query_bias, module.key_bias]), want) < 0.06


def test_frozen_stored_weight() -> None:
    module, x = stored("block"), torch.randn(16, 64, requires_grad=True)
    module.weight.requires_grad_(False)
    with casting("block"):
        module(x).sum().backward()
    assert module.weight.grad is None and x.grad is not None


def test_gradient_accumulation_with_stored_weights() -> None:
    module, x = stored("block"), torch.randn(16, 64)
    with casting("block"):
        first = module(x, is_first_microbatch=True)
        assert same(module(x, is_first_microbatch=False), first)


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_split_stored_weights_are_multiplied_without_rounding_again(name: str) -> None:
    with ottava.quantized_model_init(recipe=RECIPES[name]):
        split = ottava.Linear(128, 256, bias=False, parameters_split=("query", "key"), device="cpu")
    whole = ottava.Linear(128, 256, bias=False, device="cpu")
    whole.weight.data = torch.cat([split.query_weight.dequantize(), split.key_weight.dequantize()]).detach()
    x = torch.randn(32, 128)
    with casting(name):
        y = split(x)
        expected = whole(x)  # quantizing dequantized values again gives the same bytes
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    grads = torch.cat([split.query_weight.grad, split.key_weight.grad])
    assert torch.equal(grads, whole.weight.grad)


def test_parts_whose_border_cuts_a_block_have_entries_on_the_meta_device() -> None:
    with ottava.quantized_model_init(recipe=RECIPES["block"]):
        module = ottava.LayerNormMLP(64, 96, activation="swiglu", bias=False, set_parallel_mode=True, device="meta")
    before = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    module.reset_parameters()
    assert before == {key: tuple(value.shape) for key, value in module.state_dict().items()}


@pytest.mark.parametrize(
    "move", [lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.bfloat16(), lambda m: m.share_memory()]
)
def test_what_a_program_attaches_to_a_weight_survives_moving_the_module(move: Callable) -> None:
    """As it does on plain parameters: torch exchanges tensors of other classes together with their attributes."""
    module = stored("block", "LayerNormMLP", preserve=True, params_dtype=torch.float32)
    for p in module.parameters():
        p.main_grad, p.mark = torch.zeros(p.shape), "attached"  # type: ignore[attr-defined]
    first = module.fc2_weight.get_high_precision_init_val()
    module = move(module)
    assert all(p.mark == "attached" and p.main_grad.shape == p.shape for p in module.parameters())
    assert torch.equal(module.fc2_weight.get_high_precision_init_val(), first)
