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
# 1.5 * 2^23 + 127: adding it to t leaves 127 + round(t) in the low mantissa bits, ties to even: an exponent to shift into place.
ROUND_MAGIC = 12583039.0
EXP_LOW, EXP_HIGH = -80.0, 80.0
RECIPROCAL_MAGIC = 0x7EF311C7
# Coefficients of (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, highest power first (Cephes expf).
EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(x: Tensor) -> Tensor:
    """e^x of a float32 tensor, to about 1 ulp, for x clamped to [-80, 80]. NaN stays NaN."""
    x = x.clamp(EXP_LOW, EXP_HIGH)
    biased = x * LOG2E + ROUND_MAGIC
    n = biased - ROUND_MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    return p * (biased.view(torch.int32) << 23).view(torch.float32)


def reciprocal(d: Tensor) -> Tensor:
    """1 / d to about 1 ulp, for d in [1, 2^120]: a first guess from the bits (5% off), then three Newton steps.

    Eleven operations without a branch; a correctly rounded division takes a GPU about fourteen and a branch. The last step adds a
    correction, which makes the reciprocal of 1 exact: GELU and SiLU of a very negative number then are 0.
    """
    r = (RECIPROCAL_MAGIC - d.view(torch.int32)).view(torch.float32)
    r = r * (2.0 - d * r)
    r = r * (2.0 - d * r)
    return r + r * (1.0 - d * r)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return reciprocal(exp(-x) + 1.0)


def tanh(x: Tensor) -> Tensor:
    """1 - 2 / (1 + e^2x). Absolute error of an ulp of 1, which is what GELU needs."""
    return 1.0 - 2.0 * reciprocal(exp(x * 2.0) + 1.0)
