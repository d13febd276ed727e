"""The quantized products of the modules, and a way to look at their operands on the way in.

with watching(lambda a, b: print(a.scheme, b.scheme)):
    loss = model(tokens, targets)         # every product of FP8 bytes is shown before it is made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Operand(NamedTuple):
    """One side of a product: K-major bytes [rows, k], their scales, what the scales were made from, and the scheme's name."""

    data: Tensor
    scale_inv: Tensor
    amax: Tensor
    scheme: str


Look = Callable[[Operand, Operand], None]

_look: Look | None = None


def scaled_mm(*args: Any) -> Tensor:
    """`ottava::scaled_mm`."""
    if _look is not None:
        a, a_scale, a_amax, b, b_scale, b_amax, a_scheme, b_scheme = args[:8]
        with torch.no_grad():
            _look(Operand(a, a_scale, a_amax, a_scheme), Operand(b, b_scale, b_amax, b_scheme))
    return torch.ops.ottava.scaled_mm(*args)


@contextmanager
def watching(look: Look) -> Iterator[None]:
    """`look(a, b)` sees the operands of every product in here, in all threads: backward passes have their own. Not under
    torch.compile, and not the products of GroupedLinear."""
    global _look
    before, _look = _look, look
    try:
        yield
    finally:
        _look = before
