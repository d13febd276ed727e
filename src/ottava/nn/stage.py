"""What one stage of a chain is: its static description, its tensors, what it keeps for backward. `core.py` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ottava.kernels.cast import Buffers
from ottava.nn.strategy import Strategy


@dataclass(frozen=True)
class Norm:
    """A producer: LayerNorm or RMSNorm of the stage's input."""

    kind: str
    eps: float
    zero_centered: bool


@dataclass(frozen=True)
class Stage:
    """Everything static about one stage. Schemes are strings (see `Scheme`); None: this stage is not quantized."""

    norm: Norm | None = None
    activation: str | None = None
    input: str | None = None
    weight: str | None = None
    grad: str | None = None
    fused_grad: str | None = None
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
    strategy: Strategy | None = None
    """How the GEMM is spread over tensor-parallel ranks. None: it is not."""


@dataclass(frozen=True)
class Chain:
    """The stages of one module, and where its delayed-scaling state records."""

    stages: tuple[Stage, ...]
    record: bool = False
    """Record amax of forward tensors (not when recomputing or evaluating)."""
    calibrate: bool = False
    """Record amax of what an unquantized stage multiplies."""
    owner: int = 0
    """Id of the delayed-scaling state, for the update at the end of backward."""


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


class Saved(NamedTuple):
    """What one stage keeps for its backward."""

    source: Tensor | None
    """The producer's input [M, K'], if backward needs it."""
    mean: Tensor | None
    rstd: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    data: Tensor | None
    """The operand of wgrad: FP8 columnwise [K, M]; rowwise [M, K] for "dequantized"; or high precision [M, K]."""
    scale: Tensor | None
    amax: Tensor | None
    w_data: Tensor | None
    """The operand of dgrad: FP8 columnwise [K, N]; rowwise for "dequantized"; or the weight itself [N, K]."""
    w_scale: Tensor | None
    w_amax: Tensor | None


PER_STAGE, PER_SAVED = len(StageTensors._fields), len(Saved._fields)


class Gradient(NamedTuple):
    """A gradient [M, N] on its way back: in high precision, or already quantized by the kernel that produced it."""

    value: Tensor | None
    quantized: Buffers | None = None
    column_sum: Tensor | None = None
    """Sum over rows, if the producing kernel was asked for it."""


def tensor_amax(scheme: str) -> bool:
    """Whether a scale of the scheme depends on the amax of the whole tensor."""
    return ":tensor" in scheme or scheme.startswith("e2m1")
