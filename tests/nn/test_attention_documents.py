"""Packed documents: the same attention as a dense mask gives, and no wait for a device."""

import math

import pytest
import torch

from ottava.attention import (
    DotProductAttention,
    MultiheadAttention,
    PackedDocuments,
    RotaryPositionEmbedding,
    attention_backend,
)
from ottava.kernels.attention_documents import document_attention
from ottava.models import Llama, LlamaConfig
from ottava.nn.attention_documents import document_bounds, document_mask
from ottava.nn.transformer_layer import TransformerLayer

PACKINGS = {
    "several": [[5, 1, 6], [3, 3, 6]],
    "of one token": [[1] * 12, [11, 1]],
    "one": [[12], [12]],
    "one row": [[4, 8]],
}


def numbers(lengths: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


def inputs(batch: int, length: int = 12, heads: int = 4, groups: int = 2, dim: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(7)
    shapes = [(length, batch, n, dim) for n in (heads, groups, groups)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def with_gradients(call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    out = call(*tensors)
    grad = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad(out, tensors, grad)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_packed_documents_are_the_dense_mask_bit_for_bit(packing: str, layout: str) -> None:
    documents = numbers(PACKINGS[packing])
    module = DotProductAttention(4, 8, 2, attn_mask_type="arbitrary", qkv_format=layout)
    tensors = inputs(documents.shape[0])
    if layout == "bshd":
        tensors = [x.detach().transpose(0, 1).contiguous().requires_grad_() for x in tensors]
    packed = PackedDocuments(documents)
    got = with_gradients(lambda q, k, v: module(q, k, v, attention_mask=packed), tensors)
    want = with_gradients(lambda q, k, v: module(q, k, v, attention_mask=document_mask(documents)), tensors)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_by_bounds_is_each_document_by_itself(packing: str, batch_first: bool) -> None:
    lengths = PACKINGS[packing]
    tensors = inputs(len(lengths))
    starts, ends = document_bounds(numbers(lengths))

    def by_bounds(*qkv: torch.Tensor) -> torch.Tensor:
        turned = [x.transpose(0, 1) for x in qkv] if batch_first else qkv
        out = document_attention(*turned, starts, ends, scale=1 / math.sqrt(8), batch_first=batch_first)
        return out.transpose(0, 1) if batch_first else out

    def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        module = DotProductAttention(4, 8, 2, attn_mask_type="causal")
        rows = []
        for i, row in enumerate(lengths):
            parts = [x[:, i : i + 1].split(row) for x in (q, k, v)]
            rows.append(torch.cat([module(*part) for part in zip(*parts, strict=True)]))
        return torch.cat(rows, dim=1).unflatten(-1, (4, 8))

    got, want = with_gradients(by_bounds, tensors), with_gradients(one_by_one, tensors)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bounds_and_cumulative_lengths_say_the_same() -> None:
    documents = numbers([[5, 1, 6], [12, 0, 0]])
    packed = PackedDocuments(documents)
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [0, 5, 6, 12, 24]
    assert packed.cu_seqlens.dtype is torch.int32
    assert packed.longest == 12
    starts, ends = packed.bounds()
    assert starts.tolist() == [[0] * 5 + [5] + [6] * 6, [0] * 12]
    assert ends.tolist() == [[5] * 5 + [6] + [12] * 6, [12] * 12]
    assert packed.bounds()[0] is starts
    backwards = PackedDocuments(9 - documents)  # the numbers need no order, if each stays in one place
    assert torch.equal(backwards.cu_seqlens, packed.cu_seqlens)


def test_lengths_are_not_asked_for_where_that_would_wait() -> None:
    """On the meta device, as on a GPU, values cannot be looked at: shapes alone must do."""
    packed = PackedDocuments(numbers([[5, 7]]).to("meta"))
    assert packed.cu_seqlens is None
    assert packed.longest is None
    assert [bound.shape for bound in packed.bounds()] == [(1, 12), (1, 12)]


def test_layers_share_one_mask() -> None:
    """The dense mask of the reference is made once for all layers, not once for each."""
    packed = PackedDocuments(numbers([[5, 7]]))
    assert packed.allowed is packed.allowed
    model = Llama(LlamaConfig(vocab_size=64, hidden_size=32, ffn_hidden_size=64, layers=2, heads=4, kv_heads=2), "cpu")
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    tokens = torch.randint(64, (1, 12))
    by_object = model(tokens, documents=packed)
    assert all(mask is packed for mask in seen)
    assert torch.equal(by_object, model(tokens, documents=packed.documents))


def test_rows_that_lie_together_give_the_same_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does for kernels that go by cumulative lengths: attention with the batch first, inside of a layer without."""
    torch.manual_seed(3)
    block = MultiheadAttention(32, 4, num_gqa_groups=2, attention_dropout=0.0, qk_norm_type="RMSNorm", device="cpu")
    x = torch.randn(12, 2, 32, requires_grad=True)
    options = {"attention_mask": PackedDocuments(numbers(PACKINGS["several"])), "attn_mask_type": "arbitrary"}
    options["rotary_pos_emb"] = RotaryPositionEmbedding(8, device="cpu")(12)
    results = []
    for layout in ("sbhd", "bshd"):
        monkeypatch.setattr(block, "_core_layout", lambda *_, layout=layout: layout)
        out = block(x, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_compiled_layer_takes_packed_documents() -> None:
    layer = TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="sbhd", device="cpu"
    )
    x = torch.randn(12, 2, 32)
    packed = PackedDocuments(numbers([[5, 1, 6], [3, 3, 6]]))
    eager = layer(x, packed, self_attn_mask_type="arbitrary")
    compiled = torch.compile(layer, backend="aot_eager")(x, packed, self_attn_mask_type="arbitrary")
    torch.testing.assert_close(compiled, eager)


def test_mistakes_are_explained() -> None:
    module, tensors = DotProductAttention(4, 8, 2), inputs(1)
    packed = PackedDocuments(numbers([[5, 7]]))
    with pytest.raises(ValueError, match="attn_mask_type 'arbitrary'"):
        module(*tensors, attention_mask=packed)
    with pytest.raises(ValueError, match="1 rows of 12 tokens does not fit 2 rows"):
        module(*inputs(2), attention_mask=packed, attn_mask_type="arbitrary")
    with pytest.raises(ValueError, match="comes back"):
        PackedDocuments(torch.tensor([[0, 1, 0]]))
    with pytest.raises(ValueError, match="integers"):
        PackedDocuments(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="one of auto, cudnn"), attention_backend("flash3"):
        pass
