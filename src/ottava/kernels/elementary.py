"""exp, sigmoid and tanh from IEEE basic operations only, so that a CPU and a GPU give the same bits.

Library versions of exp differ by an ulp or two between devices, which flips FP8 roundings. This one takes about ten
multiplications and additions more. A reciprocal is correctly rounded everywhere.
The Triton twins in `activation_triton.py` round in the same places.
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


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return torch.reciprocal(exp(-x) + 1.0)


def tanh(x: Tensor) -> Tensor:
    """1 - 2 / (1 + e^2x). Absolute error of an ulp of 1, which is what GELU needs."""
    return 1.0 - 2.0 * torch.reciprocal(exp(x * 2.0) + 1.0)
