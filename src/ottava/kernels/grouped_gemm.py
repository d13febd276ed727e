"""Grouped products: one `A[g] @ B[g].T` for each group, results stacked along the rows. What a layer of experts multiplies.

`ottava::grouped_mm` and `ottava::grouped_scaled_mm` take lists, so groups may have different numbers of rows, zero included. The same
op serves all three GEMMs of a training step: for the weight gradient the rows of a group are its output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.kernels.gemm import mm, scaled_mm
from ottava.kernels.registry import define


def _grouped_mm(a: list[Tensor], b: list[Tensor], bias: list[Tensor], out_dtype: torch.dtype) -> Tensor:
    """a[g]: [m_g, k_g], b[g]: [n, k_g], bias[g]: [n] or an empty list. Returns [sum of m_g, n]."""
    return torch.cat(
        [mm(x, w, bias[g] if bias else None, out_dtype) for g, (x, w) in enumerate(zip(a, b, strict=True))]
    )


def _grouped_mm_fake(a: list[Tensor], b: list[Tensor], bias: list[Tensor], out_dtype: torch.dtype) -> Tensor:
    return a[0].new_empty(sum(x.shape[0] for x in a), b[0].shape[0], dtype=out_dtype)


def _grouped_mm_cuda(a: list[Tensor], b: list[Tensor], bias: list[Tensor], out_dtype: torch.dtype) -> Tensor:
    """Each product writes its rows of the result: no copy to stack them."""
    if bias or out_dtype != a[0].dtype:
        return _grouped_mm(a, b, bias, out_dtype)
    out = _grouped_mm_fake(a, b, bias, out_dtype)
    rows = out.split([x.shape[0] for x in a])
    for x, w, part in zip(a, b, rows, strict=True):
        torch.mm(x, w.t(), out=part)
    return out


grouped_mm = define("grouped_mm", _grouped_mm, _grouped_mm_fake, _grouped_mm_cuda)


def _grouped_scaled_mm(
    a: list[Tensor],
    a_scale: list[Tensor],
    a_amax: list[Tensor],
    b: list[Tensor],
    b_scale: list[Tensor],
    b_amax: list[Tensor],
    a_scheme: str,
    b_scheme: str,
    bias: list[Tensor],
    out_dtype: torch.dtype,
    split_accumulator: bool,
) -> Tensor:
    """As `scaled_mm` for each group, results stacked."""
    results = []
    for g in range(len(a)):
        operands = (a[g], a_scale[g], a_amax[g], b[g], b_scale[g], b_amax[g])
        results.append(
            scaled_mm(*operands, a_scheme, b_scheme, bias[g] if bias else None, out_dtype, split_accumulator)
        )
    return torch.cat(results)


def _grouped_scaled_mm_fake(*args: Any) -> Tensor:
    a, b, out_dtype = args[0], args[3], args[9]
    return a[0].new_empty(sum(x.shape[0] for x in a), b[0].shape[0], dtype=out_dtype)


grouped_scaled_mm = define("grouped_scaled_mm", _grouped_scaled_mm, _grouped_scaled_mm_fake)
