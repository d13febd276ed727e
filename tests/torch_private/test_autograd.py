"""Autograd, one private API at a time: passes and their ends, Functions, what they save, who else records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ottava import torch_private


class Spy(torch.autograd.Function):
    """Calls `look` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Any) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.look()
        return grad, None


def run_backward(look: Any) -> None:
    Spy.apply(torch.ones(2, requires_grad=True), look).sum().backward()


def test_inside_backward() -> None:
    seen = []
    run_backward(lambda: seen.append(torch_private.inside_backward()))
    assert seen == [True] and not torch_private.inside_backward()


def test_backward_id_is_that_of_the_pass() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)

    def look() -> None:
        seen.append(torch_private.backward_id())

    (Spy.apply(x, look) + Spy.apply(x, look)).sum().backward()
    run_backward(look)
    assert seen[0] == seen[1] != seen[2] and -1 not in seen
    assert torch_private.backward_id() == -1


def test_a_backward_inside_a_backward_has_an_id_of_its_own() -> None:
    seen: list[int] = []

    def outer() -> None:
        seen.append(torch_private.backward_id())
        with torch.enable_grad():
            run_backward(lambda: seen.append(torch_private.backward_id()))
        seen.append(torch_private.backward_id())

    run_backward(outer)
    assert seen[0] == seen[2] != seen[1]


def test_at_end_of_backward_runs_once_after_the_last_gradient() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: order.append("gradient"))

    def look() -> None:
        order.append("function")
        torch_private.at_end_of_backward(lambda: order.append("end"))

    Spy.apply(x, look).sum().backward()
    assert order == ["function", "gradient", "end"]
    queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
    x.register_hook(lambda grad: queue(lambda: order.append("another's end")))  # as DDP does, after us
    order.clear()
    Spy.apply(x, look).sum().backward()
    assert order == ["function", "gradient", "another's end", "end"]
    run_backward(lambda: None)
    assert order.count("end") == 1


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        return dy * ctx.factor, None


def test_bare_apply_is_apply() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch_private.bare_apply(_Double)(x, 3.0)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [3.0, 3.0] and type(y.grad_fn).__name__ == "_DoubleBackward"


@pytest.mark.parametrize("keeps", [False, True])
def test_release_saved_frees_unless_the_graph_is_kept(keeps: bool) -> None:
    seen: list[Any] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            inner = x.detach() + 1
            ctx.save_for_backward(inner)
            seen[:] = [torch_private.weak_storage(inner)]
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            kept = list(ctx.saved_tensors)
            torch_private.release_saved(ctx)
            assert not seen[0].expired()
            kept.clear()
            assert seen[0].expired() is not keeps
            return 2 * dy

    x = torch.ones(3, requires_grad=True)
    y = Doubled.apply(x).sum()
    y.backward(retain_graph=keeps)
    if keeps:
        y.backward(retain_graph=True)
    else:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
    assert bool((x.grad == (4 if keeps else 2)).all())


def test_in_reentrant_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_private.in_reentrant_checkpoint())
        return x * 2

    for reentrant in (True, False):
        checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
    # recomputed in the reentrant form only: multiplying by a number keeps nothing that would have to be
    assert seen[:2] == [False, True] and not any(seen[2:])


def test_saved_tensor_hooks_active() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_private.saved_tensor_hooks_active())
        return x.sin()

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        function(torch.ones(2))
    assert seen == [True, True, True] and not torch_private.saved_tensor_hooks_active()


def test_reshaped_shares_memory_and_is_no_view() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    made = x * 2
    found = torch_private.reshaped(made, (2, 12))
    assert found.data_ptr() == made.data_ptr() and not found._is_view() and found.shape == (2, 12)
    found.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 6), 2.0))


def test_no_view_shares_memory() -> None:
    view = (torch.ones(4, 6, requires_grad=True) * 2).reshape(2, 12)
    found = torch_private.no_view(view)
    assert view._is_view() and not found._is_view() and found.data_ptr() == view.data_ptr() and found.requires_grad
