"""What one stage of a chain is: its static description, its tensors, what it keeps for backward.

`stage_forward.py` and `stage_backward.py` run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ottava.kernels import tally
from ottava.kernels.cast import Buffers
from ottava.nn.columnwise import WeightSource
from ottava.nn.operand import Operand
from ottava.nn.strategy import Strategy
from ottava.quant.scheme import Scheme


@dataclass(frozen=True)
class Norm:
    """A producer: LayerNorm or RMSNorm of the stage's input."""

    kind: str
    eps: float
    zero_centered: bool


class Texts(NamedTuple):
    """The schemes of a stage as ops take them, spelled once."""

    input: str
    weight: str
    grad: str
    fused_grad: str


@dataclass(frozen=True)
class Stage:
    """Everything static about one stage. Schemes are None where it is not quantized."""

    norm: Norm | None = None
    activation: str | None = None
    input: Scheme | None = None
    weight: Scheme | None = None
    grad: Scheme | None = None
    fused_grad: Scheme | None = None
    """Scheme of a gradient that comes straight from the next stage's activation backward (its rounding may differ)."""
    delayed: bool = False
    """Scales are given; amax is recorded."""
    split_fprop: bool = True
    split_dgrad: bool = True
    split_wgrad: bool = True
    backward: str = "quantized"
    recompute: bool = False
    return_norm: bool = False
    """Also return the norm's output, in the activation dtype."""
    output_parts: int = 1
    """Equal matrices that lie side by side in the output, as gate and up do: for the order of dgrad's sum on a CPU."""
    gather_norm: bool = False
    """Return the norm's output of all ranks' tokens."""
    two_copies: bool = False
    """Whether rowwise and columnwise bytes of the weight differ (`Scheme.two_copies`)."""
    texts: Texts | None = None
    """None where the stage is not quantized, and while a compiler traces."""
    strategy: Strategy = field(kw_only=True)
    """How the GEMM is spread over ranks."""

    @property
    def remakes(self) -> bool:
        """Whether backward makes an unquantized operand again: always that of an activation, whose input it reads anyway."""
        return self.recompute or self.activation is not None


@dataclass(frozen=True)
class Chain:
    """The stages of one module, and where its delayed-scaling state records.

    [Note: groups] A chain may take its rows in several groups, each with weights and scales of its own, as a layer of experts does.
    There is a stage for each group then, in order; `groups` of them run side by side, and their products are one grouped product.
    """

    stages: tuple[Stage, ...]
    record: bool = False
    """Record amax of forward tensors (not when recomputing or evaluating)."""
    calibrate: bool = False
    """Record amax of what an unquantized stage multiplies."""
    owner: int = 0
    """Id of the delayed-scaling state, for the update at the end of backward."""
    groups: int = 1
    direct: bool = False
    """See [Note: direct chains] in `direct.py`."""
    tally: int = 0
    """The first of three slots a stage into which what is not finite is counted ([Note: slots] in `kernels/tally.py`); 0: none."""


def count_into(chain: Chain, stage: int, operand: int) -> None:
    """What is quantized next is this operand (0 input, 1 weight, 2 gradient) of stage number `stage`."""
    if chain.tally:
        tally.slot = chain.tally + 3 * stage + operand


class StageTensors(NamedTuple):
    """The tensors of one stage, in the order in which they are passed to the autograd Function."""

    gamma: Tensor | None
    beta: Tensor | None
    weight: Tensor
    """[N, K]; the autograd leaf. Only unquantized stages multiply with it."""
    bias: Tensor | None
    row: Tensor | None
    row_scale: Tensor | None
    row_amax: Tensor | None
    col: Tensor | None
    col_scale: Tensor | None
    col_amax: Tensor | None
    """With a `source` the amax that its copy is quantized with, where forward had one."""
    source: WeightSource | None = None
    """What backward makes the columnwise copy from; `col` is None then."""


class StageGradients(NamedTuple):
    """What a backward pass returns for the tensors of one stage: the fields of `StageTensors`."""

    gamma: Tensor | None = None
    beta: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    row: None = None
    row_scale: None = None
    row_amax: None = None
    col: None = None
    col_scale: None = None
    col_amax: None = None
    source: None = None


class Source(NamedTuple):
    """What a stage's operand is produced from: its input [M, K'] and the norm's gain, bias and statistics."""

    h: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


class Saved(NamedTuple):
    """What one stage keeps for its backward. The first five are those of its `Source`."""

    h: Tensor | None
    """The producer's input [M, K'], if backward needs it."""
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    data: Tensor | None
    """The operand of wgrad: FP8 columnwise [K, M]; rowwise [M, K] for "dequantized"; or high precision [M, K]."""
    scale_inv: Tensor | None
    amax: Tensor | None
    weight_data: Tensor | None
    """The operand of dgrad: FP8 columnwise [K, N]; rowwise for "dequantized"; or the weight itself [N, K]. None: `StageTensors.source`."""
    weight_scale_inv: Tensor | None
    weight_amax: Tensor | None


def source_of(saved: Saved) -> Source:
    """What the operand was produced from. Only if `h` was kept."""
    assert saved.h is not None
    return Source(saved.h, saved.gamma, saved.beta, saved.mean, saved.rstd)


class Gradient(NamedTuple):
    """A gradient [M, N] on its way back: in high precision, or already quantized by the kernel that produced it."""

    value: Tensor | None
    quantized: Buffers | None = None
    column_sum: Tensor | None = None
    """Sum over rows, if the producing kernel was asked for it."""
    gathered: bool = False
    """Of all tokens, though the strategy would gather them."""


class Made(NamedTuple):
    """One group's operand on its way into the forward GEMM, and what remains of it."""

    operand: Operand
    saved: Saved
    norm_out: Tensor | None
    """The norm's output in the activation dtype, if it was asked for."""
    amax: Tensor | None
    """Of the operand; None where it is not quantized."""


Fields = TypeVar("Fields", bound=tuple)


def pack(parts: Iterable[tuple]) -> list[Any]:
    """The fields of all parts, concatenated: what autograd takes, keeps and returns are plain tensors."""
    return [value for part in parts for value in part]


def unpack(kind: type[Fields], values: Sequence[Any], count: int) -> list[Fields]:
    """The first `count` parts of what `pack` made."""
    width = len(kind._fields)  # type: ignore[attr-defined]
    return [kind(*values[i * width : (i + 1) * width]) for i in range(count)]
