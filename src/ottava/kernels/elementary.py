"""exp, sigmoid and tanh from IEEE basic operations only, so that a CPU and a GPU give the same bits.

Library versions of exp differ by an ulp or two between devices, which flips FP8 roundings. These take about ten
multiplications and additions more; the kernels that call them are bound by memory, so it costs nothing there.
The Triton twins in `tile.py` do the same operations in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2E = 1.4426950408889634
LN2_HIGH = 0.693359375  # 11 significant bits: n * LN2_HIGH is exact for |n| < 2^13
LN2_LOW = -2.12194440e-4
ROUND_MAGIC = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even
EXP_LOW, EXP_HIGH = -87.0, 88.0
# Taylor-like minimax coefficients of (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, highest power first (Cephes expf).
EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(x: Tensor) -> Tensor:
    """e^x of a float32 tensor, to about 1 ulp, for x clamped to [-87, 88]. NaN stays NaN."""
    x = x.clamp(EXP_LOW, EXP_HIGH)
    n = (x * LOG2E + ROUND_MAGIC) - ROUND_MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    exponent = torch.nan_to_num(n, nan=0.0).to(torch.int32)
    return p * ((exponent + 127) << 23).view(torch.float32)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    denominator = exp(-x) + 1.0
    return torch.ones_like(denominator) / denominator


def tanh(x: Tensor) -> Tensor:
    """1 - 2 / (1 + e^2x). Absolute error of an ulp of 1, which is what GELU needs."""
    denominator = exp(x * 2.0) + 1.0
    return 1.0 - torch.full_like(denominator, 2.0) / denominator
