"""Modules on any number of tokens: 0, 1, odd; any strides; any leading dimensions."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ottava
from quant_cases import DETERMINISTIC, all_same, casting, gradients, relative, same

WIDTHS = st.sampled_from([32, 64, 96, 160])
TOKENS = st.sampled_from([0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 127, 129])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(
    tokens=TOKENS,
    width=WIDTHS,
    out=WIDTHS,
    scheme=st.sampled_from(DETERMINISTIC),
    dtype=DTYPES,
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_linear_on_any_number_of_tokens(
    tokens: int, width: int, out: int, scheme: str, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    module = ottava.Linear(width, out, params_dtype=dtype, device="cpu")
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    dy = torch.randn(tokens, out).to(dtype)
    with casting(scheme):
        y = module(x)
    y.backward(dy)
    assert y.shape == (tokens, out) and x.grad.shape == x.shape and y.dtype == x.grad.dtype == dtype
    if tokens == 0:
        assert not module.weight.grad.any() and not module.bias.grad.any()
        return
    want = x.detach().double() @ module.weight.detach().double().t()
    # FP8 of both operands: 3 bits each; the first step of delayed scaling has scale 1, which costs small weights some bits.
    bar = 0.01 if scheme == "none" else 0.08
    assert relative(y, want) < bar
    grad = dy.double().t() @ x.detach().double()
    assert relative(module.weight.grad, grad) < (0.01 if scheme == "none" else 0.15)


@given(tokens=TOKENS, scheme=st.sampled_from(DETERMINISTIC), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_layernorm_mlp_on_any_number_of_tokens(tokens: int, scheme: str, seed: int) -> None:
    torch.manual_seed(seed)
    module = ottava.LayerNormMLP(32, 64, activation="swiglu", device="cpu")
    x = torch.randn(tokens, 32, requires_grad=True)
    with casting(scheme):
        y = module(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad.isfinite().all()
    assert all(g is not None and g.isfinite().all() for g in gradients(module))


@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    scheme=st.sampled_from(DETERMINISTIC),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_leading_dimensions_and_strides_do_not_matter(
    shape: list[int], scheme: str, transposed: bool, seed: int
) -> None:
    transposed = (
        transposed and scheme != "none"
    )  # a BLAS may sum in another order for other strides; FP8 copies are contiguous
    results = []
    count = math.prod(shape)
    for flat in (True, False):
        torch.manual_seed(seed)
        module = ottava.Linear(32, 64, device="cpu")
        x = torch.randn(32, count).t() if transposed else torch.randn(count, 32)
        dy = torch.randn(count, 64)
        x, dy = (x.contiguous(), dy) if flat else (x.reshape(*shape, 32), dy.reshape(*shape, 64))
        x = x.detach().requires_grad_()
        with casting(scheme):
            y = module(x)
        y.backward(dy)
        results.append([y.reshape(count, 64), x.grad.reshape(count, 32), *gradients(module)])
    assert all_same(*results)


@given(
    tokens=st.integers(2, 40),
    where=st.integers(0, 39),
    scheme=st.sampled_from([s for s in DETERMINISTIC if s != "delayed"]),
)
@settings(max_examples=60)
def test_rows_with_scales_of_their_own_do_not_depend_on_other_rows(tokens: int, where: int, scheme: str) -> None:
    """Per-row scales (block, MXFP8) or none: a token's output is the same in any batch. Per-tensor scales share one."""
    if scheme == "current":
        scheme = "block"
    torch.manual_seed(0)
    module = ottava.Linear(64, 32, device="cpu")
    x = torch.randn(tokens, 64)
    other = torch.randn(tokens, 64) * 100
    other[where % tokens] = x[where % tokens]
    with torch.no_grad(), casting(scheme):
        assert same(module(x)[where % tokens], module(other)[where % tokens])
