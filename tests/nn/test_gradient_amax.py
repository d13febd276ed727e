"""The amax of a gradient travels from the norm that made it to the product before, if it is still that gradient's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.kernels.registry import FUNCTIONS
from ottava.nn import gradient_amax
from quant_cases import casting, gradients


class _Passed(torch.autograd.Function):
    """Notes the amax of the gradient that it makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dx = dy * 2.0
        gradient_amax.note(dx, dx.abs().max().reshape(1))
        return dx


class _Asked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Any]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        found = gradient_amax.find(dy)
        ctx.seen.append(None if found is None else (found.item(), dy.abs().max().item()))
        return dy, None


@pytest.mark.parametrize("case", ["same", "another shape", "added to", "a copy", "a part", "transposed"])
def test_it_is_found_for_that_gradient_alone(case: str) -> None:
    seen: list[Any] = []
    x = torch.randn(4, 6, requires_grad=True)
    y = _Asked.apply(x, seen)
    passed = _Passed.apply(
        {"another shape": lambda: y.view(2, 12), "a part": lambda: y[:2], "transposed": lambda: y.t()}.get(
            case, lambda: y
        )()
    )
    loss = (passed * torch.arange(float(passed.numel())).view_as(passed)).sum()
    if case == "added to":
        loss = loss + 100 * y.sum()
    if case == "a copy":
        y.register_hook(lambda grad: grad * 3)
    loss.backward()
    if case in ("same", "another shape"):
        assert seen == [(46.0, 46.0)]
    else:
        assert seen == [None]


def test_memory_that_is_written_to_has_no_amax_and_neither_has_memory_that_comes_later() -> None:
    gradient = torch.randn(8)
    gradient_amax.note(gradient, gradient.abs().max().reshape(1))
    assert gradient_amax.find(gradient.view(2, 4)) is not None
    gradient.add_(1)
    assert gradient_amax.find(gradient) is None
    gradient_amax.note(gradient, gradient.abs().max().reshape(1))
    del gradient
    assert all(gradient_amax.find(torch.randn(8)) is None for _ in range(100))


def test_a_layers_products_take_it_and_have_the_bits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    quantize = FUNCTIONS["cpu"].quantize

    def looked_at(x: Tensor, scheme: str, scale: Any, amax: Any, row: bool, column: bool) -> Any:
        if "e5m2" in scheme:
            given.append(amax is not None)
        return quantize(x, scheme, scale, amax, row, column)

    monkeypatch.setattr(FUNCTIONS["cpu"], "quantize", looked_at)

    def run() -> list[Any]:
        torch.manual_seed(0)
        layers = nn.ModuleList(
            ottava.TransformerLayer(
                64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, bias=False, normalization="RMSNorm", activation="swiglu", device="cpu"
            )
            for _ in range(2)
        )  # fmt: skip
        x = torch.randn(16, 2, 64, requires_grad=True)
        with casting("current"):
            y, residual = layers[0](x, return_residual=True)
            y = layers[1](y, residual=residual)
        y.square().mean().backward()
        return [y, x.grad, *gradients(layers)]

    with_amax = run()
    # Backward, layer 2: fc2 (the gradient of an addition), proj, qkv; layer 1: fc2, proj, qkv. fc1's is made by the activation.
    assert given == [False, True, False, True, True, False]
    monkeypatch.setattr(gradient_amax, "find", lambda gradient: None)
    assert all(torch.equal(a, b) for a, b in zip(with_amax, run(), strict=True) if a is not None)
