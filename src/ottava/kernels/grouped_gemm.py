"""Grouped products: one `A[g] @ B[g].T` for each group, results stacked along the rows. What a layer of experts multiplies.

`ottava::grouped_mm` and `ottava::grouped_scaled_mm` take lists, so groups may have different numbers of rows, zero included. The same
op serves all three GEMMs of a training step: for the weight gradient the rows of a group are its output features.

On CUDA all groups are one launch: torch's grouped products (CUTLASS) where they take the operands, else the kernel of
`grouped_gemm_triton.py`. Formats that a device does not multiply are emulated group by group, as in `gemm.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from ottava.kernels.gemm import align, mm, scaled_mm, typed
from ottava.kernels.registry import define
from ottava.quant.scheme import Scheme

# Not in torch's type stubs.
_GROUPED_MM: Any = getattr(functional, "grouped_mm", None)
_SCALED_GROUPED_MM: Any = getattr(functional, "scaled_grouped_mm", None)

# ----------------------------------------------------------------------------------------------------------- unquantized


def _grouped_mm(a: list[Tensor], b: list[Tensor], bias: list[Tensor], out_dtype: torch.dtype) -> Tensor:
    """a[g]: [m_g, k_g], b[g]: [n, k_g], bias[g]: [n] or an empty list. Returns [sum of m_g, n]."""
    return torch.cat(
        [mm(x, w, bias[g] if bias else None, out_dtype) for g, (x, w) in enumerate(zip(a, b, strict=True))]
    )


def _grouped_mm_fake(a: list[Tensor], b: list[Tensor], bias: list[Tensor], out_dtype: torch.dtype) -> Tensor:
    return a[0].new_empty(sum(x.shape[0] for x in a), b[0].shape[0], dtype=out_dtype)


def _grouped_mm_cuda(a: list[Tensor], b: list[Tensor], bias: list[Tensor], out_dtype: torch.dtype) -> Tensor:
    from ottava.kernels import grouped_gemm_triton

    fit = all(grouped_gemm_triton.fits(x) for x in (*a, *b)) and _one_order(a) and _one_order(b)
    if not fit or not _one_launch(a[0].device):
        return _grouped_mm(a, b, bias, out_dtype)  # float32, or rows that start at odd addresses
    if not bias and out_dtype == a[0].dtype == torch.bfloat16:
        out = _torch_grouped_mm(a, b)
        if out is not None:
            return out
    return grouped_gemm_triton.multiply(
        grouped_gemm_triton.Side(a), grouped_gemm_triton.Side(b), bias, out_dtype, split_accumulator=True
    )


def _one_order(tensors: list[Tensor]) -> bool:
    """Whether the same stride is 1 in all of them."""
    return len({x.stride(1) == 1 for x in tensors}) == 1


def _one_launch(device: torch.device) -> bool:
    """Whether all groups may go into one launch: on Hopper, and not into a CUDA graph, whose replays would not send the sizes again."""
    return torch.cuda.get_device_capability(device) == (9, 0) and not torch.cuda.is_current_stream_capturing()


def _torch_grouped_mm(a: list[Tensor], b: list[Tensor]) -> Tensor | None:
    """bf16 by torch's grouped product; None where it would need another layout."""
    if _GROUPED_MM is None:
        return None
    if all(x.stride(1) == 1 for x in a):  # rows in groups: [M, k] x [groups, k, n]
        if len({x.shape[1] for x in a}) > 1:
            return None
        transposed = b[0].stride(1) != 1
        weights = torch.stack([w.t() for w in b]) if transposed else torch.stack(b).transpose(1, 2)
        return _GROUPED_MM(_together(a), weights, offs=_ends([x.shape[0] for x in a], a[0].device))
    if any(x.stride(1) == 1 for x in b):
        return None
    # The contraction in groups: [m, K] x [K, n] -> [groups, m, n]; both are transposes of matrices that lie row by row.
    rows, columns = _together([x.t() for x in a]), _together([x.t() for x in b])
    return _GROUPED_MM(rows.t(), columns, offs=_ends([x.shape[1] for x in a], a[0].device)).flatten(0, 1)


