"""`Operand`: one side of a product, quantized or not, as stages and strategies hand it to one another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels.cast import Buffers
from ottava.quant.scheme import GatherDims, Scheme


class Operand(NamedTuple):
    """One side of a product, [rows, k]: bytes with their scales and what those were made from, or values in high precision."""

    data: Tensor
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    scheme: Scheme | None = None
    """None: `data` is in high precision."""
    direction: str = "rowwise"
    """ "rowwise": the tokens of an input or gradient are its rows; "columnwise": a quantized transpose, whose columns they are."""


_HIGH_PRECISION = GatherDims(0, None)


def token_dims(operand: Operand) -> GatherDims:
    """Where the tokens of an input or gradient lie in `data` and in `scale_inv`."""
    return _HIGH_PRECISION if operand.scheme is None else operand.scheme.gather_dims(operand.direction)


def quantize(
    x: Tensor, scheme: Scheme | None, scale: Tensor | None, amax: Tensor | None, row: bool, column: bool
) -> Buffers:
    """x [M, K] in the scheme. scale, amax: where they are given or known. row, column: which copies."""
    return Buffers(*torch.ops.ottava.quantize(x, str(scheme), scale, amax, row, column))


def rowwise(q: Buffers, scheme: Scheme) -> Operand:
    """The rowwise copy."""
    return Operand(q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax, scheme.along("rowwise"))


def columnwise(q: Buffers, scheme: Scheme) -> Operand:
    """The columnwise copy."""
    return kept_columns(q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax, scheme)


def kept_columns(data: Tensor, scale_inv: Tensor | None, amax: Tensor | None, scheme: Scheme) -> Operand:
    """A columnwise copy whose tensors were kept."""
    return Operand(data, scale_inv, amax, scheme.along("columnwise"), "columnwise")


def transposed(operand: Operand) -> Operand:
    """The columnwise copy of an operand whose bytes can be transposed. In high precision: a view."""
    if operand.scheme is None:
        return Operand(operand.data.t())
    data, scale = torch.ops.ottava.transpose(operand.data, str(operand.scheme)), operand.scale_inv
    scale = scale.t().contiguous() if scale is not None and scale.dim() == 2 else scale
    return Operand(data, scale, operand.amax, operand.scheme, "columnwise")


def rows_of(operand: Operand, start: int, stop: int) -> Operand:
    """Rows [start, stop) of a rowwise operand, as views. `start` lies where the rows of a scale begin (`Scheme.row_multiple`)."""
    data = operand.data[start:stop]
    if operand.scheme is None or operand.scheme.per_tensor or operand.scale_inv is None:
        return operand._replace(data=data)
    multiple = operand.scheme.row_multiple
    return operand._replace(data=data, scale_inv=operand.scale_inv[start // multiple : -(-stop // multiple)])
