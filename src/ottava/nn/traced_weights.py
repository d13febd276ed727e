"""Weights with an FP8 form as a compiler sees them: plain tensors.

[Note: handed weights] A weight that FSDP2 gathers, or whose bytes follow a master, is found by Python that a compiler cannot trace:
memory shared between parts of a matrix, gathers under way, bytes made after the optimizer's step. So before a compiled layer runs, a
hook outside of what is compiled hands each of its modules what an eager forward would have found: the operands of its products, and for
the gradient a *leaf*, a tensor of the weight's shape without memory, from which autograd goes on to the parameter. The compiled code
takes these as inputs: nothing of them is baked in, so one compiled layer serves all layers and steps. Delayed scaling's two updates are
asked for here too: that after forward before the layer runs, that after backward when the gradient of its output comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.nn.base import QuantizedModule, operands_of
from ottava.quant.delayed import schedule_backward_update
from ottava.quant.quantization import Quantization
from ottava.quant.state import CURRENT
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import gradient_dtype


class Handed(NamedTuple):
    """What a compiled forward takes instead of one weight."""

    leaf: Tensor
    operands: tuple[Tensor | None, ...]
    """(data, scale_inv, amax) rowwise, then columnwise."""


class _Leaf(torch.autograd.Function):
    """A tensor of the shape of `weight` that holds nothing; its gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return torch.empty((), dtype=gradient_dtype(weight), device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def hand_weights(layer: nn.Module) -> None:
    """Makes `layer`, which is or will be compiled, take its FP8 weights by hand. To be called when they are sharded.

    >>> hand_weights(layer)
    >>> layer.compile()
    """
    layer.register_forward_pre_hook(_before)
    layer.register_forward_hook(_after, always_call=True)


@torch.compiler.disable
def _before(layer: nn.Module, args: Any) -> None:
    recipe = None if CURRENT.calibrating else CURRENT.recipe
    delayed = recipe is not None and Quantization.of(recipe).delayed and torch.is_grad_enabled()
    for module in _quantized(layer):
        module.handed = None if recipe is None or module.unquantized else _found(module)
        if delayed and module.handed is not None:
            module.delayed.mark_for_update(recipe, CURRENT.group, compiling=False)  # type: ignore[arg-type]


@torch.compiler.disable
def _after(layer: nn.Module, args: Any, output: Any) -> None:
    recipe = CURRENT.recipe
    if recipe is not None and Quantization.of(recipe).delayed:
        owners = [module.delayed.id for module in _quantized(layer) if module.handed is not None]
        outputs = output if isinstance(output, tuple) else (output,)
        first = next((t for t in outputs if isinstance(t, Tensor) and t.requires_grad), None)
        if first is not None:
            first.register_hook(lambda _: _schedule(owners))
    for module in _quantized(layer):
        module.handed = None  # a forward that is not compiled needs none, and copies of the module get none


def _schedule(owners: list[int]) -> None:
    for owner in owners:
        schedule_backward_update(owner)


def _quantized(layer: nn.Module) -> Iterator[QuantizedModule]:
    return (module for module in layer.modules() if isinstance(module, QuantizedModule))


def _found(module: QuantizedModule) -> dict[str, Handed] | None:
    """By the name of the first parameter of each product. Weights that the module quantizes itself are traced as they are."""
    weights = {names[0]: module.joined(names) for names in module.gemm_weights}
    if not all(isinstance(weight, QuantizedTensor) for weight in weights.values()):
        return None
    return {name: Handed(_Leaf.apply(weight), operands_of(weight)) for name, weight in weights.items()}  # type: ignore[arg-type]
