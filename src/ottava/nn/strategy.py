"""How a GEMM is spread over ranks, as an object that modules hold and `core` asks.

    column   y[M, N/tp] = x[M, K] @ w[N/tp, K].T            backward: dx = sum over ranks of dy @ w
    row      y[M, N]    = sum over ranks of x[M, K/tp] @ w[N, K/tp].T

With sequence parallelism the tensor that is whole above (x of a column, y of a row) has its tokens spread over the ranks too, as
[M/tp, ...]: it is gathered where it is read and summed by a reduce-scatter where it is written.

`core` knows none of this. It says what is multiplied, and the strategy does it: `fprop` and `dgrad` get the operands and a function
that multiplies, and own what happens around it. A schedule that overlaps (a ring, a pipeline) overrides them and multiplies chunk
by chunk; another kind of parallelism is another class under a name of its own (`Backend.strategies`).

This file knows no process group. `ottava.distributed.tensor_parallel` has the strategies that communicate, and installs itself
as the `Backend` that turns a group or a mesh into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ottava.nn.operand import Operand
from ottava.nn.options import NO_OVERLAP, OverlapOptions
from ottava.nn.product import Product

Operands = list[Operand]
"""One for each group of rows that has a weight of its own; a `Linear` has one."""
Multiply = Callable[[Operands], Tensor]
"""Operands -> [M, ...], the groups' rows under one another. Parts of the operands' rows give parts of the result's."""


class Later:
    """Operands that are brought when somebody begins to, and are there when they are called for."""

    def __init__(self, start: Callable[[], Callable[[], Operands]]) -> None:
        self._start, self._arrive = start, None

    _arrive: Callable[[], Operands] | None

    def begin(self) -> None:
        """They set out; once."""
        if self._arrive is None:
            self._arrive = self._start()

    def __call__(self) -> Operands:
        """They are there."""
        self.begin()
        assert self._arrive is not None
        return self._arrive()


def nothing() -> None:
    """What starts under a product where nothing does."""


class Strategy:
    """What `core` and the modules ask of a stage. This class is the strategy of one rank (`ALONE`); others override it."""

    size: int = 1
    """Ranks that the weight is spread over."""
    rank: int = 0
    spreads_tokens: bool = False
    """Ranks hold different tokens of the tensors between layers (sequence parallelism)."""
    shares_input_amax: bool = False
    """Ranks quantize different parts of the stage's input, and so share its amax."""
    shares_weight_amax: bool = False
    shares_grad_amax: bool = False
    """The same of the stage's weight, and of the gradient of its output."""
    gathers_input: bool = False
    """The tokens of the stage's input are spread over ranks and needed whole."""
    gathers_grad: bool = False
    """The same of the gradient of its output."""

    def share_amax(self, amax: Tensor) -> Tensor:
        """MAX over the ranks, of each element."""
        return amax

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors concatenated along `dim` (0 or 1): tokens [M/tp, ...] -> [M, ...]."""
        return x

    # ------------------------------------------------------------------------------------------------------- around GEMMs

    def before_gemm(self, operand: Operand) -> Operand:
        """The operand of all tokens that the stage's GEMM takes, from what this rank has."""
        return operand

    def after_gemm(self, out: Tensor, biases: list[Tensor], rows: list[int]) -> Tensor:
        """The stage's output from this rank's product. biases, rows: of each group; no biases if they are added already."""
        return out

    def fprop(self, operands: Operands, multiply: Product, biases: list[Tensor]) -> Tensor:
        """The stage's output: `before_gemm`, the product, `after_gemm`; or all of it in another order."""
        return multiply(operands, biases)

    def before_dgrad(self, grad: Operand) -> Operand:
        """The gradient of all tokens, in one direction, from what this rank has of it."""
        return grad

    def dgrad(
        self, grads: Operands, multiply: Product, under: Callable[[], None] = nothing
    ) -> tuple[Callable[[], Tensor], Operands]:
        """(what gives the gradient of the stage's input, the gradients of all tokens that were multiplied).

        The input's gradient may travel until the function returned is called. under: begins what may travel under the product; called
        when what the product itself needs is under way.
        """
        under()
        out = multiply(grads)
        return lambda: out, grads

    def begin_columns(self, grads: Operands) -> Callable[[], Operands]:
        """What gives the columnwise copies of all tokens' gradients, where rowwise bytes cannot be transposed. They may travel."""
        return lambda: grads

    def before_wgrad(self, operands: Operands) -> Callable[[], Operands]:
        """What gives the stage's input of all tokens; it may travel while something else is computed."""
        return lambda: operands

    # --------------------------------------------------------------------------------------------------------- parameters

    def input_parameter(self, parameter: Tensor) -> Tensor:
        """A parameter that acts on the stage's input (a norm's gain), equal on all ranks: where those have different tokens, its
        gradient is their sum."""
        return parameter

    def output_parameter(self, parameter: Tensor) -> Tensor:
        """A parameter that acts on the stage's output (a bias), likewise."""
        return parameter

    def replicated(self, parameter: Tensor) -> Tensor:
        """`parameter`, equal on all ranks, whose gradient is the sum of the ranks' gradients."""
        return parameter

    def output_tokens(self, tokens: int) -> int:
        """Tokens that this rank has of the stage's output, for `tokens` of its input."""
        return tokens

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # a strategy has no state but handles of this process


class _Alone(Strategy):
    """A stage of one rank."""

    def __reduce__(self) -> str:
        return "ALONE"


ALONE = _Alone()


def add_by_group(out: Tensor, biases: list[Tensor], rows: list[int]) -> Tensor:
    """out [M, N] plus each group's bias [N] on its rows, in float32 and rounded once."""
    return torch.cat([(y.float() + b.float()).to(y.dtype) for y, b in zip(out.split(rows), biases, strict=True)])


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

    strategies: dict[str, Callable[..., Strategy]]
    """By the name that a module's `modes` give a stage. Another kind of parallelism enters its class here."""

    def strategy(
        self, mode: str, group: Any, sequence_parallel: bool, overlap: OverlapOptions = NO_OVERLAP, name: str = ""
    ) -> Strategy:
        """`ALONE` for a group of one rank. overlap: which collectives travel under products. name: of the stage ("qkv", "fc1")."""
        ...

    def warn_of_idle_overlap(
        self, module: str, options: OverlapOptions, modes: Sequence[str | None], sequence_parallel: bool, size: int
    ) -> None:
        """Says once which of a module's overlap options cannot act, and why."""
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
    stride = parameter.stride() if shape is None else torch.empty(size, dtype=torch.float32, device="meta").stride()
    where = parameter.placements if placements is None else placements
    return DTensor.from_local(local, parameter.device_mesh, where, run_check=False, shape=size, stride=stride)


def local(parameter: Tensor) -> Tensor:
    """What this rank multiplies with: the local tensor of a DTensor (gradients flow back into the DTensor), else the parameter."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
