"""Attention kernels on a GPU: every one against float64, packed documents without an [s, s] tensor and without waiting for the device."""

import logging
import math

import pytest
import torch

from ottava.attention import DotProductAttention, PackedDocuments, RotaryPositionEmbedding, attention_backend
from ottava.kernels import attention_backend as backends
from ottava.kernels import rope
from ottava.nn.attention_documents import document_mask
from ottava.nn.rotary import split_qkv_rope
from ottava.nn.transformer_layer import TransformerLayer

needs_flash4 = pytest.mark.skipif(backends.flash4() is None, reason="flash-attn-4 is not installed")
PACKED = ["flash", "triton", pytest.param("flash4", marks=needs_flash4)]
OUT, GRAD = 5e-3, 1e-2  # relative Frobenius errors of unquantized modules, docs/numerics.md


def numbers(lengths: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


def cut(length: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths of documents that fill a row, drawn around `mean`, one of them a single token."""
    draw, left, lengths = torch.Generator().manual_seed(seed), length - 1, [1]
    while left > 0:
        some = min(left, 1 + int(torch.empty(1).exponential_(1 / mean, generator=draw)))
        lengths.append(some)
        left -= some
    return lengths


def inputs(length: int, batch: int, heads: int, groups: int, dim: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = [(length, batch, n, dim) for n in (heads, groups, groups)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]


def with_gradients(call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    out = call(*tensors)
    torch.manual_seed(2)
    grad = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def float64(tensors: list[torch.Tensor], allowed: torch.Tensor) -> list[torch.Tensor]:
    """[s, b, h * d] and gradients. allowed: [b or 1, 1, s, t]."""
    doubles = [x.detach().double().requires_grad_() for x in tensors]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return (weights @ v).permute(2, 0, 1, 3).flatten(-2)

    return with_gradients(call, doubles)


def compare(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for what, a, b, bar in zip(("out", "dq", "dk", "dv"), got, want, (OUT, GRAD, GRAD, GRAD), strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < bar, (what, float(error))


@pytest.mark.parametrize("backend", PACKED)
@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize("rows", [[[1, 128, 171]], [[300], [1, 1, 63, 235], [129, 171]]], ids=["1 row", "3 rows"])
def test_packed_documents_against_float64(backend: str, dim: int, rows: list[list[int]]) -> None:
    documents = numbers(rows)
    tensors = inputs(300, len(rows), 8, 2, dim)
    module = DotProductAttention(8, dim, 2, attn_mask_type="arbitrary")
    packed = PackedDocuments(documents, "cuda")
    with attention_backend(backend):
        got = with_gradients(lambda *qkv: module(*qkv, attention_mask=packed), tensors)
    compare(got, float64(tensors, ~document_mask(documents.cuda())))


@pytest.mark.parametrize("backend", PACKED)
def test_documents_of_one_token_are_their_values(backend: str) -> None:
    q, k, v = inputs(200, 2, 8, 2, 64)
    module = DotProductAttention(8, 64, 2, attn_mask_type="arbitrary")
    packed = PackedDocuments(torch.arange(200).expand(2, 200).contiguous(), "cuda")
    with attention_backend(backend):
        out, dq, dk, dv = with_gradients(lambda *qkv: module(*qkv, attention_mask=packed), [q, k, v])
    assert torch.equal(out, v.detach().repeat_interleave(4, dim=2).flatten(-2))
    torch.manual_seed(2)
    grad = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16).double().unflatten(-1, (2, 4, 64)).sum(-2)
    assert (dv.double() - grad).norm() < GRAD * grad.norm()
    assert max(dq.abs().max(), dk.abs().max()) < 0.1  # a weight of 1 whatever the score is; what is left is rounding


@pytest.mark.parametrize("backend", PACKED)
@pytest.mark.parametrize(("batch", "length", "dim"), [(1, 8192, 128), (2, 4096, 64)])
def test_long_packed_documents_against_the_dense_mask(backend: str, batch: int, length: int, dim: int) -> None:
    documents = numbers_of_equal_count(batch, length)
    tensors = inputs(length, batch, 8, 2, dim)
    module = DotProductAttention(8, dim, 2, attn_mask_type="arbitrary")
    with attention_backend(backend):
        packed = PackedDocuments(documents, "cuda")
        got = with_gradients(lambda *qkv: module(*qkv, attention_mask=packed), tensors)
    mask = document_mask(documents.cuda())
    compare(got, with_gradients(lambda *qkv: module(*qkv, attention_mask=mask), tensors))


def numbers_of_equal_count(batch: int, length: int) -> torch.Tensor:
    rows = []
    for i in range(batch):
        lengths = torch.tensor(cut(length, 1000, i))
        rows.append(torch.repeat_interleave(torch.arange(len(lengths)), lengths))
    return torch.stack(rows)


@pytest.mark.parametrize("backend", PACKED)
def test_no_tensor_has_the_size_of_a_mask(backend: str) -> None:
    length = 16384  # a bool mask: 256 MiB
    tensors = inputs(length, 1, 4, 2, 64)
    module = DotProductAttention(4, 64, 2, attn_mask_type="arbitrary")
    packed = PackedDocuments(numbers_of_equal_count(1, length), "cuda")
    with attention_backend(backend):
        with_gradients(lambda *qkv: module(*qkv, attention_mask=packed), tensors)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with_gradients(lambda *qkv: module(*qkv, attention_mask=packed), tensors)
    assert torch.cuda.max_memory_allocated() - before < 160 * 2**20


@pytest.mark.parametrize("backend", PACKED)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_layer_with_documents_never_waits_for_the_gpu(backend: str, where: str) -> None:
    layer = TransformerLayer(
        512, 1024, 8, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="sbhd",
        params_dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    x = torch.randn(256, 2, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    documents = numbers([[100, 1, 155], [256, 0, 0]]).to(where)
    grad = torch.randn_like(x)

    def step() -> None:
        packed = PackedDocuments(documents, "cuda")
        layer(x, packed, self_attn_mask_type="arbitrary").backward(grad)

    with attention_backend(backend):
        for _ in range(3):  # kernels are compiled
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backend", PACKED)
def test_a_layer_with_documents_is_the_layer_with_a_dense_mask(backend: str, batch: int) -> None:
    torch.manual_seed(4)
    layer = TransformerLayer(
        512, 1024, 8, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="sbhd",
        fuse_qkv_params=True, params_dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    x = torch.randn(300, batch, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    documents = numbers([[300], [1, 1, 63, 235], [129, 171]][:batch])
    angles = RotaryPositionEmbedding(64, device="cuda")(300)
    results = []
    for mask in (PackedDocuments(documents, "cuda"), document_mask(documents.cuda())):
        with attention_backend(backend):
            out = layer(x, mask, self_attn_mask_type="arbitrary", rotary_pos_emb=angles)
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])])
    for got, want in zip(*results, strict=True):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < (OUT if got.shape == x.shape else GRAD), (tuple(got.shape), float(error))


def test_a_captured_graph_serves_other_documents() -> None:
    q, k, v = (x.detach() for x in inputs(256, 2, 4, 2, 64))
    module = DotProductAttention(4, 64, 2, attn_mask_type="arbitrary")
    documents = numbers([[100, 1, 155], [256, 0, 0]]).cuda()
    call = lambda: module(q, k, v, attention_mask=PackedDocuments(documents))  # noqa: E731
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        documents.copy_(numbers([[1, 200, 55], [10, 20, 226]]))
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.parametrize("backend", ["flash", pytest.param("flash4", marks=needs_flash4)])
@pytest.mark.parametrize("mask", ["padding_causal", "padding"])
def test_thd_by_cumulative_lengths_and_zero_after_the_last(backend: str, mask: str) -> None:
    lengths, tokens = [100, 1, 0, 155], 300  # 44 tokens belong to no sequence
    cu = torch.tensor([0, 100, 101, 101, 256], dtype=torch.int32, device="cuda")
    tensors = [x.detach()[:, 0].clone().requires_grad_() for x in inputs(tokens, 1, 8, 2, 64)]
    module = DotProductAttention(8, 64, 2, qkv_format="thd", attn_mask_type=mask)
    with attention_backend(backend):
        call = lambda *qkv: module(*qkv, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=155, max_seqlen_kv=155)  # noqa: E731
        got = with_gradients(call, tensors)
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).cuda()
    row = torch.arange(256, device="cuda")
    seen = document[:, None] == document[None, :]
    if mask == "padding_causal":
        seen = seen & (row[:, None] >= row[None, :])
    for x in got:
        assert not x[256:].any()
    doubles = [x.detach()[:256, None] for x in tensors]
    want = float64_of(doubles, seen[None, None], got[0].shape)
    compare([x[:256].reshape(256, -1) for x in got], [x.reshape(256, -1) for x in want])


def float64_of(tensors: list[torch.Tensor], allowed: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    """`float64`, with the first rows of the gradient that `with_gradients` draws for `shape`."""
    torch.manual_seed(2)
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)[: tensors[0].shape[0]].double()[:, None]
    doubles = [x.double().requires_grad_() for x in tensors]
    q, k, v = (x.permute(1, 2, 0, 3) for x in doubles)
    k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
    weights = (q @ k.transpose(-1, -2) / 8).masked_fill(~allowed, -math.inf).softmax(-1)
    out = (weights @ v).permute(2, 0, 1, 3).flatten(-2)
    return [out.detach(), *torch.autograd.grad(out, doubles, grad)]


@pytest.mark.parametrize("backend", ["cudnn", "flash", pytest.param("flash4", marks=needs_flash4)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_dense_attention_against_float64(backend: str, dim: int, batch: int, causal: bool) -> None:
    tensors = inputs(384, batch, 8, 2, dim)
    module = DotProductAttention(8, dim, 2, attn_mask_type="causal" if causal else "no_mask")
    with attention_backend(backend):
        got = with_gradients(module, tensors)
    row = torch.arange(384, device="cuda")
    allowed = (row[:, None] >= row) if causal else torch.ones(384, 384, dtype=torch.bool, device="cuda")
    compare(got, float64(tensors, allowed[None, None]))


def test_one_line_says_which_attention_runs(caplog: pytest.LogCaptureFixture) -> None:
    backends.say_once.cache_clear()
    module = DotProductAttention(8, 64, 2)
    with caplog.at_level(logging.INFO, logger="ottava"):
        for _ in range(2):
            module(*inputs(64, 1, 8, 2, 64))
    assert [r.message for r in caplog.records if "channels uses" in r.message] == [
        "ottava: attention with heads of 64 channels uses cudnn."
    ]


def test_layers_share_one_table_of_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    tables = rope.tables
    monkeypatch.setattr(rope, "tables", lambda angles: made.append(angles.shape) or tables(angles))
    angles = RotaryPositionEmbedding(64, device="cuda")(96)
    x = torch.randn(96, 2, 6 * 64, device="cuda", dtype=torch.bfloat16)
    first = split_qkv_rope(x, 4, 1, by_group=True, freqs=(angles, angles))
    for _ in range(3):
        again = split_qkv_rope(x, 4, 1, by_group=True, freqs=(angles, angles))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(made) == 1
    angles.mul_(2)  # written to: the old table is not used again
    assert not torch.equal(split_qkv_rope(x, 4, 1, by_group=True, freqs=(angles, angles))[0], first[0])
    assert len(made) == 2
    half = split_qkv_rope(x, 4, 1, by_group=True, freqs=(angles / 2, angles / 2))
    assert all(torch.equal(a, b) for a, b in zip(first, half, strict=True))
