"""Faults of numbers: a flipped bit, a NaN, an infinity, in a tensor or where one passes through a module.

flip_bit(weight, index=5, bit=30)                                      # 0.009 becomes 3e36
with at_output(model, "layers.1.layernorm_mlp", lambda t: poison(t, math.inf)):
    loss = model(tokens, targets)                                      # the activation is infinite on its way
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.nn.initialize import WRAPPERS
from ottava.quant.weight import Weight
from ottava.quant.weight_memory import ROWWISE

Fault = Callable[[Tensor], None]
"""Changes a plain tensor in place."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def memory_of(tensor: Tensor) -> Tensor:
    """What this rank holds of it, as a plain tensor that shares its memory: of a DTensor the local part, of a weight that is stored in FP8
    its bytes.

    Writes to it leave no trace that autograd or an FP8 copy of the weight could see, as those of hardware.
    """
    local = torch_private.local_tensor(tensor) if hasattr(tensor, "to_local") else tensor
    if not isinstance(local, Weight):
        return local.data
    # With an FP8 copy beside them: the values that are trained.
    return local.memory.data[ROWWISE] if local.master is None else local.master.data


@torch.no_grad()
def flip_bit(tensor: Tensor, index: int, bit: int) -> tuple[float, float]:
    """Flips one bit of element `index` (of the elements in order) and returns the value (before, after). bit 0: the lowest.

    >>> flip_bit(torch.tensor([1.0, 0.5]), 1, 30)
    (0.5, 1.7014118346046923e+38)
    """
    memory = memory_of(tensor)
    size, count = 8 * memory.element_size(), memory.numel()
    if not 0 <= index < count or not 0 <= bit < size:
        raise ValueError(
            f"flip_bit: element {index}, bit {bit} of a tensor of {count} elements of {size} bits: "
            f"the element must be below {count}, the bit below {size}."
        )
    at = _index(memory, index)
    before = float(memory[at])
    one = memory[at].reshape(1).clone()
    word = one.view(_WORDS[memory.element_size()])
    mask = 1 << bit
    word ^= mask - (1 << size) if bit == size - 1 and size > 8 else mask
    memory[at] = one[0]
    return before, float(memory[at])


@torch.no_grad()
def poison(tensor: Tensor, value: float, index: int = 0) -> None:
    """Sets element `index` to `value`: NaN, an infinity, or a number that does not belong there.

    >>> poison(weight, math.inf)
    """
    memory = memory_of(tensor)
    if not 0 <= index < memory.numel():
        raise ValueError(f"poison: element {index} of a tensor of {memory.numel()} elements.")
    if memory.dtype == torch.uint8 and tensor.is_floating_point():
        raise ValueError(f"poison: a weight that is stored in FP8 has bytes, which cannot be {value}: use flip_bit.")
    memory[_index(memory, index)] = value


def _index(memory: Tensor, index: int) -> tuple[int, ...]:
    """Of an element by its number: a view of one dimension would be a copy of a tensor that is not contiguous."""
    return (
        tuple(int(i) for i in torch.unravel_index(torch.tensor(index, dtype=torch.int64), memory.shape))
        if memory.dim()
        else ()
    )


def module_named(model: nn.Module, name: str) -> nn.Module:
    """The module that one process calls `name`, whatever has been wrapped around it."""
    found = {
        ".".join(part for part in path.split(".") if part not in WRAPPERS): module
        for path, module in model.named_modules()
    }
    if name not in found:
        raise ValueError(f"There is no module {name!r}; there are {sorted(filter(None, found))}.")
    return found[name]


@contextmanager
def at_output(model: nn.Module, name: str, fault: Fault, times: int | None = None) -> Iterator[list[int]]:
    """`fault` changes the output of module `name` in every forward pass inside, or in the first `times` of them.

    Yields the calls so far, as a list of one number. The output is changed in place where it lies: what follows reads the change.
    """
    with _calls(module_named(model, name), times, lambda output: _change(fault, output)) as count:
        yield count


@contextmanager
def at_gradient(model: nn.Module, name: str, fault: Fault, times: int | None = None) -> Iterator[list[int]]:
    """`fault` changes the gradient of the output of module `name`, of those forward passes that `at_output` would take."""

    def watch(output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: _changed(fault, gradient))

    with _calls(module_named(model, name), times, watch) as count:
        yield count


@contextmanager
def _calls(module: nn.Module, times: int | None, work: Callable[[Tensor], None]) -> Iterator[list[int]]:
    count = [0]

    def hook(_: Any, __: Any, output: Any) -> None:
        if torch_private.inside_backward():
            return  # a recomputation: the fault was in the first pass
        count[0] += 1
        if times is None or count[0] <= times:
            work(output[0] if isinstance(output, tuple) else output)

    handle = module.register_forward_hook(hook)
    try:
        yield count
    finally:
        handle.remove()


def _change(fault: Fault, output: Tensor) -> None:
    """Behind autograd's back, as hardware does it."""
    fault(output.detach())


def _changed(fault: Fault, gradient: Tensor) -> Tensor:
    changed = gradient.clone()  # gradients may be shared
    fault(changed)
    return changed
