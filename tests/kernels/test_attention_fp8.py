"""FP8 attention: its reference against float64, its arithmetic where that is exact, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ottava.kernels import attention_fp8 as fp8
from ottava.kernels.attention_backend import FP8_FASTER_FROM, attention_backend, fp8_is_slower
from ottava.nn.attention_documents import document_bounds, document_mask

# Relative Frobenius errors for normal numbers: what is averaged has 4 significant bits, the average is small. docs/numerics.md
OUT, GRAD = 0.07, 0.05


def inputs(
    queries: int, keys: int, batch: int, heads: int, groups: int, dim: int, dtype=torch.bfloat16
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(queries, batch, heads, dim), (keys, batch, groups, dim), (keys, batch, groups, dim)]
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def exact(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """float64, [s, b, h, d]. hidden: what broadcasts to [b, h, s, t], True where nothing is seen."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


CASES = {
    "causal, two blocks": (200, 200, 2, 4, 2, 64, True, None),
    "whole, odd keys": (130, 257, 1, 2, 2, 64, False, None),
    "causal, fewer keys": (150, 70, 1, 4, 1, 128, True, None),
    "one token": (1, 1, 1, 2, 1, 64, True, None),
    "documents": (300, 300, 2, 4, 2, 64, True, [[1, 128, 171], [129, 71, 100]]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_output_and_gradients_are_near_those_of_float64(case: str) -> None:
    queries, keys, batch, heads, groups, dim, causal, lengths = CASES[case]
    tensors = inputs(queries, keys, batch, heads, groups, dim)
    bounds, hidden = None, None
    if lengths is not None:
        documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths])
        bounds, hidden = document_bounds(documents), document_mask(documents)
    elif causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    out = fp8.fp8_attention(*tensors, scale=dim**-0.5, causal=causal, batch_first=False, bounds=bounds)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    expected = exact(*doubles, hidden)
    assert out.dtype is torch.bfloat16 and error(out, expected) < OUT
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = torch.autograd.grad(expected, doubles, grad.double())
    for name, a, b in zip("qkv", torch.autograd.grad(out, tensors, grad), wanted, strict=True):
        if case == "one token" and name != "v":
            assert a.abs().max() < 0.5  # exactly 0 where nothing is rounded: the weight is 1 whatever the score
        else:
            assert error(a, b) < GRAD, name


def test_batch_first_is_the_same_arithmetic() -> None:
    tensors = [x.detach() for x in inputs(140, 140, 2, 4, 2, 32)]
    first = fp8.fp8_attention(*tensors, scale=0.2, causal=True, batch_first=False)
    other = fp8.fp8_attention(*(x.transpose(0, 1) for x in tensors), scale=0.2, causal=True, batch_first=True)
    assert torch.equal(first, other.transpose(0, 1))


def test_alone_in_its_document_a_token_gets_its_quantized_value() -> None:
    q, k, v = (x.detach() for x in inputs(140, 140, 1, 4, 2, 32))
    bounds = document_bounds(torch.arange(140)[None])
    out = fp8.fp8_attention(q, k, v, scale=0.2, causal=True, batch_first=False, bounds=bounds)
    data, inverse = fp8.quantized(v, 448.0, 0.0, False)
    assert torch.equal(out, (data.float() * inverse).bfloat16().repeat_interleave(2, dim=2))


def test_sums_are_those_of_the_quantized_queries_and_keys() -> None:
    q, k, v = (x.detach() for x in inputs(200, 200, 1, 2, 1, 64))
    _, sums = torch.ops.ottava.fp8_attention(q, k, v, None, None, 0.125, True, False, 448.0, 0.0, False)
    (fq, iq), (fk, ik) = (fp8.quantized(x, 448.0, 0.0, False) for x in (q, k))
    dq, dk = (fq.double() * iq.double())[:, 0].transpose(0, 1), (fk.double() * ik.double())[:, 0].transpose(0, 1)
    scores = dq @ dk.transpose(-1, -2) * 0.125
    wanted = scores.masked_fill(torch.ones(200, 200, dtype=torch.bool).triu(1), -math.inf).logsumexp(-1)
    torch.testing.assert_close(sums[0].double(), wanted, rtol=1e-5, atol=1e-5)


