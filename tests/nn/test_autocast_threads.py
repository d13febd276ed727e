"""`autocast` belongs to the thread that has entered it; a backward pass, in whatever thread it runs, belongs to its forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import recipe
from ottava.compat.support import FP8GlobalStateManager
from ottava.quant.state import CURRENT
from quant_cases import RECIPES, all_same, casting, delayed_state, gradients

BLOCK = recipe.Float8BlockScaling()


def in_thread(function: Callable[[], Any]) -> Any:
    """`function()`, run by another thread."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=120)
    if errors:
        raise errors[0]
    return results[0]


def mlp(seed: int = 0) -> ottava.LayerNormMLP:
    torch.manual_seed(seed)
    return ottava.LayerNormMLP(32, 64, activation="swiglu", device="cpu")


def test_a_thread_does_not_see_anothers_autocast() -> None:
    layer, x = mlp(), torch.randn(32, 32)
    unquantized = layer(x)
    with ottava.autocast(recipe=BLOCK), ottava.quantized_model_init(recipe=BLOCK):
        assert FP8GlobalStateManager.is_fp8_enabled() and not in_thread(FP8GlobalStateManager.is_fp8_enabled)
        assert torch.equal(in_thread(lambda: layer(x)), unquantized) and not torch.equal(layer(x), unquantized)
        assert type(in_thread(mlp).fc1_weight) is torch.nn.Parameter
        assert in_thread(lambda: CURRENT.depth) == 0


def test_a_block_that_is_entered_in_one_thread_leaves_no_trace_in_another() -> None:
    def enter_and_fail() -> None:
        with ottava.autocast(recipe=BLOCK):
            raise KeyError("on purpose")

    with ottava.autocast(recipe=RECIPES["mxfp8"]):
        with pytest.raises(KeyError):
            in_thread(enter_and_fail)
        assert CURRENT.recipe is RECIPES["mxfp8"] and CURRENT.depth == 1


def trained(name: str, module: torch.nn.Module, wait: Callable[[], Any] = lambda: None) -> list[Tensor | None]:
    """Three steps. wait: called twice inside of each block, so that blocks of several threads overlap."""
    seen: list[Tensor | None] = []
    for step in range(3):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
        with casting(name):
            wait()
            y = module(x)
            wait()
        y.square().mean().backward()
        seen += [y, *gradients(module)]
    return [*seen, *delayed_state(module).values()]


def test_threads_train_models_of_their_own_by_different_recipes() -> None:
    names = ["delayed", "mxfp8", "none", "delayed"]
    alone = [trained(name, mlp(seed)) for seed, name in enumerate(names)]
    modules, meeting = [mlp(seed) for seed in range(len(names))], threading.Barrier(len(names), timeout=60)
    found: dict[int, list[Tensor | None]] = {}

    def work(index: int) -> None:
        found[index] = trained(names[index], modules[index], meeting.wait)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for index, expected in enumerate(alone):
        assert all_same(found[index], expected), names[index]


CALLS: dict[str, Callable[[torch.nn.Module, Tensor], Tensor]] = {
    "kept": lambda module, x: module(x),
    "ottava.checkpoint": lambda module, x: ottava.checkpoint(module, x),
    "torch checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "torch reentrant checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True),
}


def two_steps(name: str, call: str, inside: bool, elsewhere: bool) -> list[Tensor | None]:
    """inside: backward runs in the `autocast` block. elsewhere: and in a thread of its own, as CUDA's does."""
    module = mlp()
    seen: list[Tensor | None] = []
    for step in range(2):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()

        def backward(y: Tensor) -> None:
            loss = y.square().mean()
            if elsewhere:
                in_thread(loss.backward)
            else:
                loss.backward()

        with casting(name):
            y = CALLS[call](module, x)
            if inside:
                backward(y)
        if not inside:
            backward(y)
        seen += [y, x.grad, *gradients(module)]
    return [*seen, *delayed_state(module).values()]


@pytest.mark.parametrize("inside", [False, True], ids=["backward after the block", "backward in the block"])
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_backward_in_another_thread_changes_no_bit(name: str, call: str, inside: bool) -> None:
    assert all_same(two_steps(name, call, inside, elsewhere=False), two_steps(name, call, inside, elsewhere=True))


def test_a_compiled_layer_goes_by_the_autocast_of_its_thread() -> None:
    layer, x = mlp(), torch.randn(32, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        unquantized = layer(x)
        with ottava.autocast(recipe=BLOCK):
            quantized = layer(x)
            assert torch.equal(compiled(x), quantized)
            assert torch.equal(in_thread(lambda: compiled(x)), unquantized)
        assert torch.equal(compiled(x), unquantized)
