"""LayerNorm and RMSNorm, alone or fused with quantization, and with the addition of the residual that comes before them.

Two steps, so that a backward pass can redo the second from what it saved: `norm_stats` reduces each row, `norm_quantize` (or
`norm_apply`) uses the statistics. Statistics of two devices may differ by an ulp; given the same statistics the bytes are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.cast import BufferTensors, each_direction, fake_buffers, reference_buffers
from ottava.kernels.fixed_order import sum_rows
from ottava.kernels.registry import define, without_gradients
from ottava.quant.scaling import amax_of
from ottava.quant.scheme import Scheme

KINDS = ("LayerNorm", "RMSNorm")


def _gain(gamma: Tensor, zero_centered: bool) -> Tensor:
    return gamma.float() + 1.0 if zero_centered else gamma.float()


def _values(x: Tensor, gamma: Tensor, beta: Tensor | None, mean: Tensor, rstd: Tensor, zero_centered: bool) -> Tensor:
    """float32 [M, K]: ((x - mean) * rstd) * gain + beta, each operation rounded. `mean` is empty for RMSNorm."""
    y = x.float() - mean[:, None] if mean.numel() else x.float()
    y = (y * rstd[:, None]) * _gain(gamma, zero_centered)
    return y if beta is None else y + beta.float()


# ----------------------------------------------------------------------------------------------------------------- stats


def _stats(
    x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool, amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> mean [M] (empty for RMSNorm), rstd [M], both float32; and, if asked, the amax [1] of the rounded output."""
    x32 = x.float()
    mean = x32.mean(-1) if kind == "LayerNorm" else x32.new_empty(0)
    centered = x32 - mean[:, None] if kind == "LayerNorm" else x32
    variance = (centered * centered).mean(-1) + eps
    rstd = torch.ones_like(variance) / variance.sqrt()
    if not amax:
        return mean, rstd, x32.new_empty(0)
    return mean, rstd, amax_of(_values(x, gamma, beta, mean, rstd, zero_centered).to(x.dtype))


