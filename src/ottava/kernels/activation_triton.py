"""Triton twins of `elementary.py` and of the activations: the same operations in the same order, inlined into other kernels.

The numbers are those of `elementary.py` and `activation.py`, written out: Triton compares every global that a kernel uses at every
launch, which took longer than the launch itself. tests/gpu compares the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _exp_plus_one(x):
    """`exp(x) + 1`. Where a product is exact a fused addition rounds as the two operations do: two instructions fewer."""
    x = tl.minimum(tl.maximum(x, -80.0), 80.0)  # turns NaN into a number; every caller multiplies by x again
    biased = x * 1.4426950408889634 + 12583039.0
    n = biased - 12583039.0
    r = tl.fma(n, -0.693359375, x) - n * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (p * (r * r) + r) + 1.0
    return tl.fma(p, (biased.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def reciprocal(d):
    """1 / d, correctly rounded, for d in [1, 2^120]: three instructions. This is how `rcp.rn` is made, less its branch for numbers
    that are subnormal or have a subnormal reciprocal; tests/gpu tries all of them."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 error, minus;
        rcp.approx.ftz.f32 $0, $1;
        neg.f32 minus, $1;
        fma.rn.f32 error, minus, $0, 0f3F800000;
        fma.rn.f32 $0, error, $0, $0;
        }""",
        "=&f,f", [d], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _sigmoid(x):
    return reciprocal(_exp_plus_one(-x))


@triton.jit
def _tanh(x):
    return tl.fma(reciprocal(_exp_plus_one(x * 2.0)), -2.0, 1.0)


@triton.jit
def _relu(x):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "gelu":
        y = x * (0.5 + 0.5 * _tanh(x * (0.79788456 + 0.03567741 * (x * x))))
    elif ACT == "silu":
        y = x * _sigmoid(x)
    elif ACT == "sigmoid":
        y = _sigmoid(x)
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
    elif ACT == "sigmoid":
        s = _sigmoid(x)
        y = s * (1.0 - s)
    elif ACT == "qgelu":
        s = _sigmoid(1.702 * x)
        y = ((1.702 * x) * (s * (1.0 - s))) + s
    elif ACT == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACT == "srelu")
        y = 2.0 * _relu(x)
    return y
