"""`Record`: the bits of everything that passed the modules in one run of a microbatch, to be compared with another run of it.

The same operations on the same device give the same bits; where two runs differ, hardware did (or somebody has made an operation that
does not repeat itself). A third run tells which of two was the odd one.

On a GPU some backward kernels add in an order that differs from run to run, unless `torch.use_deterministic_algorithms` is on; so
`backward` says whether gradients are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from ottava.guard.digest import digest, read
from ottava.guard.finding import Finding
from ottava.guard.passing import Passing, watch_modules


class _Seen(NamedTuple):
    layer: str
    operand: str
    direction: str


class Record:
    """What one run looked like.

    >>> with Record(model).watching() as once: step()
    >>> with Record(model).watching() as again: step()
    >>> once.difference(again)          # None: bit for bit the same
    """

    def __init__(self, model: nn.Module, backward: bool = True) -> None:
        self._model, self._backward = model, backward
        self._seen: list[_Seen] = []
        self._digests: list[Tensor] = []
        self._numbers: list[int] | None = None

    @contextmanager
    def watching(self) -> Iterator[Record]:
        """Around the run."""
        with watch_modules(self._model, self._look):
            yield self

    def add(self, name: str, tensor: Tensor) -> None:
        """Something else that has to be the same: the loss."""
        self._note(_Seen("the model", name, "forward"), tensor)

    def _look(self, passing: Passing) -> None:
        if self._backward or passing.direction == "forward":
            self._note(_Seen(passing.layer, passing.operand, passing.direction), passing.tensor)

    def _note(self, seen: _Seen, tensor: Tensor) -> None:
        self._seen.append(seen)
        self._digests.append(digest(tensor))

    def numbers(self) -> list[int]:
        """The digests. Waits for the device."""
        if self._numbers is None:
            self._numbers, self._digests = read(self._digests), []
        return self._numbers

    def difference(self, other: Record) -> Finding | None:
        """The first tensor that differs; None if the runs are the same."""
        mine, theirs = self.numbers(), other.numbers()
        for i, (a, b, seen) in enumerate(zip(mine, theirs, self._seen)):
            if a != b or seen != other._seen[i]:
                return Finding("replay", seen.layer, seen.operand, direction=seen.direction, order=i)
        if len(mine) != len(theirs):
            return Finding("replay", "the model", "sequence of operations", direction="forward", order=len(mine))
        return None
