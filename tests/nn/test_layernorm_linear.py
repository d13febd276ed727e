"""LayerNormLinear: against float64, against norm and Linear apart, and every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import layer_reference as ref
import ottava
from quant_cases import DETERMINISTIC, QUANTIZING, all_same, casting, gradients, relative, same

IN, OUT = 64, 96
NORM_NAMES = ("layer_norm_weight", "layer_norm_bias")


def build(**options: Any) -> ottava.LayerNormLinear:
    module = ottava.LayerNormLinear(IN, OUT, **{"device": "cpu", **options})
    ref.randomize(module)
    return module


def run(module: torch.nn.Module, x: Tensor, dy: Tensor, scheme: str) -> tuple[Any, Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with casting(scheme):
        y = module(x)
    (y[0] if isinstance(y, tuple) else y).backward(dy)
    return y, x.grad


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_unquantized_against_float64(kind: str, zero_centered: bool, recompute: str) -> None:
    module = build(normalization=kind, zero_centered_gamma=zero_centered, recompute=recompute, eps=1e-3)
    x, dy = torch.randn(5, 3, IN), torch.randn(5, 3, OUT)
    y, dx = run(module, x, dy, "none")
    w, x64 = ref.doubles(module), x.double().requires_grad_()
    gain = {**w, "layer_norm_weight": w["layer_norm_weight"] + 1} if zero_centered else w
    want = ref.linear(ref.norm(x64, gain, "", kind, 1e-3, NORM_NAMES), w, "")
    want.backward(dy.double())
    assert relative(y, want) < 1e-6 and relative(dx, x64.grad) < 1e-5
    ref.assert_same_gradients(module, w, 1e-5)


@pytest.mark.strict
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_equal_to_a_norm_and_a_linear_where_nothing_is_rounded_in_between(kind: str, scheme: str) -> None:
    """In float32 there is no rounding between norm and cast, so fused and apart are the same numbers, state included."""
    module = build(normalization=kind)
    norm = getattr(ottava, kind)(IN, device="cpu")
    linear = ottava.Linear(IN, OUT, device="cpu")
    state = module.state_dict()
    norm.load_state_dict({k.removeprefix("layer_norm_"): v for k, v in state.items() if "layer_norm" in k})
    linear.load_state_dict({k: v for k, v in state.items() if "layer_norm" not in k})
    apart = torch.nn.Sequential(norm, linear)
    x, dy = torch.randn(48, IN), torch.randn(48, OUT)
    for _ in range(3):
        assert all_same(run(module, x, dy, scheme), run(apart, x, dy, scheme))
        assert all_same(gradients(module), gradients(apart))
    if scheme == "delayed":
        assert same(module.delayed.fwd_scale, linear.delayed.fwd_scale)
        assert same(module.delayed.bwd_amax_history, linear.delayed.bwd_amax_history)


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_bf16_is_near_the_unquantized_layer(scheme: str) -> None:
    module = build(params_dtype=torch.bfloat16)
    x, dy = torch.randn(48, IN).bfloat16(), torch.randn(48, OUT).bfloat16()
    y, dx = run(module, x, dy, scheme)
    grad = module.weight.grad.clone()
    want, want_dx = run(module, x, dy, "none")
    bar = 0.3 if scheme == "nvfp4" else 0.1
    assert relative(y, want) < bar and relative(dx, want_dx) < bar and relative(grad, module.weight.grad) < bar


@pytest.mark.parametrize("scheme", DETERMINISTIC)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_norm_output_can_be_returned_and_has_a_gradient(scheme: str, recompute: str) -> None:
    module = build(return_layernorm_output=True, recompute=recompute, params_dtype=torch.bfloat16)
    x = torch.randn(32, IN).bfloat16().requires_grad_()
    with casting(scheme):
        y, normed = module(x)
    norm = ottava.LayerNorm(IN, params_dtype=torch.bfloat16, device="cpu")
    norm.load_state_dict({"weight": module.layer_norm_weight, "bias": module.layer_norm_bias})
    assert same(normed, norm(x))
    # The gradient of the norm's output is added to that of the product.
    (2 * normed.sum()).backward(retain_graph=True)
    from_norm = x.grad.clone()
    other = x.detach().clone().requires_grad_()
    (2 * norm(other).sum()).backward()
    assert relative(from_norm, other.grad) < 2e-2 or from_norm.norm() < 1e-2
    y.sum().backward()
    assert not torch.equal(x.grad, from_norm) and module.weight.grad.any()


@pytest.mark.parametrize(
    "options,count",
    [
        ({}, 1),
        ({"return_bias": True}, 2),
        ({"return_layernorm_output": True}, 2),
        ({"return_bias": True, "return_layernorm_output": True}, 3),
    ],
    ids=str,
)
def test_order_of_what_is_returned(options: dict, count: int) -> None:
    module, x = build(**options), torch.randn(4, 2, IN)
    out = module(x)
    out = out if isinstance(out, tuple) else (out,)
    assert len(out) == count and out[0].shape == (4, 2, OUT)
    if options.get("return_bias"):
        assert out[1] is module.bias
        torch.testing.assert_close(out[0] + out[1], build()(x))
    if options.get("return_layernorm_output"):
        assert out[-1].shape == x.shape


@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_selective_recompute_changes_no_bit(scheme: str) -> None:
    results = []
    for recompute in ("none", "selective"):
        module = build(recompute=recompute, params_dtype=torch.bfloat16)
        torch.manual_seed(1)
        for _ in range(2):
            out = run(module, torch.randn(16, IN).bfloat16(), torch.randn(16, OUT).bfloat16(), scheme)
        results.append([*out, *gradients(module)])
    assert all_same(*results)


@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_parameters_split(scheme: str) -> None:
    module, whole = build(parameters_split={"query": 64, "kv": 32}), build()
    assert {"query_weight", "kv_weight", "query_bias", "kv_bias", *NORM_NAMES} == {
        n for n, _ in module.named_parameters()
    }
    with torch.no_grad():
        for kind in ("weight", "bias"):
            a, b = getattr(whole, kind).split([64, 32])
            getattr(module, f"query_{kind}").copy_(a)
            getattr(module, f"kv_{kind}").copy_(b)
        for name in NORM_NAMES:
            getattr(module, name).copy_(getattr(whole, name))
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    assert all_same(run(module, x, dy, scheme), run(whole, x, dy, scheme))
    assert same(torch.cat([module.query_weight.grad, module.kv_weight.grad]), whole.weight.grad)
    assert same(module.layer_norm_weight.grad, whole.layer_norm_weight.grad)


def test_fused_accumulation() -> None:
    module, plain = build(fuse_wgrad_accumulation=True), build()
    module.weight.main_grad = torch.zeros(OUT, IN)
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    assert all_same(run(module, x, dy, "block"), run(plain, x, dy, "block"))
    assert module.weight.grad is None and torch.equal(module.weight.main_grad, plain.weight.grad)
    assert same(module.layer_norm_weight.grad, plain.layer_norm_weight.grad)


@pytest.mark.parametrize("frozen", ["weight", "layer_norm_weight", "bias"])
def test_frozen_parameters(frozen: str) -> None:
    module, plain = build(), build()
    getattr(module, frozen).requires_grad_(False)
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    assert all_same(run(module, x, dy, "current"), run(plain, x, dy, "current"))
    for (name, a), b in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is None if name == frozen else same(a.grad, b.grad), name


def test_input_without_gradient_still_trains_the_norm() -> None:
    module, plain = build(), build()
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    with casting("block"):
        module(x).backward(dy)
    run(plain, x, dy, "block")
    assert all_same(gradients(module), gradients(plain))


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (1, IN), (3, 5, IN)])
@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_shapes(scheme: str, shape: tuple[int, ...]) -> None:
    y, dx = run(build(), torch.randn(shape), torch.ones(*shape[:-1], OUT), scheme)
    assert y.shape == (*shape[:-1], OUT) and dx.shape == shape


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_backward_override(override: str, recompute: str) -> None:
    module, plain = build(recompute=recompute), build()
    x, dy = torch.randn(32, IN), torch.randn(32, OUT)
    leaf = x.clone().requires_grad_()
    with ottava.autocast(recipe=ottava.recipe.Float8CurrentScaling(backward_override=override)):
        y = module(leaf)
    y.backward(dy)
    assert same(y, run(build(), x, dy, "current")[0])
    _, dx = run(plain, x, dy, "none")
    if override == "high_precision":
        assert same(leaf.grad, dx) and all_same(gradients(module), gradients(plain))
        return
    q = ottava.quantize(module.weight.detach(), ottava.recipe.Float8CurrentScaling(), "weight").dequantize()
    normed = ref.norm(x, {n: getattr(module, n).detach() for n in NORM_NAMES}, "", names=NORM_NAMES)
    qx = ottava.quantize(normed, ottava.recipe.Float8CurrentScaling()).dequantize()
    assert relative(module.weight.grad, dy.t() @ qx) < 5e-3
    leaf2 = x.clone().requires_grad_()
    (ref.norm(leaf2, {n: getattr(module, n).detach() for n in NORM_NAMES}, "", names=NORM_NAMES) @ q.t()).backward(dy)
    assert relative(leaf.grad, leaf2.grad) < 1e-5


def test_unknown_norm_is_named() -> None:
    with pytest.raises(ValueError, match="normalization must be 'LayerNorm' or 'RMSNorm', got 'BatchNorm'"):
        build(normalization="BatchNorm")
