"""FP8 attention on a GPU: bytes equal to the reference's, outputs near it, gradients near float64, and what runs where."""

import logging

import pytest
import torch

import ottava
from ottava import recipe
from ottava.attention import DotProductAttention, PackedDocuments, attention_backend
from ottava.kernels import attention_fp8 as fp8
from ottava.kernels import attention_fp8_triton as kernel
from ottava.nn.attention_documents import document_bounds, document_mask
from ottava.nn.transformer_layer import TransformerLayer
from ottava.notices import warn_once

OUT, GRAD = 0.07, 0.05  # against float64, as in tests/kernels/test_attention_fp8.py
# Against the reference, whose products are exact: one e4m3 step of a weight that is rounded the other way, seldom; 14 bits of sums.
NEAR = 6e-3

CASES = {
    "causal": (1000, 1000, 2, 8, 2, 128, True),
    "causal, d 64": (1000, 1000, 2, 8, 2, 64, True),
    "whole": (384, 700, 1, 4, 4, 128, False),
    "whole, d 64": (129, 127, 3, 4, 1, 64, False),
    "causal, fewer keys": (300, 130, 1, 4, 2, 64, True),
    "causal, more keys": (130, 300, 1, 4, 2, 128, True),
    "one token": (1, 1, 2, 4, 2, 128, True),
}