def _together(parts: list[Tensor]) -> Tensor:
    """The rows of matrices under one another; a view where they lie so in memory already."""
    full = [part for part in parts if part.numel()]
    if not full or not all(part.is_contiguous() for part in full):
        return torch.cat(parts)
    storage, offset = full[0].untyped_storage().data_ptr(), full[0].storage_offset()
    for part in full:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != offset:
            return torch.cat(parts)
        offset += part.numel()
    rows, width = sum(part.shape[0] for part in full), full[0].shape[1]
    return full[0].as_strided((rows, width), (width, 1))


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    """Where each group ends, int32 on the device, without waiting for it."""
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).pin_memory().to(device, non_blocking=True)


grouped_mm = define("grouped_mm", _grouped_mm, _grouped_mm_fake, _grouped_mm_cuda)


# ------------------------------------------------------------------------------------------------------------- quantized


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


def _grouped_scaled_mm_fake(
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
    return a[0].new_empty(sum(x.shape[0] for x in a), b[0].shape[0], dtype=out_dtype)


def _grouped_scaled_mm_cuda(
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
    sa, sb = Scheme.parse(a_scheme), Scheme.parse(b_scheme)
    if not _multiplies(sa, sb, a[0].device):
        return _grouped_scaled_mm(
            a, a_scale, a_amax, b, b_scale, b_amax, a_scheme, b_scheme, bias, out_dtype, split_accumulator
        )
    from ottava.kernels import grouped_gemm_triton

    x, y = ([_readable(typed(align(t), s)) for t in side] for side, s in ((a, sa), (b, sb)))
    if not bias and out_dtype == torch.bfloat16 and _rowwise_fits(x, y, sa, sb):
        return _torch_grouped_scaled_mm(x, a_scale, y, b_scale, split_accumulator)
    left = grouped_gemm_triton.Side(x, a_scale, 0 if sa.block is None else sa.block[0])
    right = grouped_gemm_triton.Side(y, b_scale, 0 if sb.block is None else sb.block[0])
    return grouped_gemm_triton.multiply(left, right, bias, out_dtype, split_accumulator)


def _multiplies(sa: Scheme, sb: Scheme, device: torch.device) -> bool:
    """Whether the device multiplies these formats, and the Triton kernel knows their scales."""
    return sa.kind == sb.kind and sa.kind in ("tensor", "block") and _one_launch(device)


def _readable(x: Tensor) -> Tensor:
    """x [rows, k], starting where a wide load may start."""
    from ottava.kernels import grouped_gemm_triton

    return x if grouped_gemm_triton.fits(x) else x.clone(memory_format=torch.contiguous_format)


def _rowwise_fits(x: list[Tensor], y: list[Tensor], sa: Scheme, sb: Scheme) -> bool:
    """Whether torch's grouped product with a scale for each row takes them: e4m3, one contraction, sizes that are multiples of 16."""
    k, n = x[0].shape[1], y[0].shape[0]
    sizes_fit = k > 0 and k % 16 == 0 and n % 16 == 0 and all(t.shape[1] == k for t in x)
    return _SCALED_GROUPED_MM is not None and sa.per_tensor and sa.format == sb.format == "e4m3" and sizes_fit


def _torch_grouped_scaled_mm(
    x: list[Tensor], x_scale: list[Tensor], y: list[Tensor], y_scale: list[Tensor], split_accumulator: bool
) -> Tensor:
    """bf16 [M, n]. One scale a tensor is the same scale for each of its rows: nothing is rounded."""
    sizes = [t.shape[0] for t in x]
    rows, weights = [t.view(torch.uint8) for t in x], [t.view(torch.uint8) for t in y]  # torch.cat knows no FP8
    return _SCALED_GROUPED_MM(
        _together(rows).view(x[0].dtype),
        torch.stack(weights).view(y[0].dtype).transpose(1, 2),
        torch.cat([scale.expand(m) for scale, m in zip(x_scale, sizes, strict=True)]),
        ScalingType.RowWise,
        torch.stack([scale.expand(y[0].shape[0]) for scale in y_scale]),
        ScalingType.RowWise,
        offs=_ends(sizes, x[0].device),
        output_dtype=torch.bfloat16,
        use_fast_accum=not split_accumulator,
    )


grouped_scaled_mm = define("grouped_scaled_mm", _grouped_scaled_mm, _grouped_scaled_mm_fake, _grouped_scaled_mm_cuda)
