"""LayerNorm and RMSNorm ops: forward and backward against float64 autograd, and fused with quantization."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ottava  # noqa: F401
from ottava.kernels.cast import Buffers
from quant_cases import SCHEMES, all_same, relative, same

ops = torch.ops.ottava
KINDS = ["LayerNorm", "RMSNorm"]


def arguments(kind: str, rows: int = 24, columns: int = 64, dtype: torch.dtype = torch.float32):
    """(x, gamma, beta or None)."""
    x = torch.randn(rows, columns, dtype=dtype) * 2 + 0.5
    gamma = (torch.randn(columns) * 0.3 + 1).to(dtype)
    return x, gamma, torch.randn(columns).to(dtype) if kind == "LayerNorm" else None


def reference(x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool) -> Tensor:
    """From the definition, in the dtype of x."""
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (gamma + 1 if zero_centered else gamma)
    return y if beta is None else y + beta


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)])
def test_forward_and_backward_against_float64(
    kind: str, zero_centered: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x, gamma, beta = arguments(kind, dtype=dtype)
    mean, rstd, _ = ops.norm_stats(x, gamma, beta, kind, 1e-5, zero_centered, False)
    y = ops.norm_apply(x, gamma, beta, mean, rstd, zero_centered, dtype)
    dy = torch.randn_like(x)
    dx, dgamma, dbeta = ops.norm_backward(dy, x, gamma, mean, rstd, zero_centered, beta is not None)
    leaves = [v.double().requires_grad_() for v in (x, gamma, beta) if v is not None]
    want = reference(*leaves, *[None] * (3 - len(leaves)), kind, 1e-5, zero_centered)
    want.backward(dy.double())
    assert y.dtype == dx.dtype == dgamma.dtype == dtype
    assert relative(y, want) < tolerance and relative(dx, leaves[0].grad) < tolerance
    assert relative(dgamma, leaves[1].grad) < tolerance
    assert dbeta.numel() == 0 if beta is None else relative(dbeta, leaves[2].grad) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_statistics(kind: str) -> None:
    x, gamma, beta = arguments(kind)
    mean, rstd, amax = ops.norm_stats(x, gamma, beta, kind, 0.1, False, True)
    x64 = x.double()
    centered = x64 - x64.mean(-1, keepdim=True) if kind == "LayerNorm" else x64
    torch.testing.assert_close(rstd.double(), 1 / (centered.square().mean(-1) + 0.1).sqrt(), rtol=1e-6, atol=0)
    assert mean.shape == ((24,) if kind == "LayerNorm" else (0,)) and mean.dtype == rstd.dtype == torch.float32
    y = ops.norm_apply(x, gamma, beta, mean, rstd, False, x.dtype)
    assert amax.tolist() == [y.abs().max().item()]


def test_amax_is_of_the_rounded_output() -> None:
    """Current scaling quantizes the rounded output, so its scale comes from that."""
    x, gamma, beta = arguments("LayerNorm", dtype=torch.bfloat16)
    mean, rstd, amax = ops.norm_stats(x, gamma, beta, "LayerNorm", 1e-5, False, True)
    assert amax == ops.norm_apply(x, gamma, beta, mean, rstd, False, torch.bfloat16).abs().max().float()


@pytest.mark.strict
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if "stochastic" not in s])
@pytest.mark.parametrize("direct", [False, True])
def test_fused_quantization_gives_the_bytes_of_two_steps(kind: str, scheme: str, direct: bool) -> None:
    """direct: from float32; else from the output rounded to the activation dtype."""
    x, gamma, beta = arguments(kind, rows=32, dtype=torch.bfloat16)
    mean, rstd, _ = ops.norm_stats(x, gamma, beta, kind, 1e-5, False, False)
    fused = ops.norm_quantize(x, gamma, beta, mean, rstd, False, scheme + ":f32" * direct, None, None, True, True)
    y = ops.norm_apply(x, gamma, beta, mean, rstd, False, torch.float32 if direct else torch.bfloat16)
    assert all_same(fused, ops.quantize(y, scheme, None, None, True, True))


def test_fused_quantization_uses_a_given_scale() -> None:
    x, gamma, beta = arguments("LayerNorm")
    mean, rstd, _ = ops.norm_stats(x, gamma, beta, "LayerNorm", 1e-5, False, False)
    scale = torch.tensor([17.0])
    q = Buffers(*ops.norm_quantize(x, gamma, beta, mean, rstd, False, "e4m3:tensor:f32", scale, None, True, False))
    assert torch.equal(q.rowwise_scale_inv, 1 / scale)
    assert q.rowwise_amax == ops.norm_apply(x, gamma, beta, mean, rstd, False, torch.float32).abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_fakes_have_the_real_shapes(kind: str, rows: int) -> None:
    x, gamma, beta = arguments(kind, rows=rows)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fx, fg, fb = (None if v is None else mode.from_tensor(v) for v in (x, gamma, beta))
        fakes = [*ops.norm_stats(fx, fg, fb, kind, 1e-5, False, True)]
        fakes += [ops.norm_apply(fx, fg, fb, *fakes[:2], False, torch.bfloat16)]
        fakes += [*ops.norm_quantize(fx, fg, fb, *fakes[:2], False, "e4m3:1x128", None, None, True, True)]
        fakes += [*ops.norm_backward(fx, fx, fg, *fakes[:2], False, beta is not None)]
        fakes += [*ops.norm_add_stats(fx, fx, fg, fb, kind, 1e-5, False, False)]
        fakes += [*ops.norm_backward_add(fx, fx, fg, *fakes[:2], False, beta is not None, fx, True)]
    reals = [*ops.norm_stats(x, gamma, beta, kind, 1e-5, False, True)]
    reals += [ops.norm_apply(x, gamma, beta, *reals[:2], False, torch.bfloat16)]
    reals += [*ops.norm_quantize(x, gamma, beta, *reals[:2], False, "e4m3:1x128", None, None, True, True)]
    reals += [*ops.norm_backward(x, x, gamma, *reals[:2], False, beta is not None)]
    reals += [*ops.norm_add_stats(x, x, gamma, beta, kind, 1e-5, False, False)]
    reals += [*ops.norm_backward_add(x, x, gamma, *reals[:2], False, beta is not None, x, True)]
    assert [(r.shape, r.dtype) for r in reals] == [(f.shape, f.dtype) for f in fakes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_is_added_as_if_before_the_norm_and_its_gradient_after(kind: str, dtype: torch.dtype) -> None:
    x, gamma, beta = arguments(kind, dtype=dtype)
    residual, dy, other = (torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    settings = (gamma, beta, kind, 1e-5, True, True)
    total, *found = ops.norm_add_stats(x, residual, *settings)
    assert same(total, x + residual) and all_same(found, ops.norm_stats(x + residual, *settings))
    norm = (total, gamma, *found[:2], True, beta is not None)
    dx, *gains = ops.norm_backward(dy, *norm)
    for amax in (True, False):
        fused_dx, *fused = ops.norm_backward_add(dy, *norm, other, amax)
        assert same(fused_dx, dx + other) and all_same(fused[:2], gains)
        assert fused[2].tolist() == ([(dx + other).abs().max().item()] if amax else [])


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str) -> None:
    x, gamma, beta = arguments(kind)
    torch.library.opcheck(ops.norm_add_stats.default, (x, x.clone(), gamma, beta, kind, 1e-5, True, True))
    torch.library.opcheck(ops.norm_stats.default, (x, gamma, beta, kind, 1e-5, True, True))
    mean, rstd, _ = ops.norm_stats(x, gamma, beta, kind, 1e-5, True, False)
    torch.library.opcheck(ops.norm_apply.default, (x, gamma, beta, mean, rstd, True, torch.bfloat16))
    torch.library.opcheck(ops.norm_backward.default, (x, x, gamma, mean, rstd, True, beta is not None))
    torch.library.opcheck(ops.norm_backward_add.default, (x, x, gamma, mean, rstd, True, beta is not None, x, True))
    for scheme in ("e4m3:tensor:f32", "e4m3:1x128:pow2", "e4m3:1x32"):
        args = (x, gamma, beta, mean, rstd, True, scheme, None, None, True, True)
        torch.library.opcheck(ops.norm_quantize.default, args)


def test_a_constant_row_has_no_variance_and_stays_finite() -> None:
    x = torch.full((2, 64), 3.0)
    gamma, beta = torch.ones(64), torch.zeros(64)
    mean, rstd, _ = ops.norm_stats(x, gamma, beta, "LayerNorm", 1e-5, False, False)
    assert not ops.norm_apply(x, gamma, beta, mean, rstd, False, torch.float32).any()
    dx, dgamma, dbeta = ops.norm_backward(torch.randn(2, 64), x, gamma, mean, rstd, False, True)
    assert dx.isfinite().all() and not dgamma.any() and dbeta.isfinite().all()


def test_rows_do_not_depend_on_each_other() -> None:
    x, gamma, beta = arguments("LayerNorm", rows=33)

    def run(x: Tensor) -> Tensor:
        mean, rstd, _ = ops.norm_stats(x, gamma, beta, "LayerNorm", 1e-5, False, False)
        return ops.norm_apply(x, gamma, beta, mean, rstd, False, torch.float32)

    assert same(run(x)[5:9], run(x[5:9]))
