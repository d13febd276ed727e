"""How a GEMM is spread over tensor-parallel ranks, as an object that modules hold and `core` asks.

    column   y[M, N/tp] = x[M, K] @ w[N/tp, K].T            backward: dx = sum over ranks of dy @ w
    row      y[M, N]    = sum over ranks of x[M, K/tp] @ w[N, K/tp].T

With sequence parallelism the tensor that is whole above (x of a column, y of a row) has its tokens spread over the ranks too, as
[M/tp, ...]: it is gathered where it is read and summed by a reduce-scatter where it is written.

This file knows no process group. `ottava.distributed.tensor_parallel` has the strategies that communicate, and installs itself
as the `Backend` that turns a group or a mesh into them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Strategy(Protocol):
    """What `core` asks of a tensor-parallel stage. A stage of one rank has None instead."""

    mode: str
    """ "column" or "row"."""
    sequence_parallel: bool
    rank: int
    size: int

    def share_amax(self, amax: Tensor) -> Tensor:
        """MAX over the ranks, of each element."""
        ...

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors behind one another along `dim` (0 or 1): tokens [M/tp, ...] -> [M, ...]."""
        ...

    def reduce(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sum of y [M, N] over ranks, plus bias, in float32 and in order of rank; with sequence parallelism this rank's [M/tp, N]."""
        ...

    def begin_gather(self, x: Tensor, dim: int = 0) -> Callable[[], Tensor]:
        """`gather`, which may travel while something else is computed; the function returned waits for it."""
        ...

    def begin_reduce(self, y: Tensor) -> Callable[[], Tensor]:
        """`reduce`, likewise."""
        ...

    def replicated(self, parameter: Tensor) -> Tensor:
        """`parameter`, equal on all ranks, whose gradient is the sum of the ranks' gradients."""
        ...


def spreads_input(strategy: Strategy | None) -> bool:
    """Whether ranks quantize different parts of the stage's input, which therefore share its amax."""
    return strategy is not None and (strategy.mode == "row" or strategy.sequence_parallel)


def spreads_output(strategy: Strategy | None) -> bool:
    """The same of the stage's output, and so of its gradient."""
    return strategy is not None and (strategy.mode == "column" or strategy.sequence_parallel)


def gathers_input(strategy: Strategy | None) -> bool:
    """Whether the tokens of the stage's input are spread over ranks and needed whole."""
    return strategy is not None and strategy.mode == "column" and strategy.sequence_parallel


def gathers_gradient(strategy: Strategy | None) -> bool:
    """Whether the tokens of the gradient of the stage's output are spread over ranks and needed whole."""
    return strategy is not None and strategy.mode == "row" and strategy.sequence_parallel


@dataclass(frozen=True)
class Layout:
    """How tensor parallelism splits a parameter: along `dim`, or not at all (None).

    parts: sizes along `dim` of matrices that lie behind one another in the parameter and are split one by one, such as gate and up
    of a gated MLP: rank t holds [gate_t; up_t]. Empty: one matrix.
    """

    dim: int | None = None
    parts: tuple[int, ...] = ()

    def check(self, name: str, shape: tuple[int, ...], size: int) -> None:
        """Raises unless `size` ranks can hold equal parts."""
        if self.dim is None:
            return
        for part in self.parts or (shape[self.dim],):
            if part % size:
                raise ValueError(
                    f"{name}: {part} {'rows' if self.dim == 0 else 'columns'} cannot be split evenly over {size} tensor-parallel ranks: "
                    f"choose a size that is a multiple of {size}, or fewer ranks."
                )

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What rank `rank` of `size` holds of the whole parameter."""
        if self.dim is None or size == 1:
            return whole
        matrices = whole.split(list(self.parts), self.dim) if self.parts else [whole]
        own = [m.narrow(self.dim, rank * (m.shape[self.dim] // size), m.shape[self.dim] // size) for m in matrices]
        return torch.cat(own, self.dim) if len(own) > 1 else own[0]

    def join(self, by_rank: Tensor, size: int) -> Tensor:
        """The whole parameter from what `size` ranks hold, behind one another along `dim`: the inverse of `cut`."""
        if self.dim is None or not self.parts or size == 1:
            return by_rank
        own = [n // size for n in self.parts]
        held = [rank.split(own, self.dim) for rank in by_rank.chunk(size, self.dim)]
        return torch.cat([rank[i] for i in range(len(own)) for rank in held], self.dim)

    def pieces(self, start: Sequence[int], shape: Sequence[int], size: int) -> list[Piece]:
        """Where a box of the parameter lies in the whole, as one process would hold it.

        The box is given in the order in which `size` ranks hold the parameter, rank by rank, which is the order of a DTensor. With
        several `parts` that is another order than that of the whole, and a box may lie in several pieces of it.
        """
        dim = self.dim
        if dim is None or not self.parts or size == 1:
            return [Piece((0,) * len(shape), tuple(start), tuple(shape))]
        found, position = [], 0
        for rank in range(size):
            for before, part in zip(itertools.accumulate(self.parts, initial=0), self.parts):
                length = part // size
                first, last = max(start[dim], position), min(start[dim] + shape[dim], position + length)
                if first < last:
                    local, whole, extent = [0] * len(shape), list(start), list(shape)
                    local[dim], extent[dim] = first - start[dim], last - first
                    whole[dim] = before + rank * length + first - position
                    found.append(Piece(tuple(local), tuple(whole), tuple(extent)))
                position += length
        return found


@dataclass(frozen=True)
class Piece:
    """A box that a rank holds: where it starts in the rank's tensor, where in the whole parameter, and its shape."""

    local: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The box as a view of the rank's tensor."""
        return tensor[tuple(slice(a, a + n) for a, n in zip(self.local, self.shape))]


REPLICATED = Layout()


class Backend(Protocol):
    """Makes strategies, and spreads the parameters of a module over a mesh."""

    def strategy(self, mode: str, group: Any, sequence_parallel: bool, bulk: bool = False) -> Strategy | None:
        """None for a group of one rank. bulk: gathers and sums of backward travel under its products."""
        ...

    def distribute(self, module: nn.Module, name: str, layout: Layout, mesh: Any, already_cut: bool) -> None:
        """Makes parameter `name` of `module` a DTensor on the 1-D `mesh`."""
        ...

    def group_of(self, mesh: Any) -> Any:
        """The process group of a 1-D mesh."""
        ...


_BACKEND: list[Backend] = []


def install(backend: Backend) -> None:
    """Called once by `ottava.distributed.tensor_parallel`."""
    _BACKEND[:] = [backend]


def backend() -> Backend:
    """The installed backend."""
    return _BACKEND[0]


def local(parameter: Tensor) -> Tensor:
    """What this rank multiplies with: the local tensor of a DTensor (gradients flow back into the DTensor), else the parameter."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
