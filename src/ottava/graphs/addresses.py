"""Where a module's tensors lie. A graph reads addresses: who moves a tensor afterwards must not be answered with what was there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ottava.nn.base import QuantizedModule
from ottava.nn.held import held
from ottava.quant.weight import Weight
from ottava.quant.weight_operands import tensors_of


class Addresses:
    """Of all parameters, FP8 copies and buffers of a module, as they are when this is made.

    >>> lies_at = Addresses(model)
    >>> optimizer.step()
    >>> lies_at.hold()
    True
    """

    def __init__(self, module: nn.Module) -> None:
        # The dictionaries of the modules, which see a parameter that is replaced; to walk over the tree takes longer than a replay.
        slots: list[tuple[dict[str, Any], str]] = [
            (slots, name)
            for child in module.modules()
            for slots in (child._parameters, child._buffers)
            for name, tensor in slots.items()
            if tensor is not None
        ]
        self._plain = [(slots, name) for slots, name in slots if _is_plain(slots[name])]
        self._others = [(slots, name) for slots, name in slots if not _is_plain(slots[name])]
        self._found, self._found_others = self._addresses(), self._addresses_of_others()

    def hold(self) -> bool:
        """Whether everything lies where it lay. FP8 operands are brought up to date with their bytes and scales by the way."""
        try:
            plain = self._addresses()
        except (
            AttributeError,
            KeyError,
            RuntimeError,
        ):  # None, nothing, or a tensor without an address has taken a place
            return False
        return plain == self._found and self._addresses_of_others() == self._found_others

    def _addresses(self) -> list[int]:
        return [slots[name].data_ptr() for slots, name in self._plain]

    def _addresses_of_others(self) -> list[int]:
        found = []
        for slots, name in self._others:
            tensor = slots.get(name)
            local = None if tensor is None else held(tensor)
            if isinstance(local, Weight):
                found += [t.data_ptr() for t in tensors_of(local)]
            else:
                found.append(0 if local is None else local.data_ptr())
        return found


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is nn.Parameter or type(tensor) is Tensor


def weight_copies(module: nn.Module) -> list[object]:
    """The FP8 copies that modules keep from one microbatch to the next: a graph that has made them needs them to live."""
    return [dict(child._weight_cache) for child in module.modules() if isinstance(child, QuantizedModule)]