def inputs(queries, keys, batch, heads, groups, dim, batch_first=False, dtype=torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = []
    for length, each in ((queries, heads), (keys, groups), (keys, groups)):
        shape = (batch, length, each, dim) if batch_first else (length, batch, each, dim)
        made.append(torch.randn(shape, device="cuda", dtype=dtype).requires_grad_())
    return made


def exact(q, k, v, hidden, scale) -> torch.Tensor:
    """float64 of [s, b, h, d]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3)


def error(found, expected) -> float:
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def with_gradients(call, tensors) -> list[torch.Tensor]:
    out = call(*tensors)
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_bytes_and_scales_equal_the_reference(case: str, batch_first: bool, power_of_two: bool) -> None:
    tensors = [x.detach() for x in inputs(*CASES[case][:6], batch_first)]
    tensors[0][0, 0, 0, 0], tensors[1][0, 0, 0, 0] = float("nan"), 30.0
    found = kernel.operands(*tensors, batch_first, 448.0, 0.0, power_of_two)
    expected = fp8.operands(*(x.cpu() for x in tensors), batch_first, 448.0, 0.0, power_of_two)
    for name, a, b in zip(("q", "k", "v", "scale_inv"), found, expected, strict=True):
        assert torch.equal(a.cpu(), b), (name, int((a.cpu() != b).sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(CASES))
def test_output_is_near_the_reference_and_float64(case: str, dtype: torch.dtype) -> None:
    queries, keys, *_, dim, causal = CASES[case]
    tensors = inputs(*CASES[case][:6], dtype=dtype)
    scale = dim**-0.5
    plain = [x.detach() for x in tensors]
    options = (None, None, scale, causal, False, 448.0, 0.0, False)
    out, sums = torch.ops.ottava.fp8_attention(*plain, *options)
    wanted, wanted_sums = fp8._fp8_attention(*(x.float() for x in plain), *options)
    assert error(out, wanted) < NEAR
    torch.testing.assert_close(sums, wanted_sums, rtol=1e-3, atol=2e-3)
    hidden = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(1) if causal else None
    assert error(out, exact(*(x.double() for x in plain), hidden, scale)) < OUT


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("case", [name for name in CASES if name != "one token"])
def test_gradients_are_near_float64_and_near_the_reference(case: str, batch_first: bool) -> None:
    queries, keys, *_, dim, causal = CASES[case]
    tensors = inputs(*CASES[case][:6], batch_first)
    scale = dim**-0.5
    order = (lambda x: x.transpose(0, 1)) if batch_first else (lambda x: x)

    def attend(q, k, v) -> torch.Tensor:
        return order(fp8.fp8_attention(q, k, v, scale=scale, causal=causal, batch_first=batch_first))

    got = with_gradients(attend, tensors)
    hidden = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(1) if causal else None
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    want = with_gradients(lambda q, k, v: exact(order(q), order(k), order(v), hidden, scale), doubles)
    for name, a, b in zip("qkv", got[1:], want[1:], strict=True):
        assert error(a, b) < GRAD, (name, error(a, b))
    with torch.no_grad():
        out, sums = torch.ops.ottava.fp8_attention(*tensors, None, None, scale, causal, batch_first, 448.0, 0.0, False)
        torch.manual_seed(1)
        grad = order(torch.randn(order(out).shape, device="cuda", dtype=torch.bfloat16))
        reference = fp8._fp8_attention_backward(grad, *tensors, out, sums, None, None, scale, causal, batch_first)
    for name, a, b in zip("qkv", got[1:], reference, strict=True):
        assert error(a, b) < 1e-2, (name, error(a, b))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [[[1, 128, 171]], [[300], [1, 1, 63, 235], [129, 171]]], ids=["1 row", "3 rows"])
def test_packed_documents(dim: int, rows: list[list[int]]) -> None:
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows])
    tensors = inputs(300, 300, len(rows), 8, 2, dim)
    attend = DotProductAttention(8, dim, 2, attn_mask_type="arbitrary")
    with ottava.autocast(recipe=recipe.Float8CurrentScaling(fp8_dpa=True)), attention_backend("fp8"):
        got = with_gradients(lambda *qkv: attend(*qkv, attention_mask=PackedDocuments(documents, "cuda")), tensors)
    bounds = tuple(x.cuda() for x in document_bounds(documents))
    plain = [x.detach() for x in tensors]
    assert torch.equal(
        got[0], fp8.fp8_attention(*plain, scale=dim**-0.5, causal=True, batch_first=False, bounds=bounds).flatten(-2)
    )
    options = (*bounds, dim**-0.5, True, False, 448.0, 0.0, False)
    wanted, _ = fp8._fp8_attention(*(x.float() for x in plain), *options)
    assert error(got[0], wanted.flatten(-2)) < NEAR
    hidden = document_mask(documents.cuda())
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    want = with_gradients(lambda q, k, v: exact(q, k, v, hidden, dim**-0.5).flatten(-2), doubles)
    for name, bar, a, b in zip(("out", *"qkv"), (OUT, GRAD, GRAD, GRAD), got, want, strict=True):
        assert error(a, b) < bar, (name, error(a, b))


@pytest.mark.parametrize("dim", [64, 128])
def test_thd_by_cumulative_lengths_ignores_what_lies_after_them(dim: int) -> None:
    tensors = [x[:, 0].detach() for x in inputs(300, 300, 1, 8, 2, dim)]
    for x in tensors:
        x[280:] = 1e4
    offsets = torch.tensor([0, 100, 100, 280], device="cuda", dtype=torch.int32)
    attend = DotProductAttention(8, dim, 2, qkv_format="thd", attn_mask_type="padding_causal")
    plain = attend(*tensors, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=200, max_seqlen_kv=200)
    with ottava.autocast(recipe=recipe.DelayedScaling(fp8_dpa=True)), attention_backend("fp8"):
        out = attend(*tensors, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=200, max_seqlen_kv=200)
    assert 0.01 < error(out, plain) < OUT and not out[280:].any()


@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows_lose_nothing_to_the_accumulators(dim: int) -> None:
    """8,192 keys: the sums of the matrix units have 14 bits, and may not be added up in them."""
    tensors = [x.detach() for x in inputs(8192, 8192, 1, 2, 1, dim)]
    tensors[2] = tensors[2].abs()  # all of one sign: an error of the sum shows
    out = fp8.fp8_attention(*tensors, scale=dim**-0.5, causal=True, batch_first=False)
    hidden = torch.ones(8192, 8192, dtype=torch.bool, device="cuda").triu(1)
    want = exact(*(x.double() for x in tensors), hidden, dim**-0.5)
    assert error(out, want) < 0.01


def test_a_layer_trains_in_fp8_close_to_one_whose_attention_is_not() -> None:
    def run(asked: recipe.Recipe) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = TransformerLayer(
            512, 1024, 8, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
            self_attn_mask_type="causal",
        )  # fmt: skip
        torch.manual_seed(1)
        x = torch.randn(512, 2, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with ottava.autocast(recipe=asked), attention_backend("fp8"):
            out = layer(x)
        out.float().square().mean().backward()
        return [out, x.grad]

    with_, without = run(recipe.Float8CurrentScaling(fp8_dpa=True)), run(recipe.Float8CurrentScaling())
    assert 0 < error(with_[0], without[0]) < 0.05
    assert 0 < error(with_[1], without[1]) < 0.1


def test_what_does_not_run_is_named(caplog) -> None:
    warn_once.cache_clear()
    attend = DotProductAttention(4, 32, 2)
    tensors = inputs(64, 64, 1, 4, 2, 32)
    with caplog.at_level(logging.WARNING, "ottava"), ottava.autocast(recipe=recipe.DelayedScaling(fp8_dpa=True)):
        attend(*tensors)
        attend(*tensors)
    assert ["its kernel takes heads of 64 or 128 channels, not 32" in r.message for r in caplog.records] == [True]


def test_a_captured_graph_replays_it() -> None:
    tensors = [x.detach() for x in inputs(256, 256, 1, 4, 2, 64)]

    def attend() -> torch.Tensor:
        return fp8.fp8_attention(*tensors, scale=0.125, causal=True, batch_first=False)

    expected = attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    tensors[2].mul_(2)
    graph.replay()
    assert torch.equal(out, attend())


def test_nothing_waits_for_the_device() -> None:
    tensors = inputs(256, 256, 1, 4, 2, 64)
    attend = DotProductAttention(4, 64, 2)
    with ottava.autocast(recipe=recipe.Float8CurrentScaling(fp8_dpa=True)), attention_backend("fp8"):
        attend(*tensors).sum().backward()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            attend(*tensors).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