def test_weights_of_numbers_that_are_nearly_zero_are_all_the_same() -> None:
    """The product of two scales underflows; scores are 0, and nothing is NaN."""
    q, k, v = (x.detach().float() for x in inputs(130, 130, 1, 2, 1, 32))
    out = fp8.fp8_attention(q * 1e-25, k * 1e-25, v, scale=0.2, causal=True, batch_first=False)
    mean = v.cumsum(0) / torch.arange(1, 131)[:, None, None, None]
    assert error(out, mean.repeat_interleave(2, dim=2).double()) < OUT


def test_a_nan_stays_where_it_is_seen() -> None:
    q, k, v = (x.detach().clone() for x in inputs(20, 20, 1, 2, 1, 32))
    q[7, 0, 1, 3] = math.nan
    out = fp8.fp8_attention(q, k, v, scale=0.2, causal=True, batch_first=False)
    assert out[7, 0, 1].isnan().all() and out.isnan().sum() == 32


def test_scales_follow_the_recipe() -> None:
    x = torch.tensor([1.0, -3.0, 0.5])
    assert fp8.quantized(x, 448.0, 0.0, False)[1].item() == pytest.approx(3 / 448)
    assert fp8.quantized(x, 448.0, 0.0, True)[1].item() == 2.0**-7  # 149.33 rounded down to a power of two
    assert fp8.quantized(x, 224.0, 0.0, False)[1].item() == pytest.approx(3 / 224)  # a margin of 1
    assert fp8.quantized(x, 448.0, 6.0, False)[1].item() == pytest.approx(6 / 448)


def test_operands_lie_as_the_kernel_reads_them() -> None:
    q, k, v = (x.detach() for x in inputs(130, 20, 2, 4, 2, 32))
    q_bytes, k_bytes, v_bytes, inverse = fp8.operands(q, k, v, False, 448.0, 0.0, False)
    assert q_bytes.shape == (2, 4, 256, 32) and k_bytes.shape == (2, 2, 128, 32) and v_bytes.shape == (2, 2, 32, 128)
    data, of_v = fp8.quantized(v, 448.0, 0.0, False)
    assert torch.equal(v_bytes[1, 0, :, :20], data.view(torch.uint8)[:, 1, 0].t()) and inverse[2] == of_v
    assert not q_bytes[:, :, 130:].any() and not k_bytes[:, :, 20:].any() and not v_bytes[..., 20:].any()


def test_ops_pass_torch_opcheck() -> None:
    q, k, v = inputs(20, 20, 1, 2, 1, 16, torch.float32)
    bounds = document_bounds(torch.repeat_interleave(torch.arange(2), 10)[None])
    args = (q, k, v, *bounds, 0.25, True, False, 448.0, 0.0, False)
    torch.library.opcheck(torch.ops.ottava.fp8_attention.default, args)
    out, sums = torch.ops.ottava.fp8_attention(*args)
    kept = [x.detach() for x in (torch.ones_like(out), q, k, v, out, sums)]
    torch.library.opcheck(torch.ops.ottava.fp8_attention_backward.default, (*kept, *bounds, 0.25, True, False))


def test_what_was_measured_decides_and_can_be_overridden(monkeypatch) -> None:
    monkeypatch.setitem(FP8_FASTER_FROM, ("dense", 128), 4096)
    monkeypatch.setitem(FP8_FASTER_FROM, ("packed", 128), None)
    monkeypatch.delitem(FP8_FASTER_FROM, ("dense", 64), raising=False)
    assert fp8_is_slower("dense", 128, 4096) is None
    assert "is no faster in FP8 below 4096 queries" in fp8_is_slower("dense", 128, 4095)
    assert "at any size" in fp8_is_slower("packed", 128, 10**6)
    assert "has not been measured to be faster" in fp8_is_slower("dense", 64, 10**6)
    with attention_backend("fp8"):
        assert fp8_is_slower("packed", 128, 1) is None
    with attention_backend("cudnn"):
        assert "attention_backend('cudnn') is in force" in fp8_is_slower("dense", 128, 4096)
