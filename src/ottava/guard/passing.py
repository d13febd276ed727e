"""`watch_modules`: shows every tensor that passes a module, forward and backward, in order, to somebody who looks.

Gradients of parameters are shown as this rank made them, before they are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.checkpoint.placement import modules_of


class Passing(NamedTuple):
    """A tensor on its way."""

    layer: str
    operand: str
    """input, output, gradient (of the output), or the gradient of a parameter by its name."""
    direction: str
    """forward or backward."""
    tensor: Tensor
    module: nn.Module


Look = Callable[[Passing], None]


@contextmanager
def watch_modules(model: nn.Module, look: Look) -> Iterator[None]:
    """`look` sees what passes inside. Modules that torch.compile has compiled are seen from outside only."""
    hooks: list[Any] = []
    for name, module in _seen(model):
        hooks += _hooks(name or type(module).__name__, module, look, hooks)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _seen(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: set[int] = set()
    for name, module in modules_of(model):
        if id(module) not in inside:
            yield name, module
        if torch_private.is_compiled(module):
            inside |= {id(below) for below in module.modules()}


def _hooks(name: str, module: nn.Module, look: Look, hooks: list[Any]) -> list[Any]:
    def shown(operand: str, direction: str, tensor: Tensor) -> None:
        plain = torch_private.local_tensor(tensor) if hasattr(tensor, "to_local") else tensor
        if plain.is_floating_point() and plain.numel():
            with torch.no_grad():
                look(Passing(name, operand, direction, plain.detach(), module))

    def enter(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        for tensor in _tensors((args, tuple(kwargs.values()))):
            shown("input", "forward", tensor)
        if torch_private.inside_backward():
            return  # a recomputation: the first pass has its hooks
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and torch.is_grad_enabled():
                hooks.append(parameter.register_hook(_showing(shown, f"gradient of {attribute}")))

    def leave(_: Any, __: Any, output: Any) -> None:
        for tensor in _tensors(output):
            shown("output", "forward", tensor)
            if tensor.requires_grad and not torch_private.inside_backward():
                tensor.register_hook(_showing(shown, "gradient"))

    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]


def _showing(shown: Callable[[str, str, Tensor], None], operand: str) -> Callable[[Tensor], None]:
    return lambda gradient: shown(operand, "backward", gradient)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
