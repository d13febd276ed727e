"""`autocast`: which recipe is in force where."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe
from ottava.quant.state import CURRENT
from quant_cases import QUANTIZING, RECIPES, casting, same


def linear() -> ottava.Linear:
    torch.manual_seed(0)
    return ottava.Linear(32, 32, device="cpu")


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(9))


def outputs() -> dict[str, Tensor]:
    result = {}
    for name in RECIPES:
        with casting(name):
            result[name] = linear()(X).detach()
    return result


def test_recipes_give_different_numbers() -> None:
    """A guard for the tests below, which tell recipes apart by their outputs."""
    # MXFP8 has powers of two for scales as block scaling does: for a tensor this small the same values come out.
    results = [value for name, value in outputs().items() if name != "mxfp8"]
    assert not any(torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize("outer", list(RECIPES))
@pytest.mark.parametrize("inner", list(RECIPES))
def test_the_innermost_counts_and_the_outer_comes_back(outer: str, inner: str) -> None:
    want = outputs()
    module, other = linear(), linear()
    with casting(outer):
        with casting(inner):
            assert same(other(X), want[inner])
        assert same(module(X), want[outer])
    assert same(linear()(X), want["none"])


def test_default_is_delayed_scaling() -> None:
    module = linear()
    with ottava.autocast():
        module(X)
    assert module.fp8_meta["recipe"] == recipe.DelayedScaling() and module.delayed.used


def test_names_and_arguments_of_transformer_engine() -> None:
    assert ottava.fp8_autocast is ottava.autocast and ottava.fp8_model_init is ottava.quantized_model_init
    want = outputs()
    with ottava.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=RECIPES["block"], fp8_group=None):
        assert same(linear()(X), want["block"])
    with ottava.autocast(True, False, RECIPES["current"]):
        assert same(linear()(X), want["current"])


def test_a_block_can_be_entered_again() -> None:
    block, want = casting("block"), outputs()
    for _ in range(2):
        with block:
            assert same(linear()(X), want["block"])
    assert CURRENT.recipe is None and CURRENT.depth == 0


def test_backward_uses_the_recipe_of_forward_wherever_it_runs() -> None:
    grads = []
    for where in ("outside", "inside another"):
        module = linear()
        with casting("block"):
            y = module(X)
        with casting("current" if where == "inside another" else "none"):
            y.backward(torch.ones_like(y))
        grads.append(module.weight.grad)
    assert same(*grads)


@pytest.mark.parametrize("name", QUANTIZING)
def test_an_exception_restores_what_was_before(name: str) -> None:
    with casting("block"):
        with pytest.raises(KeyError), casting(name):
            linear()(X)
            raise KeyError
        assert CURRENT.recipe is RECIPES["block"] and CURRENT.depth == 1
    assert CURRENT.recipe is None and CURRENT.depth == 0 and not CURRENT.touched


def test_something_that_is_not_a_recipe_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"recipe must be one of ottava\.recipe's recipes, got str; for example recipe=ottava\.recipe"
    ):
        ottava.autocast(recipe="block")
    with pytest.raises(ValueError, match="got Format"):
        ottava.autocast(recipe=recipe.Format.E4M3)


def test_calibrating_with_a_stateless_recipe_is_high_precision() -> None:
    want = outputs()
    with ottava.autocast(enabled=False, calibrating=True, recipe=RECIPES["current"]):
        assert same(linear()(X), want["none"])


def test_a_backward_pass_in_another_thread() -> None:
    """Backward does not read what is switched on now, so it may run anywhere."""
    module, plain = linear(), linear()
    with casting("delayed"):
        y, z = module(X), plain(X)
    worker = threading.Thread(target=lambda: y.backward(torch.ones_like(y)))
    worker.start()
    worker.join()
    z.backward(torch.ones_like(z))
    assert same(module.weight.grad, plain.weight.grad)
    assert same(module.delayed.bwd_amax_history, plain.delayed.bwd_amax_history)


@pytest.mark.parametrize("name", QUANTIZING)
def test_a_module_that_is_left_unquantized_is_that_inside_of_autocast(name: str) -> None:
    def run(model: torch.nn.Module, quantized: bool) -> list[Tensor]:
        model.zero_grad()
        with casting(name if quantized else "none"):
            y = model(X)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]

    model = torch.nn.Sequential(linear())
    plain = run(model, quantized=False)
    assert not torch.equal(run(model, quantized=True)[0], plain[0])
    assert ottava.leave_unquantized(model) is model
    for mine, wanted in zip(run(model, quantized=True), plain, strict=True):
        assert torch.equal(mine, wanted)
    assert "unquantized" in repr(model)


def test_what_is_left_unquantized_may_have_any_size_but_no_fp8_storage() -> None:
    odd = ottava.leave_unquantized(ottava.Linear(30, 30, device="cpu"))
    with ottava.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert odd(torch.randn(3, 30)).shape == (3, 30)
    with ottava.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        stored = ottava.Linear(32, 32, device="cpu")
    with pytest.raises(ValueError, match="stored in FP8"):
        ottava.leave_unquantized(stored)
