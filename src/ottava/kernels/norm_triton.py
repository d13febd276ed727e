"""Triton kernels of `norm.py`: row statistics (with the amax of the output) and the backward pass.

Both hold a whole row in registers: one read of each input. Rows wider than `MAX_WIDTH` take the torch reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels import norm
from ottava.kernels.launch import Launch, Launcher
from ottava.kernels.magnitudes_triton import raise_to
from ottava.kernels.zeros import zero_like
from ottava.quant.scaling import amax_of

MAX_WIDTH = 32768


@triton.jit
def _stats_kernel(
    x_ptr, residual_ptr, sum_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, amax_ptr, x_stride, residual_stride, K, eps,
    ADD: tl.constexpr, CENTER: tl.constexpr, BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr, AMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ADD: the statistics are those of x + residual, rounded to their dtype and stored."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < K
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row.to(tl.int64) * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row.to(tl.int64) * K + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if CENTER:
        mean = tl.sum(x) / K
        x = tl.where(mask, x - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    variance = tl.sum(x * x) / K + eps
    rstd = tl.div_rn(variance * 0.0 + 1.0, tl.sqrt_rn(variance))
    tl.store(rstd_ptr + row, rstd)
    if AMAX:
        gain = tl.load(gamma_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            gain = gain + 1.0
        y = (x * rstd) * gain
        if BETA:
            y = y + tl.load(beta_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        y = tl.where(mask & (y == y), tl.abs(y), 0.0)
        largest = tl.max(y)
        if largest > tl.load(amax_ptr):  # most rows do not raise it: a plain read saves the contended atomic
            tl.atomic_max(amax_ptr, largest)


_STATS = Launcher(_stats_kernel)


def stats(
    x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool, amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `norm._stats`."""
    if x.shape[1] > MAX_WIDTH or x.shape[0] == 0:
        return norm.STATS(x, gamma, beta, kind, eps, zero_centered, amax)
    return _stats(x, None, None, gamma, beta, kind, eps, zero_centered, amax)


