"""LayerNorm and RMSNorm modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava
from quant_cases import casting, relative, same

KINDS = {"LayerNorm": ottava.LayerNorm, "RMSNorm": ottava.RMSNorm}
TORCH = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("shape", [64, (4, 16), [64]])
@pytest.mark.parametrize("dtype,bar", [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_against_torch_in_float64(kind: str, shape, dtype: torch.dtype, bar: float) -> None:
    module = KINDS[kind](shape, eps=1e-3, params_dtype=dtype, device="cpu")
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape))
    plain = TORCH[kind](shape, eps=1e-3, dtype=torch.float64)
    plain.load_state_dict({k: v.double() for k, v in module.state_dict().items()})
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    x, dy = torch.randn(3, 5, *size, dtype=dtype, requires_grad=True), torch.randn(3, 5, *size, dtype=dtype)
    x64 = x.detach().double().requires_grad_()
    y, want = module(x), plain(x64)
    y.backward(dy)
    want.backward(dy.double())
    assert y.dtype == dtype and relative(y, want) < bar and relative(x.grad, x64.grad) < bar
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert relative(p.grad, q.grad) < bar and p.grad.shape == p.shape


@pytest.mark.parametrize("kind", list(KINDS))
def test_zero_centered_gain_is_one_more_than_the_weight(kind: str) -> None:
    centered, plain = (KINDS[kind](32, zero_centered_gamma=z, device="cpu") for z in (True, False))
    assert not centered.weight.any() and torch.equal(plain.weight, torch.ones(32))
    with torch.no_grad():
        centered.weight.normal_()
        plain.weight.copy_(centered.weight + 1)
    x = torch.randn(5, 32)
    assert torch.equal(centered(x), plain(x))


def test_parameters_and_arguments() -> None:
    assert {n for n, _ in ottava.LayerNorm(8, device="cpu").named_parameters()} == {"weight", "bias"}
    assert {n for n, _ in ottava.RMSNorm(8, device="cpu").named_parameters()} == {"weight"}
    assert ottava.LayerNorm(hidden_size=8, device="cpu").normalized_shape == (8,)  # an older name
    assert ottava.RMSNorm(8, dtype=torch.bfloat16, device="cpu").weight.dtype is torch.bfloat16
    assert repr(ottava.RMSNorm(8, device="cpu")) == "RMSNorm((8,), eps=1e-05, zero_centered_gamma=False)"


@pytest.mark.parametrize("kind", list(KINDS))
def test_arguments_of_transformer_engine_that_say_a_thing_twice_or_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="hidden_size is an older name of normalized_shape, got 8 and 16"):
        KINDS[kind](16, hidden_size=8, device="cpu")
    with pytest.raises(ValueError, match="params_dtype is an older name of dtype"):
        KINDS[kind](16, params_dtype=torch.float32, dtype=torch.bfloat16, device="cpu")
    assert KINDS[kind](16, sm_margin=4, device="cpu").features == 16
    assert f"{kind}: sm_margin has no effect" in caplog.text


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(kind: str, rows: int) -> None:
    module, x = KINDS[kind](16, device="cpu"), torch.randn(rows, 16, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.shape == (rows, 16) and module.weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", list(KINDS))
def test_autocast_does_not_change_it(kind: str) -> None:
    module, x = KINDS[kind](32, device="cpu"), torch.randn(5, 32)
    with casting("current"):
        assert same(module(x), KINDS[kind](32, device="cpu")(x))


@pytest.mark.parametrize("kind", list(KINDS))
def test_mistakes_are_named(kind: str) -> None:
    module = KINDS[kind](32, device="cpu")
    with pytest.raises(
        ValueError, match=rf"{kind} expects last dimension\(s\) \(32,\), got an input of shape \(4, 31\)"
    ):
        module(torch.randn(4, 31))
    with pytest.raises(
        ValueError, match=f"The input of {kind} must be float32, bfloat16 or float16, got torch.float64"
    ):
        module(torch.randn(4, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"{kind} is on cpu but its input is on meta"):
        module(torch.randn(4, 32, device="meta"))
    with pytest.raises(ValueError, match="needs normalized_shape"):
        KINDS[kind](device="cpu")


@pytest.mark.parametrize("kind", [ottava.LayerNorm, ottava.RMSNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_reset_parameters_leaves_the_meta_device(kind: Any, zero_centered: bool) -> None:
    module = kind(8, device="meta", zero_centered_gamma=zero_centered)
    assert module.weight.is_meta
    weight = module.weight
    module.reset_parameters()
    assert module.weight is weight and torch.equal(weight, torch.full((8,), 0.0 if zero_centered else 1.0))
    assert module.bias is None or not module.bias.any()
    assert module(torch.randn(2, 8)).isfinite().all()


@pytest.mark.parametrize("make", [ottava.LayerNorm, ottava.RMSNorm, lambda k, **o: ottava.LayerNormLinear(k, k, **o)])
def test_bits_do_not_follow_the_strides_of_the_input(make: Any) -> None:
    module: Any = make(128, device="cpu")
    upright = torch.randn(128, 256)
    seen = []
    for x in (upright.clone().t(), upright.t().contiguous()):
        x.requires_grad_()
        module.zero_grad()
        y = module(x)
        y.square().sum().backward()
        seen.append([y, x.grad, *(p.grad.clone() for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("kind", list(KINDS))
def test_under_torch_autocast_the_output_has_its_dtype(kind: str) -> None:
    """As that of TransformerEngine's norms, and of the modules here; the gradients keep the dtypes of what they belong to."""
    module, x = KINDS[kind](32, device="cpu"), torch.randn(4, 32, requires_grad=True)
    for residual in (None, torch.randn(4, 32)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x, residual)
        assert y.dtype == torch.bfloat16
        plain = None if residual is None else residual.bfloat16()
        assert same(y, module(x.bfloat16(), plain))
        y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}
