"""Triton twins of `elementary.py` and of the activations: the same operations in the same order, inlined into other kernels.

The numbers are those of `elementary.py` and `activation.py`, written out: Triton compares every global that a kernel uses at every
launch, which took longer than the launch itself. tests/gpu compares the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    x = tl.minimum(tl.maximum(x, -80.0), 80.0)  # turns NaN into a number; every caller multiplies by x again
    biased = x * 1.4426950408889634 + 12583039.0
    n = biased - 12583039.0
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    return p * (biased.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _positive_reciprocal(d):
    r = (0x7EF311C7 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    r = r * (2.0 - d * r)
    r = r * (2.0 - d * r)
    return r + r * (1.0 - d * r)


@triton.jit
def _sigmoid(x):
    return _positive_reciprocal(_exp(-x) + 1.0)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 * _positive_reciprocal(_exp(x * 2.0) + 1.0)


@triton.jit
def _relu(x):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "gelu":
        y = x * (0.5 + 0.5 * _tanh(x * (0.79788456 + 0.03567741 * (x * x))))
    elif ACT == "silu":
        y = x * _sigmoid(x)
    elif ACT == "qgelu":
        y = x * _sigmoid(1.702 * x)
    elif ACT == "relu":
        y = _relu(x)
    else:
        tl.static_assert(ACT == "srelu")
        r = _relu(x)
        y = r * r
    return y


@triton.jit
def derivative(x, ACT: tl.constexpr):
    if ACT == "gelu":
        t = _tanh(x * (0.79788456 + 0.03567741 * (x * x)))
        y = (0.5 * x) * ((1.0 - t * t) * (0.79788456 + 0.1070322243 * (x * x))) + 0.5 * (1.0 + t)
    elif ACT == "silu":
        s = _sigmoid(x)
        y = (x * (s * (1.0 - s))) + s
    elif ACT == "qgelu":
        s = _sigmoid(1.702 * x)
        y = ((1.702 * x) * (s * (1.0 - s))) + s
    elif ACT == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACT == "srelu")
        y = 2.0 * _relu(x)
    return y
