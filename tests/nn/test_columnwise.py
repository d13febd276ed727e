"""The columnwise copy of a weight is made in backward: nothing is kept of it, and its bytes are those of a copy that was kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.nn.columnwise import source_of_weight
from quant_cases import RECIPES, all_same, casting, delayed_state, gradients

QUANTIZED = [name for name in RECIPES if name != "none"]
MODULES: dict[str, Any] = {
    "split linear": lambda: ottava.Linear(64, 96, parameters_split={"query": 64, "key": 32}, device="cpu"),
    "swiglu mlp": lambda: ottava.LayerNormMLP(64, 96, activation="swiglu", bias=False, device="cpu"),
    "grouped": lambda: ottava.GroupedLinear(2, 64, 96, device="cpu"),
}


def call(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return (
        module(x, [x.shape[0] // 2] * 2, **options)
        if isinstance(module, ottava.GroupedLinear)
        else module(x, **options)
    )


def trained(module: nn.Module, name: str, first: bool | None) -> list[Tensor | None]:
    """Outputs, gradients and state of two steps, of which the second begins before the first goes back."""
    xs = [torch.randn(64, 64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2)]
    ys = []
    for i, x in enumerate(xs):
        torch.manual_seed(i)  # of stochastic rounding
        with casting(name):  # where delayed scaling writes new scales
            ys.append(call(module, x, is_first_microbatch=first))
    for i, y in enumerate(ys):
        torch.manual_seed(10 + i)
        y.square().mean().backward()
    return [*ys, *(x.grad for x in xs), *gradients(module), *delayed_state(module).values()]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_gradients_are_those_of_a_copy_that_was_kept(kind: str, name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    other = copy.deepcopy(module)
    assert all_same(trained(module, name, None), trained(other, name, True))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_nothing_is_kept_of_a_weight(kind: str, name: str) -> None:
    module, kept = MODULES[kind](), []
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept.append(t)
        return t

    x = torch.randn(320, 64)  # of other sizes than the weights are
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), casting(name):
        call(module, x)
    weights = {tuple(p.shape) for p in module.parameters() if p.dim() == 2} | {(96, 64)}  # parts and the whole
    weights |= {tuple(reversed(shape)) for shape in weights}
    weights |= {(rows, columns // 2) for rows, columns in weights}
    assert kept and not [t for t in kept if tuple(t.shape) in weights]


@pytest.mark.parametrize(
    ("kind", "written"), [("swiglu mlp", "fc2_weight"), ("split linear", "key_weight"), ("grouped", "weight1")]
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_weight_that_is_written_before_backward_is_an_error(kind: str, written: str, apart: bool) -> None:
    """Of several parameters over one memory each counts, also where their versions are numbers of their own."""
    module = MODULES[kind]()
    for name, p in list(module.named_parameters()) if apart else ():
        alone = torch.empty(0).set_(p.untyped_storage(), p.storage_offset(), p.shape, p.stride())
        setattr(module, name, nn.Parameter(alone))
    x = torch.randn(64, 64, requires_grad=True)
    with casting("current"):
        y = call(module, x)
    with torch.no_grad():
        getattr(module, written).mul_(2)
    with pytest.raises(ValueError, match=r"written to between forward and backward.*is_first_microbatch=True"):
        y.sum().backward()


def test_with_a_kept_copy_a_weight_may_be_written() -> None:
    module = MODULES["swiglu mlp"]()
    x = torch.randn(64, 64, requires_grad=True)
    seen = []
    for writes in (False, True):
        with casting("current"):
            y = module(x, is_first_microbatch=True)
        if writes:
            with torch.no_grad():
                module.fc2_weight.mul_(2)
        seen.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*seen)


def test_a_weight_in_new_memory_is_that_of_forward() -> None:
    """`parameter.data = ...`, as some wrappers do it: backward has what forward had."""
    module = MODULES["swiglu mlp"]()
    other, x = copy.deepcopy(module), torch.randn(64, 64, requires_grad=True)
    with casting("current"):
        y, expected = module(x), other(x)
    module.fc1_weight.data = torch.zeros_like(module.fc1_weight)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, expected)))


def test_a_weight_that_lies_in_no_parameter_has_no_source() -> None:
    parts = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    whole = torch.cat(parts)
    assert source_of_weight(whole, whole.detach(), parts) is None
    with torch.inference_mode():
        frozen = nn.Parameter(torch.randn(4, 8), requires_grad=False)
    assert source_of_weight(frozen, frozen.detach(), [frozen]) is None
    assert source_of_weight(parts[0], parts[0].detach(), parts[:1]) is not None
