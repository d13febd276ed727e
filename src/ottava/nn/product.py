"""The products of the modules, and a way to look at quantized operands on the way in.

with watching(lambda a, b: print(a.scheme, b.scheme)):
    loss = model(tokens, targets)         # every product of FP8 bytes is shown before it is made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ottava.nn.operand import Operand

Look = Callable[[Operand, Operand], None]

watcher: Look | None = None
"""Who looks at products now: see `watching`."""
ops = torch.ops.ottava


def product(
    a: list[Operand],
    b: list[Operand],
    biases: list[Tensor],
    dtype: torch.dtype,
    split_accumulator: bool,
    parts: int = 1,
) -> Tensor:
    """The rows of a[g] @ b[g].T + biases[g] of all groups g under one another. biases: one a group, or none at all.

    parts: see `ottava::mm`; of a single group.
    """
    if a[0].scheme is not None and watcher is not None:
        with torch.no_grad():
            for x, y in zip(a, b, strict=True):
                watcher(x, y)
    if len(a) > 1:
        return _grouped_product(a, b, biases, dtype, split_accumulator)
    (x,), (y,), bias = a, b, biases[0] if biases else None
    if x.scheme is None:
        return ops.mm(x.data, y.data, bias, dtype, parts)
    return ops.scaled_mm(
        x.data, x.scale_inv, x.amax, y.data, y.scale_inv, y.amax,
        str(x.scheme), str(y.scheme), bias, dtype, split_accumulator, parts,
    )  # fmt: skip


def _grouped_product(
    a: list[Operand], b: list[Operand], biases: list[Tensor], dtype: torch.dtype, split_accumulator: bool
) -> Tensor:
    if a[0].scheme is None:
        return ops.grouped_mm([x.data for x in a], [y.data for y in b], biases, dtype)
    return ops.grouped_scaled_mm(
        [x.data for x in a], [x.scale_inv for x in a], [x.amax for x in a],
        [y.data for y in b], [y.scale_inv for y in b], [y.amax for y in b],
        str(a[0].scheme), str(b[0].scheme), biases, dtype, split_accumulator,
    )  # fmt: skip


@contextmanager
def watching(look: Look) -> Iterator[None]:
    """`look(a, b)` sees the operands of every quantized product in here, group by group, in all threads: backward passes have their
    own. Not under torch.compile."""
    global watcher
    before, watcher = watcher, look
    try:
        yield
    finally:
        watcher = before