def _stats_fake(
    x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool, amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    mean = x.new_empty(rows if kind == "LayerNorm" else 0, dtype=torch.float32)
    return mean, x.new_empty(rows, dtype=torch.float32), x.new_empty(int(amax), dtype=torch.float32)


def _stats_cuda(
    x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool, amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    import ottava.kernels.norm_triton as norm_triton

    return norm_triton.stats(x, gamma, beta, kind, eps, zero_centered, amax)


STATS = without_gradients(_stats)
stats = define("norm_stats", _stats, _stats_fake, _stats_cuda, cuda_launches=True)


def _add_stats(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual [M, K] of one dtype -> their sum, rounded to it; and what `_stats` gives of that."""
    total = x + residual
    return total, *_stats(total, gamma, beta, kind, eps, zero_centered, amax)


def _add_stats_fake(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_stats_fake(x, gamma, beta, kind, eps, zero_centered, amax)


def _add_stats_cuda(
    x: Tensor,
    residual: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    kind: str,
    eps: float,
    zero_centered: bool,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    import ottava.kernels.norm_triton as norm_triton

    return norm_triton.add_stats(x, residual, gamma, beta, kind, eps, zero_centered, amax)


ADD_STATS = without_gradients(_add_stats)
add_stats = define("norm_add_stats", _add_stats, _add_stats_fake, _add_stats_cuda, cuda_launches=True)


# ----------------------------------------------------------------------------------------------------------------- apply


def _apply(
    x: Tensor, gamma: Tensor, beta: Tensor | None, mean: Tensor, rstd: Tensor, zero_centered: bool, dtype: torch.dtype
) -> Tensor:
    return _values(x, gamma, beta, mean, rstd, zero_centered).to(dtype)


def _apply_fake(
    x: Tensor, gamma: Tensor, beta: Tensor | None, mean: Tensor, rstd: Tensor, zero_centered: bool, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _apply_cuda(
    x: Tensor, gamma: Tensor, beta: Tensor | None, mean: Tensor, rstd: Tensor, zero_centered: bool, dtype: torch.dtype
) -> Tensor:
    import ottava.kernels.tile as tile

    return tile.store(tile.Norm(x, gamma, beta, mean, rstd, zero_centered), dtype)


apply = define("norm_apply", _apply, _apply_fake, _apply_cuda, cuda_launches=True)


def _quantize(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
) -> BufferTensors:
    """The normalized rows, quantized: from float32 directly if the scheme says so, else rounded to x's dtype first."""
    parsed = Scheme.parse(scheme)
    if parsed.columns is not None:
        given = (x, gamma, beta, mean, rstd, zero_centered)
        again = torch.ops.ottava.norm_quantize
        return each_direction(x, parsed, rowwise, columnwise, lambda s, r, c: again(*given, str(s), scale, amax, r, c))
    values = _values(x, gamma, beta, mean, rstd, zero_centered)
    values = values if parsed.from_float32 else values.to(x.dtype)
    return reference_buffers(values, parsed, scale, amax, rowwise, columnwise, x.dtype)


def _quantize_fake(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
) -> BufferTensors:
    return fake_buffers(x, x.shape[0], x.shape[1], Scheme.parse(scheme), rowwise, columnwise)


def _quantize_cuda(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
) -> BufferTensors:
    import ottava.kernels.tile as tile

    producer = tile.Norm(x, gamma, beta, mean, rstd, zero_centered)
    made = tile.quantize(producer, scheme, scale, amax, rowwise, columnwise)
    if made is None:
        return _QUANTIZE(x, gamma, beta, mean, rstd, zero_centered, scheme, scale, amax, rowwise, columnwise)
    return made


_QUANTIZE = without_gradients(_quantize)
quantize = define("norm_quantize", _quantize, _quantize_fake, _quantize_cuda, cuda_launches=True)


# -------------------------------------------------------------------------------------------------------------- backward


def _backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x [M, K] -> dx [M, K], dgamma [K], dbeta [K] (empty if there is no beta). Sums in float32."""
    dy32, x32 = dy.float(), x.float()
    xhat = (x32 - mean[:, None] if mean.numel() else x32) * rstd[:, None]
    dxhat = dy32 * _gain(gamma, zero_centered)
    dx = dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)
    if mean.numel():
        dx = dx - dxhat.mean(-1, keepdim=True)
    dgamma = sum_rows(dy32 * xhat).to(gamma.dtype)
    dbeta = sum_rows(dy32).to(gamma.dtype) if beta else gamma.new_empty(0)
    return (dx * rstd[:, None]).to(x.dtype), dgamma, dbeta


def _backward_fake(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gamma), gamma.new_empty(gamma.shape if beta else 0)


def _backward_cuda(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, zero_centered: bool, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    import ottava.kernels.norm_triton as norm_triton

    return norm_triton.backward(dy, x, gamma, mean, rstd, zero_centered, beta)


BACKWARD = without_gradients(_backward)
backward = define("norm_backward", _backward, _backward_fake, _backward_cuda, cuda_launches=True)


def _backward_add(
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
    """`_backward`, with another gradient [M, K] of x added to the rounded dx; and the amax [1] of the sum if asked (else empty)."""
    dx, dgamma, dbeta = _backward(dy, x, gamma, mean, rstd, zero_centered, beta)
    dx = dx + other
    return dx, dgamma, dbeta, amax_of(dx) if amax else dx.new_empty(0, dtype=torch.float32)


def _backward_add_fake(
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
    return *_backward_fake(dy, x, gamma, mean, rstd, zero_centered, beta), x.new_empty(int(amax), dtype=torch.float32)


def _backward_add_cuda(
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
    import ottava.kernels.norm_triton as norm_triton

    return norm_triton.backward_add(dy, x, gamma, mean, rstd, zero_centered, beta, other, amax)


BACKWARD_ADD = without_gradients(_backward_add)
backward_add = define("norm_backward_add", _backward_add, _backward_add_fake, _backward_add_cuda, cuda_launches=True)
