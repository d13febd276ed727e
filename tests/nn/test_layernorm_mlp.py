"""LayerNormMLP: every activation against float64, fused against apart, and every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import layer_reference as ref
import ottava
from quant_cases import DETERMINISTIC, QUANTIZING, RECIPES, all_same, casting, gradients, relative, same

HIDDEN, FFN = 32, 64
NORM_NAMES = ("layer_norm_weight", "layer_norm_bias")
BASES = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": F.silu,
    "srelu": lambda x: torch.relu(x).square(),
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "swiglu": "silu"}


def build(**options: Any) -> ottava.LayerNormMLP:
    module = ottava.LayerNormMLP(HIDDEN, FFN, **{"device": "cpu", **options})
    ref.randomize(module)
    return module


def run(module: torch.nn.Module, x: Tensor, dy: Tensor, scheme: str) -> tuple[Any, Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with casting(scheme):
        y = module(x)
    (y[0] if isinstance(y, tuple) else y).backward(dy)
    return y, x.grad


def activate(h: Tensor, name: str) -> Tensor:
    if name in BASES:
        return BASES[name](h)
    gate, up = h.chunk(2, -1)
    return BASES[GATED[name]](gate) * up


@pytest.mark.parametrize("activation", [*BASES, *GATED])
@pytest.mark.parametrize(
    "options", [{}, {"normalization": "RMSNorm", "bias": False}, {"recompute": "selective"}], ids=str
)
def test_unquantized_against_float64(activation: str, options: dict) -> None:
    module = build(activation=activation, **options)
    assert module.fc1_weight.shape == ((2 if activation in GATED else 1) * FFN, HIDDEN)
    x, dy = torch.randn(5, 3, HIDDEN), torch.randn(5, 3, HIDDEN)
    y, dx = run(module, x, dy, "none")
    w, x64 = ref.doubles(module), x.double().requires_grad_()
    normed = ref.norm(x64, w, "", options.get("normalization", "LayerNorm"), names=NORM_NAMES)
    h = activate(normed @ w["fc1_weight"].t() + w.get("fc1_bias", 0), activation)
    want = h @ w["fc2_weight"].t() + w.get("fc2_bias", 0)
    want.backward(dy.double())
    assert relative(y, want) < 3e-6 and relative(dx, x64.grad) < 1e-5
    ref.assert_same_gradients(module, w, 1e-5)


@pytest.mark.strict
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "srelu"])
@pytest.mark.parametrize("scheme", [s for s in DETERMINISTIC if s != "none"])
def test_forward_is_norm_linear_activation_linear(activation: str, scheme: str) -> None:
    """In float32 nothing is rounded between the parts, so fused and apart give the same bits."""
    module = build(activation=activation)
    fc1 = ottava.LayerNormLinear(HIDDEN, module.fc1_weight.shape[0], device="cpu")
    fc2 = ottava.Linear(FFN, HIDDEN, device="cpu")
    with torch.no_grad():
        for name in NORM_NAMES:
            getattr(fc1, name).copy_(getattr(module, name))
        for part, i in ((fc1, 1), (fc2, 2)):
            part.weight.copy_(getattr(module, f"fc{i}_weight"))
            part.bias.copy_(getattr(module, f"fc{i}_bias"))
    for seed in range(3):
        x = torch.randn(48, HIDDEN, generator=torch.Generator().manual_seed(seed))
        with casting(scheme):
            y = module(x)
            want = fc2(torch.ops.ottava.activation(fc1(x).detach(), activation))
        assert same(y, want)


@pytest.mark.parametrize("activation", [*BASES, *GATED])
@pytest.mark.parametrize("scheme", QUANTIZING)
def test_quantized_is_near_unquantized(activation: str, scheme: str) -> None:
    module = build(activation=activation, params_dtype=torch.bfloat16)
    x, dy = torch.randn(48, HIDDEN).bfloat16(), torch.randn(48, HIDDEN).bfloat16()
    y, dx = run(module, x, dy, scheme)
    got = [g.clone() for g in gradients(module)]
    want, want_dx = run(module, x, dy, "none")
    bar = 0.75 if scheme == "nvfp4" else 0.25  # ReLU turns a flipped sign near 0 into a whole gradient
    assert relative(y, want) < bar and relative(dx, want_dx) < bar
    for a, b in zip(got, gradients(module), strict=True):
        assert relative(a, b) < bar


@pytest.mark.parametrize("scheme", DETERMINISTIC)
@pytest.mark.parametrize("option", [{"recompute": "selective"}, {"checkpoint": True}], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_recompute_changes_no_bit(scheme: str, option: dict, activation: str) -> None:
    results = []
    for options in ({}, option):
        module = build(activation=activation, params_dtype=torch.bfloat16, **options)
        torch.manual_seed(1)
        for _ in range(2):
            out = run(module, torch.randn(16, HIDDEN).bfloat16(), torch.randn(16, HIDDEN).bfloat16(), scheme)
        results.append([*out, *gradients(module)])
    assert all_same(*results)


@pytest.mark.parametrize("scheme", ["none", "block", "delayed"])
def test_return_bias_and_norm_output(scheme: str) -> None:
    module = build(return_bias=True, return_layernorm_output=True)
    x = torch.randn(4, 2, HIDDEN, requires_grad=True)
    with casting(scheme):
        y, bias, normed = module(x)
        whole = build()(x)
    assert bias is module.fc2_bias
    torch.testing.assert_close(y + bias, whole)
    torch.testing.assert_close(
        normed, F.layer_norm(x, (HIDDEN,), module.layer_norm_weight, module.layer_norm_bias), rtol=1e-5, atol=1e-5
    )
    (y.sum() + normed.square().sum()).backward()
    assert module.fc1_bias.grad is not None and module.fc2_bias.grad is None and x.grad.isfinite().all()


@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_fused_accumulation(scheme: str) -> None:
    module, plain = build(fuse_wgrad_accumulation=True), build()
    for name in ("fc1_weight", "fc2_weight"):
        weight = getattr(module, name)
        weight.main_grad = torch.zeros(weight.shape)
    x, dy = torch.randn(16, HIDDEN), torch.randn(16, HIDDEN)
    assert all_same(run(module, x, dy, scheme), run(plain, x, dy, scheme))
    for name in ("fc1_weight", "fc2_weight"):
        assert getattr(module, name).grad is None
        assert torch.equal(getattr(module, name).main_grad, getattr(plain, name).grad)


@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias", "layer_norm_weight"])
def test_frozen_parameters(frozen: str) -> None:
    module, plain = build(), build()
    getattr(module, frozen).requires_grad_(False)
    x, dy = torch.randn(16, HIDDEN), torch.randn(16, HIDDEN)
    assert all_same(run(module, x, dy, "block"), run(plain, x, dy, "block"))
    for (name, a), b in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is None if name == frozen else same(a.grad, b.grad), name


def test_input_without_gradient() -> None:
    module, plain = build(), build()
    x, dy = torch.randn(16, HIDDEN), torch.randn(16, HIDDEN)
    with casting("delayed"):
        module(x).backward(dy)
    run(plain, x, dy, "delayed")
    assert all_same(gradients(module), gradients(plain))


def test_zero_centered_gamma() -> None:
    module, plain = build(zero_centered_gamma=True), build()
    with torch.no_grad():
        for (name, p), q in zip(plain.named_parameters(), module.parameters(), strict=True):
            p.copy_(q + 1 if name == "layer_norm_weight" else q)
    x = torch.randn(16, HIDDEN)
    with casting("block"):
        torch.testing.assert_close(module(x), plain(x))


@pytest.mark.parametrize("shape", [(HIDDEN,), (0, HIDDEN), (1, HIDDEN), (3, 5, HIDDEN)])
@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_shapes(scheme: str, shape: tuple[int, ...]) -> None:
    y, dx = run(build(activation="swiglu"), torch.randn(shape), torch.ones(shape), scheme)
    assert y.shape == shape and dx.shape == shape


@pytest.mark.parametrize("scheme", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_backward_in_high_precision(scheme: str, recompute: str) -> None:
    """The quantized forward's own activations go through an unquantized backward."""
    module = build(activation="swiglu", recompute=recompute)
    x, dy = torch.randn(32, HIDDEN), torch.randn(32, HIDDEN)
    leaf = x.clone().requires_grad_()
    chosen = type(RECIPES[scheme])(backward_override="high_precision")
    with ottava.autocast(recipe=chosen):
        y = module(leaf)
    y.backward(dy)
    assert same(y, run(build(activation="swiglu"), x, dy, scheme)[0])
    # fc2's weight gradient: dy times the activation of the quantized fc1's output, in high precision.
    fc1 = ottava.LayerNormLinear(HIDDEN, 2 * FFN, device="cpu")
    with torch.no_grad():
        for name in NORM_NAMES:
            getattr(fc1, name).copy_(getattr(module, name))
        fc1.weight.copy_(module.fc1_weight)
        fc1.bias.copy_(module.fc1_bias)
        with casting(scheme):
            h = torch.ops.ottava.activation(fc1(x), "swiglu")
    torch.testing.assert_close(module.fc2_weight.grad, dy.t() @ h, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(module.fc2_bias.grad, dy.sum(0), rtol=1e-5, atol=1e-5)


def test_initialization_of_both_weights() -> None:
    module = ottava.LayerNormMLP(
        16, 16, init_method=torch.nn.init.ones_, output_layer_init_method=torch.nn.init.zeros_, device="cpu"
    )
    assert module.fc1_weight.detach().eq(1).all() and module.fc2_weight.detach().eq(0).all()


@pytest.mark.parametrize("parallel", [False, True])
def test_parameters_are_in_the_order_of_transformer_engine(parallel: bool) -> None:
    """Optimizers keep their state by position: a state of TransformerEngine's module is this one's."""
    module = ottava.LayerNormMLP(32, 64, set_parallel_mode=parallel, device="cpu")
    names = [name for name, _ in module.named_parameters()]
    assert names == ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"Unknown activation 'sweeglu'\. Did you mean 'swiglu'\?"):
        build(activation="sweeglu")
    with pytest.raises(ValueError, match="activation_params"):
        build(activation_params={"limit": 7.0})
