"""The products of the modules, and a way to look at quantized operands on the way in.

with watching(lambda a, b: print(a.scheme, b.scheme)):
    loss = model(tokens, targets)         # every product of FP8 bytes is shown before it is made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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


@dataclass  # not frozen: torch.compile of torch 2.11 then finds no attributes on it
class Product:
    """One side of a stage's product: what strategies multiply operands by, all of them at once or chunk by chunk."""

    weights: list[Operand]
    """One for each group."""
    dtype: torch.dtype
    """Of the result."""
    split_accumulator: bool
    parts: int = 1
    extra: Tensor | None = None
    """Added to the product of all tokens. Then it cannot be made in chunks (`cuttable`)."""

    @property
    def features(self) -> int:
        """Columns of the result."""
        return self.weights[0].data.shape[0]

    @property
    def cuttable(self) -> bool:
        """Whether some rows of the operands give some rows of the result."""
        return self.extra is None

    def __call__(self, operands: list[Operand], biases: Sequence[Tensor] = ()) -> Tensor:
        """[M, features], the groups' rows under one another. biases: one for each group, or none at all."""
        out = product(operands, self.weights, list(biases), self.dtype, self.split_accumulator, self.parts)
        return out if self.extra is None else out + self.extra


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
