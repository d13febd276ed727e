"""Triton kernels of `norm.py`: row statistics (with the amax of the output) and the backward pass.

Both hold a whole row in registers: one read of each input. Rows wider than `MAX_WIDTH` take the torch reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels import norm
from ottava.kernels.launch import Launch, Launcher

MAX_WIDTH = 32768


@triton.jit
def _stats_kernel(
    x_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, amax_ptr, x_stride, K, eps,
    CENTER: tl.constexpr, BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr, AMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < K
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
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
    m, k = x.shape
    if k > MAX_WIDTH or m == 0:
        return norm.STATS(x, gamma, beta, kind, eps, zero_centered, amax)
    x = x if x.stride(-1) == 1 else x.contiguous()
    center = kind == "LayerNorm"
    rstd = x.new_empty(m, dtype=torch.float32)
    mean = x.new_empty(m if center else 0, dtype=torch.float32)
    out = x.new_zeros(1, dtype=torch.float32) if amax else x.new_empty(0, dtype=torch.float32)
    beta_dtype = None if beta is None else beta.dtype
    key = (m, k, x.stride(0), x.dtype, gamma.dtype, beta_dtype, center, eps, zero_centered, amax)
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _keep(key, _prepare_stats(x, beta is not None, center, eps, zero_centered, amax))
    tensors: tuple[Tensor, ...] = (x, gamma, rstd, out) if amax else (x, rstd)
    tensors = (*tensors, mean) if center else tensors
    launch(*tensors, beta) if amax and beta is not None else launch(*tensors)
    return mean, rstd, out


def _prepare_stats(x: Tensor, beta: bool, center: bool, eps: float, zero_centered: bool, amax: bool) -> Launch:
    """Takes x, gain, rstd, amax, mean, bias: the gain, the bias and the amax only if that is asked for, the mean only to be written."""
    pointers: tuple[str, ...] = ("x_ptr", "gamma_ptr", "rstd_ptr", "amax_ptr") if amax else ("x_ptr", "rstd_ptr")
    pointers += ("mean_ptr",) if center else ()
    pointers += ("beta_ptr",) if amax and beta else ()
    block = triton.next_power_of_2(x.shape[1])
    arguments = {
        "gamma_ptr": None, "beta_ptr": None, "mean_ptr": None, "amax_ptr": None, "x_stride": x.stride(0), "K": x.shape[1], "eps": eps,
        "CENTER": center, "BETA": amax and beta, "ZERO_CENTERED": zero_centered, "AMAX": amax, "BLOCK": block,
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
    dy_ptr, x_ptr, gamma_ptr, mean_ptr, rstd_ptr, dx_ptr, dgamma_ptr, dbeta_ptr, dy_stride, x_stride, M, K,
    CENTER: tl.constexpr, BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program walks rows pid, pid + programs, ... and sums dgamma and dbeta over them into its own row of the partials."""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < K
    gain = tl.load(gamma_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gain = gain + 1.0
    dgamma = tl.zeros([BLOCK], tl.float32)
    dbeta = tl.zeros([BLOCK], tl.float32)
    for row in range(pid, M, tl.num_programs(0)):
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
        tl.store(dx_ptr + tl.cast(row, tl.int64) * K + cols, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
        dgamma += dy * xhat
        if BETA:
            dbeta += dy
    tl.store(dgamma_ptr + pid.to(tl.int64) * K + cols, dgamma, mask=mask)
    if BETA:
        tl.store(dbeta_ptr + pid.to(tl.int64) * K + cols, dbeta, mask=mask)


_BACKWARD = Launcher(_backward_kernel)


def backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `norm._backward`."""
    m, k = x.shape
    if k > MAX_WIDTH or m == 0:
        return norm.BACKWARD(dy, x, gamma, mean, rstd, zero_centered, beta)
    x = x if x.stride(-1) == 1 else x.contiguous()
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    center = mean.numel() > 0
    key = (m, k, x.stride(0), dy.stride(0), x.dtype, dy.dtype, gamma.dtype, center, zero_centered, beta, x.device)
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _keep(key, _prepare_backward(dy, x, center, zero_centered, beta))
    programs = launch.grid[0]
    dx = x.new_empty(m, k)
    dgamma = x.new_empty(programs, k, dtype=torch.float32)
    dbeta = x.new_empty(programs if beta else 0, k, dtype=torch.float32)
    tensors: tuple[Tensor, ...] = (dy, x, gamma, rstd, dx, dgamma)
    tensors = (*tensors, mean) if center else tensors
    launch(*tensors, dbeta) if beta else launch(*tensors)
    return dx, dgamma.sum(0).to(gamma.dtype), dbeta.sum(0).to(gamma.dtype) if beta else gamma.new_empty(0)


def _prepare_backward(dy: Tensor, x: Tensor, center: bool, zero_centered: bool, beta: bool) -> Launch:
    """Takes dy, x, gain, rstd, dx, the gain's partial sums; then the mean and the bias's partial sums, if there are such."""
    m, k = x.shape
    programs = min(m, 4 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 8)
    block = triton.next_power_of_2(k)
    arguments = {
        "mean_ptr": None, "dbeta_ptr": None, "dy_stride": dy.stride(0), "x_stride": x.stride(0), "M": m, "K": k,
        "CENTER": center, "BETA": beta, "ZERO_CENTERED": zero_centered, "BLOCK": block,
    }  # fmt: skip
    pointers: tuple[str, ...] = ("dy_ptr", "x_ptr", "gamma_ptr", "rstd_ptr", "dx_ptr", "dgamma_ptr")
    pointers += ("mean_ptr",) if center else ()
    pointers += ("dbeta_ptr",) if beta else ()
    return _BACKWARD.prepare((programs,), _warps(block), arguments, pointers, fuse_multiply_add=True)