def add_stats(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `norm._add_stats`."""
    if x.shape[1] > MAX_WIDTH or x.shape[0] == 0 or x.dtype != residual.dtype or x.dtype is torch.float64:
        return norm.ADD_STATS(x, residual, gamma, beta, kind, eps, zero_centered, amax)
    residual = residual if residual.stride(-1) == 1 else residual.contiguous()
    total = x.new_empty(x.shape)
    return total, *_stats(x, residual, total, gamma, beta, kind, eps, zero_centered, amax)


def _stats(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, or of x + residual, which is stored in `total`."""
    m, k = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    center = kind == "LayerNorm"
    rstd = x.new_empty(m, dtype=torch.float32)
    mean = x.new_empty(m if center else 0, dtype=torch.float32)
    out = zero_like(x) if amax else x.new_empty(0, dtype=torch.float32)
    beta_dtype = None if beta is None else beta.dtype
    stride = None if residual is None else residual.stride(0)
    key = (m, k, x.stride(0), stride, x.dtype, gamma.dtype, beta_dtype, center, eps, zero_centered, amax)
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _keep(key, _prepare_stats(x, residual, beta is not None, center, eps, zero_centered, amax))
    tensors: tuple[Any, ...] = (x, gamma, rstd, out) if amax else (x, rstd)
    tensors = (*tensors, mean) if center else tensors
    tensors = tensors if residual is None else (*tensors, residual, total)
    launch(*tensors, beta) if amax and beta is not None else launch(*tensors)
    return mean, rstd, out


def _prepare_stats(
    x: Tensor, residual: Tensor | None, beta: bool, center: bool, eps: float, zero_centered: bool, amax: bool
) -> Launch:
    """Takes x, gain, rstd, amax, mean, residual, sum, bias: the gain, the bias and the amax only if that is asked for, the mean only to
    be written, residual and sum only if there is something to add."""
    pointers: tuple[str, ...] = ("x_ptr", "gamma_ptr", "rstd_ptr", "amax_ptr") if amax else ("x_ptr", "rstd_ptr")
    pointers += ("mean_ptr",) if center else ()
    pointers += () if residual is None else ("residual_ptr", "sum_ptr")
    pointers += ("beta_ptr",) if amax and beta else ()
    block = triton.next_power_of_2(x.shape[1])
    arguments = {
        "residual_ptr": None, "sum_ptr": None, "gamma_ptr": None, "beta_ptr": None, "mean_ptr": None, "amax_ptr": None,
        "x_stride": x.stride(0), "residual_stride": 0 if residual is None else residual.stride(0), "K": x.shape[1], "eps": eps,
        "ADD": residual is not None, "CENTER": center, "BETA": amax and beta, "ZERO_CENTERED": zero_centered, "AMAX": amax, "BLOCK": block,
    }  # fmt: skip
    return _STATS.prepare((x.shape[0],), _warps(block), arguments, pointers)


_MOST_LAUNCHES = 1024
_LAUNCHES: dict[tuple, Launch] = {}
"""By all that the launch depends on but the addresses."""


def _keep(key: tuple, launch: Launch) -> Launch:
    if len(_LAUNCHES) >= _MOST_LAUNCHES:
        _LAUNCHES.clear()
    _LAUNCHES[key] = launch
    return launch


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, gamma_ptr, mean_ptr, rstd_ptr, other_ptr, dx_ptr, dgamma_ptr, dbeta_ptr, amax_ptr,
    dy_stride, x_stride, other_stride, M, K,
    CENTER: tl.constexpr, BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr, ADD: tl.constexpr, AMAX: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program walks rows pid, pid + programs, ... and sums dgamma and dbeta over them into its own row of the partials.

    ADD: another gradient of x is added to dx, which is rounded before and after, as two kernels would. AMAX: of what is stored.
    """
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < K
    gain = tl.load(gamma_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gain = gain + 1.0
    dgamma = tl.zeros([BLOCK], tl.float32)
    dbeta = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(pid, M, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + tl.cast(row, tl.int64) * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + tl.cast(row, tl.int64) * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if CENTER:
            x = x - tl.load(mean_ptr + row)
        xhat = tl.where(mask, x * rstd, 0.0)
        dxhat = dy * gain
        dx = dxhat - xhat * (tl.sum(dxhat * xhat) / K)
        if CENTER:
            dx = dx - tl.sum(dxhat) / K
        dx = (dx * rstd).to(dx_ptr.dtype.element_ty)
        if ADD:
            other = tl.load(other_ptr + tl.cast(row, tl.int64) * other_stride + cols, mask=mask, other=0.0).to(
                tl.float32
            )
            dx = (dx.to(tl.float32) + other).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + tl.cast(row, tl.int64) * K + cols, dx, mask=mask)
        if AMAX:
            size = tl.abs(dx.to(tl.float32))
            largest = tl.where(size > largest, size, largest)  # a NaN is not larger than anything
        dgamma += dy * xhat
        if BETA:
            dbeta += dy
    tl.store(dgamma_ptr + pid.to(tl.int64) * K + cols, dgamma, mask=mask)
    if BETA:
        tl.store(dbeta_ptr + pid.to(tl.int64) * K + cols, dbeta, mask=mask)
    if AMAX:
        raise_to(amax_ptr, tl.max(tl.where(mask, largest, 0.0)))


_BACKWARD = Launcher(_backward_kernel)


def backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `norm._backward`."""
    if x.shape[1] > MAX_WIDTH or x.shape[0] == 0:
        return norm.BACKWARD(dy, x, gamma, mean, rstd, zero_centered, beta)
    return _backward(dy, x, gamma, mean, rstd, zero_centered, beta, None, False)[:3]


def backward_add(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    beta: bool,
    other: Tensor,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `norm._backward_add`."""
    if x.shape[1] > MAX_WIDTH or x.shape[0] == 0 or x.dtype != other.dtype or x.dtype is torch.float64:
        return norm.BACKWARD_ADD(dy, x, gamma, mean, rstd, zero_centered, beta, other, amax)
    if (
        x.dtype is torch.float32
    ):  # nothing is rounded in between: the addition would be fused into the product before it
        dx, dgamma, dbeta = backward(dy, x, gamma, mean, rstd, zero_centered, beta)
        dx.add_(other)
        return dx, dgamma, dbeta, amax_of(dx) if amax else dx.new_empty(0)
    other = other if other.stride(-1) == 1 else other.contiguous()
    return _backward(dy, x, gamma, mean, rstd, zero_centered, beta, other, amax)


def _backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    beta: bool,
    other: Tensor | None,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    center = mean.numel() > 0
    stride = None if other is None else other.stride(0)
    key = (
        m, k, x.stride(0), dy.stride(0), stride, x.dtype, dy.dtype, gamma.dtype, center, zero_centered, beta, amax, x.device
    )  # fmt: skip
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _keep(key, _prepare_backward(dy, x, other, center, zero_centered, beta, amax))
    programs = launch.grid[0]
    dx = x.new_empty(m, k)
    dgamma = x.new_empty(programs, k, dtype=torch.float32)
    dbeta = x.new_empty(programs if beta else 0, k, dtype=torch.float32)
    largest = zero_like(x) if amax else x.new_empty(0, dtype=torch.float32)
    tensors: tuple[Any, ...] = (dy, x, gamma, rstd, dx, dgamma)
    tensors = (*tensors, mean) if center else tensors
    tensors = (*tensors, dbeta) if beta else tensors
    tensors = tensors if other is None else (*tensors, other)
    launch(*tensors, largest) if amax else launch(*tensors)
    return dx, _folded(dgamma, gamma), _folded(dbeta, gamma) if beta else gamma.new_empty(0), largest


@triton.jit
def _fold_kernel(partials_ptr, out_ptr, ROWS, K, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """out [K] = the sum over the rows of partials [ROWS, K], always in the same order."""
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, ROWS, BLOCK_ROWS):
        mask = (first + rows < ROWS)[:, None] & (columns < K)[None, :]
        total += tl.load(partials_ptr + (first + rows)[:, None] * K + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=columns < K)


_FOLD = Launcher(_fold_kernel)


def _folded(partials: Tensor, like: Tensor) -> Tensor:
    """The sum over rows of partials [rows, K], in the dtype of `like`."""
    rows, k = partials.shape
    out = like.new_empty(k)
    key = ("fold", rows, k, like.dtype)
    launch = _LAUNCHES.get(key)
    if launch is None:
        numbers = {"ROWS": rows, "K": k, "BLOCK_ROWS": 64, "BLOCK_COLUMNS": 32}
        launch = _keep(key, _FOLD.prepare((triton.cdiv(k, 32),), 4, numbers, ("partials_ptr", "out_ptr")))
    launch(partials, out)
    return out


def _prepare_backward(
    dy: Tensor, x: Tensor, other: Tensor | None, center: bool, zero_centered: bool, beta: bool, amax: bool
) -> Launch:
    """Takes dy, x, gain, rstd, dx, the gain's partial sums; then the mean, the bias's partial sums, the other gradient and the amax, if
    there are such."""
    m, k = x.shape
    block = triton.next_power_of_2(k)
    ahead = block * (
        dy.element_size() + x.element_size() + (0 if other is None else other.element_size())
    )  # bytes of a row
    # Rows are read ahead into shared memory where two programs find room for it on a processor; else more programs take turns.
    stages, each = (3, 2) if 3 * ahead <= 96 * 2**10 else (1, 4)
    programs = min(m, each * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 8)
    arguments = {
        "mean_ptr": None, "dbeta_ptr": None, "other_ptr": None, "amax_ptr": None, "dy_stride": dy.stride(0), "x_stride": x.stride(0),
        "other_stride": 0 if other is None else other.stride(0), "M": m, "K": k,
        "CENTER": center, "BETA": beta, "ZERO_CENTERED": zero_centered, "ADD": other is not None, "AMAX": amax,
        "STAGES": stages, "BLOCK": block,
    }  # fmt: skip
    pointers: tuple[str, ...] = ("dy_ptr", "x_ptr", "gamma_ptr", "rstd_ptr", "dx_ptr", "dgamma_ptr")
    pointers += ("mean_ptr",) if center else ()
    pointers += ("dbeta_ptr",) if beta else ()
    pointers += () if other is None else ("other_ptr",)
    pointers += ("amax_ptr",) if amax else ()
    return _BACKWARD.prepare((programs,), _warps(block), arguments, pointers, fuse_multiply_add=True)
