"""A residual that the next norm adds: the bits of an addition before it, forward and backward, for every recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.models import Llama, LlamaConfig, causal_lm
from ottava.nn import base
from quant_cases import RECIPES, all_same, casting, delayed_state, gradients

MODULES: dict[str, Any] = {
    "linear": lambda **o: ottava.LayerNormLinear(64, 96, normalization="RMSNorm", bias=False, device="cpu", **o),
    "mlp": lambda **o: ottava.LayerNormMLP(64, 96, activation="swiglu", device="cpu", **o),
}


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    made = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    return made[0].clone().requires_grad_(), made[1].clone().requires_grad_()


def _together(module: nn.Module, name: str, fused: bool) -> list[Tensor | None]:
    """Two steps: outputs, the sum's own use, gradients of both inputs and of the parameters."""
    seen: list[Tensor | None] = []
    for _ in range(2):
        x, residual = _inputs()
        torch.manual_seed(0)  # of stochastic rounding
        with casting(name):
            if fused:
                *out, total = module(x, residual=residual)
            else:
                total = residual + x
                out = module(total)
                out = out if isinstance(out, tuple) else (out,)
        (sum(y.square().mean() for y in out) + (total * total.detach().roll(1)).mean()).backward()
        seen += [*out, total, x.grad, residual.grad, *gradients(module)]
    return [*seen, *delayed_state(module).values()]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPES)
def test_the_norm_adds_with_the_bits_of_an_addition_before(kind: str, name: str, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    general, other = copy.deepcopy(module), copy.deepcopy(module)
    apart = _together(other, name, fused=False)
    assert all_same(_together(module, name, fused=True), apart)
    monkeypatch.setattr(base, "direct", lambda stages, groups: False)
    assert all_same(_together(general, name, fused=True), apart)


@pytest.mark.parametrize(
    "options", [{"recompute": "selective"}, {"return_layernorm_output": True, "return_bias": True}]
)
def test_the_same_where_more_is_returned_or_made_again(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = MODULES["mlp"](bias=False, **options)
    other = copy.deepcopy(module)

    def bare(module: nn.Module, fused: bool) -> list[Tensor | None]:
        x, residual = _inputs()
        with casting("current"):
            out = module(x, residual=residual) if fused else module(residual + x)
        out = [y for y in (out if isinstance(out, tuple) else (out,)) if y is not None]
        if fused:
            *out, total = out
            assert all_same([total], [x + residual])
        sum(y.square().mean() for y in out).backward()  # type: ignore[union-attr]
        return [*out, x.grad, residual.grad, *gradients(module)]

    assert all_same(bare(module, True), bare(other, False))


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be like its input, \(4, 64\) on cpu; got \(3, 64\)"):
        MODULES["linear"]()(torch.randn(4, 64), residual=torch.randn(3, 64))
    with pytest.raises(ValueError, match="must be like its input"):
        ottava.RMSNorm(64, device="cpu")(torch.randn(4, 64), residual=torch.randn(4, 64).bfloat16())


def _layer(**options: Any) -> ottava.TransformerLayer:
    chosen = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False, "normalization": "RMSNorm", **options}
    return ottava.TransformerLayer(64, 96, 4, device="cpu", **chosen)


@pytest.mark.parametrize("options", [{"bias": True}, {"hidden_dropout": 0.1}, {"output_layernorm": True}])
def test_layers_that_add_more_than_the_residual_say_so(options: dict[str, Any]) -> None:
    layer, x = _layer(**options), torch.randn(4, 2, 64)
    assert not layer.adds_later()
    with pytest.raises(ValueError, match="adds nothing but the residual"):
        layer(x, residual=x)
    with pytest.raises(ValueError, match="adds nothing but the residual"):
        layer(x, return_residual=True)


def test_no_addition_is_left_between_the_layers_of_a_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two layers has two norms that add, and so has the last norm; backward adds in all but the first and the last."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, ffn_hidden_size=64, layers=2, heads=2, kv_heads=1)
    model = Llama(config, device="cpu", params_dtype=torch.bfloat16)
    apart = copy.deepcopy(model)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    counted: dict[str, int] = {}

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[func.name()] = counted.get(func.name(), 0) + 1
            return func(*args, **kwargs or {})

    with Counting():
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    assert (counted["ottava::norm_add_stats"], counted["ottava::norm_stats"]) == (4, 1)
    assert (counted["ottava::norm_backward_add"], counted["ottava::norm_backward"]) == (3, 2)
    monkeypatch.setattr(causal_lm, "_adds_later", lambda layer: False)
    monkeypatch.setattr(ottava.TransformerLayer, "adds_later", lambda self: False)
    other = apart.loss(tokens[:, :-1], tokens[:, 1:])
    other.backward()
    assert all_same([loss, *gradients(model)], [other, *gradients(apart)])
