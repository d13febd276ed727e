"""Linear: what each product multiplies, and every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe
from quant_cases import DETERMINISTIC, QUANTIZING, RECIPES, all_same, casting, gradients, relative, same

IN, OUT = 64, 96
EXACT = [name for name in DETERMINISTIC if name != "none"]


def linear(**options: Any) -> ottava.Linear:
    torch.manual_seed(0)
    module = ottava.Linear(IN, OUT, **{"device": "cpu", **options})
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(torch.randn(p.shape) * (0.1 if "weight" in name else 1.0))
    return module


def run(module: ottava.Linear, x: Tensor, dy: Tensor, scheme: str, **options: Any) -> tuple[Tensor, Tensor | None]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with casting(scheme):
        y = module(x, **options)
    y.backward(dy)
    return y, x.grad


def values(x: Tensor, scheme: str, role: str, direction: str = "rowwise") -> Tensor:
    """What the GEMM sees of x: the dequantized values of one copy, as [rows, columns] of x."""
    q = ottava.quantize(x, RECIPES[scheme], role=role)
    return (q if direction == "rowwise" else q.drop_rowwise()).dequantize(torch.float32)


# --------------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantized_against_torch(dtype: torch.dtype) -> None:
    module, plain = linear(params_dtype=dtype), torch.nn.Linear(IN, OUT, dtype=torch.float64)
    plain.load_state_dict({k: v.detach().double() for k, v in module.named_parameters()})
    x, dy = torch.randn(5, 3, IN, dtype=dtype), torch.randn(5, 3, OUT, dtype=dtype)
    y, dx = run(module, x, dy, "none")
    x64 = x.double().requires_grad_()
    want = plain(x64)
    want.backward(dy.double())
    bar = 1e-6 if dtype == torch.float32 else 3e-3
    assert y.dtype == dtype and relative(y, want) < bar and relative(dx, x64.grad) < bar
    assert relative(module.weight.grad, plain.weight.grad) < bar and relative(module.bias.grad, plain.bias.grad) < bar


@pytest.mark.parametrize("scheme", EXACT)
def test_the_three_products_take_the_copies_of_the_design(scheme: str) -> None:
    """y: rowwise x and w. dx: rowwise dy, columnwise w. dw: columnwise dy and x. The bias gradient is not quantized."""
    module = linear()
    x, dy = torch.randn(48, IN), torch.randn(48, OUT)
    y, dx = run(module, x, dy, scheme)
    w = module.weight.detach()
    torch.testing.assert_close(
        y, values(x, scheme, "input") @ values(w, scheme, "weight").t() + module.bias, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        dx, values(dy, scheme, "grad") @ values(w, scheme, "weight", "columnwise"), rtol=1e-5, atol=1e-5
    )
    dw = values(dy, scheme, "grad", "columnwise").t() @ values(x, scheme, "input", "columnwise")
    torch.testing.assert_close(module.weight.grad, dw, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(module.bias.grad, dy.sum(0), rtol=1e-5, atol=1e-5)


def test_nvfp4_is_near_the_unquantized_layer() -> None:
    module, x, dy = linear(), torch.randn(64, IN), torch.randn(64, OUT)
    y, dx = run(module, x, dy, "nvfp4")
    grad = module.weight.grad.clone()
    want, want_dx = run(module, x, dy, "none")
    # Four bits: about 10% an operand. Stochastic rounding of gradients doubles their error.
    assert relative(y, want) < 0.2 and relative(dx, want_dx) < 0.3 and relative(grad, module.weight.grad) < 0.3


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_quantization_error_is_that_of_the_format(scheme: str) -> None:
    module, x, dy = linear(), torch.randn(64, IN), torch.randn(64, OUT)
    y, _ = run(module, x, dy, scheme)
    want, _ = run(module, x, dy, "none")
    error = relative(y, want)
    assert 0.005 < error < (0.2 if scheme == "nvfp4" else 0.06), error


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (0, IN), (7, IN), (2, 3, 5, IN)])
@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_any_number_of_leading_dimensions(scheme: str, shape: tuple[int, ...]) -> None:
    module, x = linear(), torch.randn(shape)
    y, dx = run(module, x, torch.ones(*shape[:-1], OUT), scheme)
    assert y.shape == (*shape[:-1], OUT) and dx.shape == shape and module.weight.grad.shape == (OUT, IN)


def test_noncontiguous_input_and_gradient() -> None:
    module = linear()
    x, dy = torch.randn(IN, 32).t(), torch.randn(OUT, 32).t()
    for scheme in ("none", "block", "delayed"):
        a = run(linear(), x, dy, scheme)
        b = run(module, x.contiguous(), dy.contiguous(), scheme)
        assert all_same(a, b)
        module = linear()


def test_expanded_gradient() -> None:
    """`sum().backward()` hands over a gradient with stride 0."""
    module, other, x = linear(), linear(), torch.randn(16, IN)
    with casting("block"):
        module(x).sum().backward()
        other(x).backward(torch.ones(16, OUT))
    assert all_same(gradients(module), gradients(other))


def test_float16_activations() -> None:
    module = linear(params_dtype=torch.float16)
    y, dx = run(module, torch.randn(16, IN).half(), torch.randn(16, OUT).half(), "current")
    assert y.dtype == dx.dtype == module.weight.grad.dtype == torch.float16 and y.isfinite().all()


def test_torch_autocast_sets_the_activation_dtype() -> None:
    module, x = linear(), torch.randn(16, IN)
    with torch.autocast("cpu", dtype=torch.bfloat16), casting("current"):
        y = module(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and module.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


def test_torch_autocast_does_not_reach_into_the_ops() -> None:
    """It would turn the float32 products of the emulation into bf16 ones."""
    for scheme in DETERMINISTIC:
        module, x = linear(params_dtype=torch.bfloat16), torch.randn(16, IN).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16), casting(scheme):
            y = module(x)
        with casting(scheme):
            assert same(y, linear(params_dtype=torch.bfloat16)(x)), scheme


# ------------------------------------------------------------------------------------------------------------------ options


def test_default_initialization() -> None:
    torch.manual_seed(0)
    module = ottava.Linear(256, 512, device="cpu")
    assert abs(module.weight.std().item() - 0.023) < 5e-4 and abs(module.weight.mean().item()) < 5e-4
    assert not module.bias.any() and module.weight.dtype == torch.float32
    ones = ottava.Linear(16, 16, init_method=torch.nn.init.ones_, device="cpu", bias=False)
    assert torch.equal(ones.weight, torch.ones(16, 16)) and "bias" not in dict(ones.named_parameters())


@pytest.mark.parametrize("scheme", ["none", "block"])
def test_return_bias_leaves_it_to_the_caller(scheme: str) -> None:
    module, whole, x = linear(return_bias=True), linear(), torch.randn(16, IN)
    with casting(scheme):
        y, bias = module(x)
        want = whole(x)
    assert bias is module.bias
    torch.testing.assert_close(y + bias, want)
    y.sum().backward()
    assert module.bias.grad is None and module.weight.grad is not None


@pytest.mark.parametrize("split", [{"query_": 48, "key": 32, "value": 16}, ("query_", "key", "value")])
@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_parameters_split_is_one_product(split: Any, scheme: str) -> None:
    module, whole = linear(parameters_split=split), linear()
    names = ["query_weight", "key_weight", "value_weight"]
    rows = [48, 32, 16] if isinstance(split, dict) else [32, 32, 32]
    assert [n for n, _ in module.named_parameters()] == names + [n.replace("weight", "bias") for n in names]
    assert [getattr(module, n).shape[0] for n in names] == rows
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for part, piece in zip(names, getattr(whole, kind).split(rows), strict=True):
                getattr(module, part.replace("weight", kind)).copy_(piece)
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    assert all_same(run(module, x, dy, scheme), run(whole, x, dy, scheme))
    assert same(torch.cat([getattr(module, n).grad for n in names]), whole.weight.grad)
    assert same(torch.cat([getattr(module, n.replace("weight", "bias")).grad for n in names]), whole.bias.grad)


def test_parameters_split_after_the_parts_were_moved() -> None:
    """The parts need not lie behind one another in memory: an optimizer or a checkpoint may replace them."""
    module, whole, x = linear(parameters_split=("a", "b")), linear(), torch.randn(16, IN)
    for name, piece in zip(("a", "b"), whole.weight.detach().split(48), strict=True):
        setattr(module, f"{name}_weight", torch.nn.Parameter(piece.clone()))
    for name, piece in zip(("a", "b"), whole.bias.detach().split(48), strict=True):
        setattr(module, f"{name}_bias", torch.nn.Parameter(piece.clone()))
    dy = torch.randn(16, OUT)
    assert all_same(run(module, x, dy, "block"), run(whole, x, dy, "block"))


def test_parameters_split_that_does_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"must add up to 96 output features, adds up to 95"):
        linear(parameters_split={"a": 48, "b": 47})
    with pytest.raises(ValueError, match="must divide 96 output features evenly; give a dict of sizes instead"):
        linear(parameters_split=("a", "b", "c", "d", "e"))


@pytest.mark.parametrize("scheme", DETERMINISTIC)
@pytest.mark.parametrize("split", [None, ("a", "b")])
def test_fused_accumulation_adds_into_main_grad(scheme: str, split: Any) -> None:
    module, plain = linear(fuse_wgrad_accumulation=True, parameters_split=split), linear(parameters_split=split)
    weights = [p for n, p in module.named_parameters() if "weight" in n]
    for weight in weights:
        weight.main_grad = torch.ones(weight.shape)
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    for _ in range(2):
        run(module, x, dy, scheme)
        run(plain, x, dy, scheme)
    first = linear(parameters_split=split)
    run(first, x, dy, scheme)
    for weight, one, two in zip(weights, first.parameters(), plain.parameters(), strict=False):
        assert weight.grad is None and weight.grad_added_to_main_grad
        torch.testing.assert_close(weight.main_grad, 1 + one.grad + two.grad)
    assert [p.grad is not None for n, p in module.named_parameters() if "bias" in n] == [True] * len(weights)


def test_fused_accumulation_is_float32_for_bf16_weights() -> None:
    module = linear(fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16)
    module.weight.main_grad = torch.zeros(OUT, IN)
    x, dy = torch.randn(16, IN).bfloat16(), torch.randn(16, OUT).bfloat16()
    run(module, x, dy, "none")
    want = dy.double().t() @ x.double()
    assert relative(module.weight.main_grad, want) < 1e-6  # not rounded to bf16 on the way


def test_fused_accumulation_without_main_grad_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"needs Linear\.weight\.main_grad: give it a float32 tensor of the weight's shape"
    ):
        linear(fuse_wgrad_accumulation=True)(torch.randn(16, IN))


@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_frozen_weight(scheme: str) -> None:
    module, plain = linear(), linear()
    module.weight.requires_grad_(False)
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    (y, dx), (want, want_dx) = run(module, x, dy, scheme), run(plain, x, dy, scheme)
    assert same(y, want) and same(dx, want_dx) and module.weight.grad is None
    assert same(module.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_input_without_gradient(scheme: str) -> None:
    module, plain = linear(), linear()
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    with casting(scheme):
        y = module(x)
    y.backward(dy)
    want, _ = run(plain, x, dy, scheme)
    assert same(y, want) and all_same(gradients(module), gradients(plain))


@pytest.mark.parametrize("scheme", DETERMINISTIC)
def test_everything_frozen_gives_no_graph(scheme: str) -> None:
    module = linear().requires_grad_(False)
    with casting(scheme):
        assert not module(torch.randn(16, IN)).requires_grad


@pytest.mark.parametrize("scheme", DETERMINISTIC)
@pytest.mark.parametrize("option", [{"recompute": "selective"}, {"save_original_input": True}])
def test_keeping_the_input_instead_of_its_copy_changes_no_bit(scheme: str, option: dict) -> None:
    module, plain = linear(**option), linear()
    x, dy = torch.randn(16, IN), torch.randn(16, OUT)
    assert all_same(run(module, x, dy, scheme), run(plain, x, dy, scheme))
    assert all_same(gradients(module), gradients(plain))


# ------------------------------------------------------------------------------------------------------- backward_override

OVERRIDABLE = {
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}


@pytest.mark.parametrize("scheme", list(OVERRIDABLE))
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_backward_in_high_precision(scheme: str, recompute: str) -> None:
    """Forward is quantized; backward multiplies what was there before quantization: the gradients of the unquantized layer."""
    module, plain = linear(recompute=recompute), linear()
    x, dy = torch.randn(32, IN), torch.randn(32, OUT)
    leaf = x.clone().requires_grad_()
    with ottava.autocast(recipe=OVERRIDABLE[scheme](backward_override="high_precision")):
        y = module(leaf)
    y.backward(dy)
    with casting(scheme):
        assert same(y, plain(x))
    _, dx = run(plain, x, dy, "none")
    assert same(leaf.grad, dx) and all_same(gradients(module), gradients(plain))


@pytest.mark.parametrize("scheme", list(OVERRIDABLE))
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_backward_with_dequantized_operands(scheme: str, recompute: str) -> None:
    """The gradient stays in high precision; x and w are the row copies of forward, turned back."""
    module = linear(recompute=recompute)
    x, dy = torch.randn(32, IN), torch.randn(32, OUT)
    leaf = x.clone().requires_grad_()
    with ottava.autocast(recipe=OVERRIDABLE[scheme](backward_override="dequantized")):
        y = module(leaf)
    y.backward(dy)
    torch.testing.assert_close(leaf.grad, dy @ values(module.weight.detach(), scheme, "weight"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.weight.grad, dy.t() @ values(x, scheme, "input"), rtol=1e-5, atol=2e-5)


# ---------------------------------------------------------------------------------------------------------------- arguments


def test_what_is_not_offered_says_so() -> None:
    x = torch.randn(16, IN)
    with pytest.raises(ValueError, match="fp8_output and fp8_grad are not offered"):
        linear()(x, fp8_output=True)
    with pytest.raises(ValueError, match="delay_wgrad_compute=True is not offered"):
        linear(delay_wgrad_compute=True)
    with pytest.raises(ValueError, match="parallel_mode must be None, 'column' or 'row', got 'diagonal'"):
        linear(parallel_mode="diagonal")
    with pytest.raises(ValueError, match=r"recompute must be one of \('none', 'selective'\), got 'all'"):
        linear(recompute="all")


def test_overlap_switches_change_nothing_on_one_rank() -> None:
    switches = {
        "ub_overlap_ag": True,
        "ub_overlap_rs": True,
        "ub_bulk_dgrad": True,
        "ub_bulk_wgrad": True,
        "ub_name": "qkv",
    }
    x = torch.randn(16, IN)
    assert torch.equal(linear(**switches)(x), linear()(x))


def test_meta_device() -> None:
    module = ottava.Linear(IN, OUT, device="meta")
    assert module.weight.is_meta
    module.to_empty(device="cpu").reset_parameters()
    assert module(torch.randn(4, IN)).isfinite().all()
    assert module.delayed.fwd_scale.tolist() == [1.0] * 3


def test_torch_default_device_is_followed() -> None:
    with torch.device("meta"):
        assert ottava.Linear(16, 16).weight.is_meta


def test_main_grad_is_needed_where_a_gradient_will_be() -> None:
    layer = ottava.Linear(32, 48, parameters_split={"query": 16, "key": 32}, fuse_wgrad_accumulation=True, device="cpu")
    x = torch.randn(16, 32, requires_grad=True)
    with torch.no_grad():
        layer(x)
    layer.query_weight.requires_grad_(False)
    with pytest.raises(ValueError, match="needs Linear.key_weight.main_grad"):
        layer(x)
    layer.key_weight.main_grad = torch.zeros(32, 32)
    layer(x).sum().backward()
    assert layer.key_weight.main_grad.any() and layer.query_weight.grad is None
    layer.key_weight.requires_grad_(False)
    del layer.key_weight.main_grad
    layer(x).sum().backward()
