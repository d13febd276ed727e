"""How a GEMM is spread over tensor-parallel ranks, as an object that modules hold and `core` asks.

    column   y[M, N/tp] = x[M, K] @ w[N/tp, K].T            backward: dx = sum over ranks of dy @ w
    row      y[M, N]    = sum over ranks of x[M, K/tp] @ w[N, K/tp].T

With sequence parallelism the tensor that is whole above (x of a column, y of a row) has its tokens spread over the ranks too, as
[M/tp, ...]: it is gathered where it is read and summed by a reduce-scatter where it is written.

This file knows no process group. `ottava.distributed.tensor_parallel` has the strategies that communicate, and installs itself
as the `Backend` that turns a group or a mesh into them.
"""

from __future__ import annotations

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
    """How tensor parallelism splits a parameter: along `dim`, or not at all (None)."""

    dim: int | None = None

    def check(self, name: str, shape: tuple[int, ...], size: int) -> None:
        """Raises unless `size` ranks can hold equal parts."""
        if self.dim is not None and shape[self.dim] % size:
            raise ValueError(
                f"{name}: {shape[self.dim]} {'rows' if self.dim == 0 else 'columns'} cannot be split evenly over {size} tensor-parallel "
                f"ranks: choose a size that is a multiple of {size}, or fewer ranks."
            )

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What rank `rank` of `size` holds of the whole parameter."""
        if self.dim is None or size == 1:
            return whole
        own = whole.shape[self.dim] // size
        return whole.narrow(self.dim, rank * own, own)


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


def like_dtensor(parameter: Any, local: Tensor, shape: Sequence[int] | None = None, placements: Any = None) -> Tensor:
    """`local` as this rank's part of a DTensor on the mesh of `parameter`; placements and shape are the parameter's if not given."""
    from torch.distributed.tensor import DTensor

    size = parameter.shape if shape is None else torch.Size(shape)
    stride = parameter.stride() if shape is None else torch.empty(size, device="meta").stride()
    where = parameter.placements if placements is None else placements
    return DTensor.from_local(local, parameter.device_mesh, where, run_check=False, shape=size, stride=stride)


def local(parameter: Tensor) -> Tensor:
    """What this rank multiplies with: the local tensor of a DTensor (gradients flow back into the DTensor), else the parameter."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
