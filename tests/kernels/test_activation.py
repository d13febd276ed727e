"""Activations: forward and backward against float64 autograd, and fused with quantization."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import ottava  # noqa: F401
from ottava.kernels import tally
from ottava.kernels.activation import ACTIVATIONS, get
from quant_cases import SCHEMES, all_same, relative, same

ops = torch.ops.ottava

PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": F.silu,
    "srelu": lambda x: torch.relu(x).square(),
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "glu": "sigmoid"}
NAMES = [*PLAIN, *GATED]


def reference(h: Tensor, name: str) -> Tensor:
    if name in PLAIN:
        return PLAIN[name](h)
    gate, up = h.chunk(2, -1)
    return (PLAIN | {"sigmoid": torch.sigmoid})[GATED[name]](gate) * up


def width(name: str) -> int:
    return 64 if name in GATED else 32


def test_the_names_of_the_interface() -> None:
    assert set(NAMES) == set(ACTIVATIONS)
    assert {name for name in NAMES if get(name).gated} == set(GATED)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)])
def test_forward_and_backward_against_float64(name: str, dtype: torch.dtype, tolerance: float) -> None:
    h = (torch.randn(40, width(name)) * 2).to(dtype)
    h64 = h.double().requires_grad_()
    want = reference(h64, name)
    dy = torch.randn(40, 32).to(dtype)
    want.backward(dy.double())
    y, dh = ops.activation(h, name), ops.activation_backward(dy, h, name)
    assert y.dtype == dh.dtype == dtype
    assert relative(y, want) < tolerance and relative(dh, h64.grad) < tolerance


@pytest.mark.parametrize("name", NAMES)
def test_large_and_special_values(name: str) -> None:
    """No overflow on the way for large finite input; NaN stays NaN, and only where it was."""
    h = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4, math.nan]])
    h = torch.cat([h, torch.ones_like(h)], -1) if name in GATED else h
    y, dh = ops.activation(h, name), ops.activation_backward(torch.ones(1, 6), h, name)
    assert y[0, :5].isfinite().all() and dh[0, :5].isfinite().all()
    assert y[0, 5].isnan()
    want = reference(h.double(), name)[0, :5]
    # tanh and sigmoid are off by an ulp of 1 where they should be -1 or 1, which h multiplies.
    assert ((y[0, :5] - want).abs() <= 1e-5 * want.abs() + 2.0**-23 * h[0, :5].abs()).all()


@pytest.mark.parametrize("name", NAMES)
def test_nan_survives_backward(name: str) -> None:
    h, dy = torch.randn(4, width(name)), torch.randn(4, 32)
    dy[2, 3] = math.nan
    dh = ops.activation_backward(dy, h, name)
    assert dh[2, 3].isnan() and dh.isnan().sum() == (2 if name in GATED else 1)


@pytest.mark.strict
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["e4m3:tensor", "e5m2:1x128:pow2", "e4m3:1x32", "e2m1:16x16"])
@pytest.mark.parametrize("direct", [False, True])
def test_fused_quantization_gives_the_bytes_of_two_steps(name: str, scheme: str, direct: bool) -> None:
    h, dy = torch.randn(32, width(name)).bfloat16(), torch.randn(32, 32).bfloat16()
    full = torch.float32 if direct else torch.bfloat16

    def values(t: Tensor, op, *args: object) -> Tensor:
        """The op's float32 result, rounded to bf16 unless direct: the op rounds to its input's dtype."""
        return op(*(a.float() if isinstance(a, Tensor) else a for a in args), name).to(full)

    # Per-tensor scales come from the float32 output, whether or not it is rounded before it is quantized.
    amax = ops.amax(ops.activation(h.float(), name)) if ":tensor" in scheme else None
    fused = ops.activation_quantize(h, name, scheme + ":f32" * direct, None, None, True, True)
    assert all_same(fused, ops.quantize(values(h, ops.activation, h), scheme, None, amax, True, True))
    *fused, column_sum = ops.activation_backward_quantize(
        dy, h, name, scheme + ":f32" * direct, None, None, True, True, True
    )
    gradient = values(h, ops.activation_backward, dy, h)
    assert all_same(fused, ops.quantize(gradient, scheme, None, None, True, True))
    assert same(column_sum, gradient.float().sum(0).bfloat16())


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if "stochastic" not in s])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_backward_with_output_makes_the_copy_that_forward_would_have_kept(name: str, scheme: str) -> None:
    h, dy = torch.randn(32, width(name)).bfloat16(), torch.randn(32, 32).bfloat16()
    forward = ops.activation_quantize(h, name, scheme, None, None, True, True)
    amax = forward[4] if ":tensor" in scheme else None
    gradient = (dy, h, name, scheme, None, None, True, True, True)
    slot = tally.slot
    *found, data, scale_inv, empty = ops.activation_backward_with_output(*gradient, scheme, None, amax)
    assert all_same(found, ops.activation_backward_quantize(*gradient)) and tally.slot == slot
    assert all_same([data, scale_inv, empty], [forward[2], forward[3], forward[5]])
    if ":tensor" in scheme:
        scale = torch.tensor([1.7])
        made = ops.activation_backward_with_output(*gradient, scheme, scale, None)
        given = ops.activation_quantize(h, name, scheme, scale, None, False, True)
        assert all_same(made[7:9], given[2:4])


def test_what_backward_makes_again_is_not_counted_again() -> None:
    h = torch.full(
        (16, 64), float("inf")
    ).bfloat16()  # not finite forward; in the gradient's tally there are its own numbers
    dy, device = torch.zeros(16, 32).bfloat16(), torch.device("cpu")
    tally.reset(device)
    tally.slot = tally.FIRST
    try:
        ops.activation_backward_quantize(dy, h, "swiglu", "e4m3:tensor", None, None, True, True, False)
        alone = int(tally.counts(device)[tally.FIRST])
        args = ("e4m3:tensor", None, torch.ones(1))
        ops.activation_backward_with_output(
            dy, h, "swiglu", "e4m3:tensor", None, None, True, True, False, *args
        )  # fmt: skip
        assert int(tally.counts(device)[tally.FIRST]) == 2 * alone
    finally:
        tally.slot = tally.ELSEWHERE
        tally.reset(device)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [0, 1, 16])
def test_fakes_have_the_real_shapes(name: str, rows: int) -> None:
    def run(h: Tensor, dy: Tensor) -> list[Tensor]:
        out = [ops.activation(h, name), ops.activation_backward(dy, h, name)]
        for scheme in ("e4m3:tensor", "e4m3:1x128", "e4m3:1x32"):
            out += ops.activation_quantize(h, name, scheme, None, None, True, True)
            out += ops.activation_backward_quantize(dy, h, name, scheme, None, None, True, True, True)
            out += ops.activation_backward_quantize(dy, h, name, scheme, None, None, True, False, False)
            out += ops.activation_backward_with_output(
                dy, h, name, scheme, None, None, True, True, True, scheme, None, torch.ones(1)
            )
        return out

    h, dy = torch.randn(rows, width(name)).bfloat16(), torch.randn(rows, 32).bfloat16()
    with FakeTensorMode() as mode:
        fakes = run(mode.from_tensor(h), mode.from_tensor(dy))
    assert [(r.shape, r.dtype) for r in run(h, dy)] == [(f.shape, f.dtype) for f in fakes]


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_opcheck(name: str) -> None:
    h, dy = torch.randn(16, width(name)), torch.randn(16, 32)
    for op, args in (
        (ops.activation, (h, name)),
        (ops.activation_backward, (dy, h, name)),
    ):
        torch.library.opcheck(op.default, args)
    for scheme in [s for s in SCHEMES if "stochastic" not in s]:
        torch.library.opcheck(ops.activation_quantize.default, (h, name, scheme, None, None, True, True))
        args = (dy, h, name, scheme, None, None, True, True, True)
        torch.library.opcheck(ops.activation_backward_quantize.default, args)
        torch.library.opcheck(ops.activation_backward_with_output.default, (*args, scheme, None, None))


def test_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Unknown activation 'swigul'\. Did you mean 'swiglu'\? Known: gelu, qgelu"):
        ops.activation(torch.ones(2, 2), "swigul")
