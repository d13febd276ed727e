"""MultiheadAttention against float64 attention built from its own parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import layer_reference as ref
from ottava.nn.multi_head_attention import MultiheadAttention
from ottava.nn.qk_norm import L2Normalization
from ottava.nn.rotary import RotaryPositionEmbedding

S, B, HIDDEN, HEADS = 10, 2, 32, 4


def make(**kwargs) -> MultiheadAttention:
    module = MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, device="cpu", **kwargs)
    ref.randomize(module)
    return module


def heads_of(mixed: Tensor, groups: int, by_group: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, (h + 2g) d] -> q, k, v [s, b, heads, d]."""
    d, share = HIDDEN // HEADS, HEADS // groups
    if by_group:
        x = mixed.view(*mixed.shape[:-1], groups, share + 2, d)
        return x[..., :share, :].flatten(-3, -2), x[..., share, :], x[..., share + 1, :]
    sizes = [HEADS * d, groups * d, groups * d]
    return tuple(x.unflatten(-1, (-1, d)) for x in mixed.split(sizes, -1))


def check(module: MultiheadAttention, out: Tensor, expected: Tensor, x: Tensor, x64: Tensor, weights) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-3, atol=1e-4)
    ref.assert_same_gradients(module, weights)


@pytest.mark.parametrize("fused,by_group", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("norm", [None, "LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("rope", [None, "halves", "interleaved"])
def test_self_attention(fused: bool, by_group: bool, groups: int, norm: str | None, rope: str | None) -> None:
    module = make(
        fuse_qkv_params=fused, qkv_weight_interleaved=by_group, num_gqa_groups=groups, input_layernorm=norm is not None,
        normalization=norm or "LayerNorm", rotary_pos_interleaved=rope == "interleaved",
    )  # fmt: skip
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    freqs = RotaryPositionEmbedding(8, interleaved=rope == "interleaved", device="cpu")(S) if rope else None
    out = module(x, rotary_pos_emb=freqs)
    w, x64 = ref.doubles(module), x.detach().double().requires_grad_()
    h = x64
    prefix = "qkv."
    if norm:
        prefix = "layernorm_qkv."
        h = ref.norm(h, w, prefix, norm, names=("layer_norm_weight", "layer_norm_bias"))
    q, k, v = heads_of(ref.linear(h, w, prefix), groups, fused and by_group)
    if rope:
        q, k = ref.rotate(q, rope == "interleaved"), ref.rotate(k, rope == "interleaved")
    expected = ref.linear(ref.attend(q, k, v, ref.causal(S)), w, "proj.")
    check(module, out, expected, x, x64, w)


@pytest.mark.parametrize("fused,by_group", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("norm", [False, True])
def test_cross_attention(fused: bool, by_group: bool, norm: bool) -> None:
    module = make(
        attention_type="cross", fuse_qkv_params=fused, qkv_weight_interleaved=by_group, num_gqa_groups=2, input_layernorm=norm,
        attn_mask_type="no_mask",
    )  # fmt: skip
    x, encoded = torch.randn(S, B, HIDDEN, requires_grad=True), torch.randn(7, B, HIDDEN)
    freqs = (RotaryPositionEmbedding(8, device="cpu")(S), RotaryPositionEmbedding(8, device="cpu")(7))
    out = module(x, encoder_output=encoded, rotary_pos_emb=freqs)
    w, x64 = ref.doubles(module), x.detach().double().requires_grad_()
    h, prefix = x64, "query_layer."
    if norm:
        prefix = "layernorm_query."
        h = ref.norm(h, w, prefix, names=("layer_norm_weight", "layer_norm_bias"))
    q = ref.linear(h, w, prefix).unflatten(-1, (HEADS, 8))
    kv = ref.linear(encoded.double(), w, "key_value.")
    if fused and by_group:
        k, v = kv.unflatten(-1, (2, 2, 8)).unbind(-2)
    else:
        k, v = kv.unflatten(-1, (2, 2, 8)).unbind(-3)
    context = ref.attend(ref.rotate(q), ref.rotate(k), v, torch.zeros(S, 7, dtype=torch.bool))
    check(module, out, ref.linear(context, w, "proj."), x, x64, w)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("before", [False, True])
def test_norm_of_queries_and_keys(kind: str, before: bool) -> None:
    module = make(qk_norm_type=kind, qk_norm_before_rope=before, qk_norm_eps=1e-3)
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    out = module(x, rotary_pos_emb=RotaryPositionEmbedding(8, device="cpu")(S))
    w, x64 = ref.doubles(module), x.detach().double().requires_grad_()
    q, k, v = heads_of(ref.linear(x64, w, "qkv."), HEADS, False)

    def normed(t: Tensor, name: str) -> Tensor:
        if kind == "L2Normalization":
            return t / (t.square().sum(-1, keepdim=True) + 1e-3).sqrt()
        return ref.norm(t, w, name, kind, eps=1e-3)

    if before:
        q, k = ref.rotate(normed(q, "q_norm.")), ref.rotate(normed(k, "k_norm."))
    else:
        q, k = normed(ref.rotate(q), "q_norm."), normed(ref.rotate(k), "k_norm.")
    check(module, out, ref.linear(ref.attend(q, k, v, ref.causal(S)), w, "proj."), x, x64, w)


def test_batch_first_and_packed_sequences_agree_with_sequence_first() -> None:
    options = {"num_gqa_groups": 2, "input_layernorm": True}
    base = make(**options)
    freqs = RotaryPositionEmbedding(8, device="cpu")(S)
    x = torch.randn(S, B, HIDDEN)
    y = base(x, rotary_pos_emb=freqs)
    first = make(**options, qkv_format="bshd")
    torch.testing.assert_close(first(x.transpose(0, 1), rotary_pos_emb=freqs).transpose(0, 1), y)
    packed = make(**options, qkv_format="thd", attn_mask_type="padding_causal")
    cu = torch.tensor([0, S, 2 * S], dtype=torch.int32)
    tokens = x.transpose(0, 1).reshape(-1, HIDDEN)
    z = packed(tokens, rotary_pos_emb=freqs, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=S, max_seqlen_kv=S)
    torch.testing.assert_close(z.view(B, S, HIDDEN).transpose(0, 1), y, rtol=1e-4, atol=1e-5)


def test_packed_positions_follow_the_padded_offsets() -> None:
    module = make(qkv_format="thd", attn_mask_type="padding_causal")
    freqs = RotaryPositionEmbedding(8, device="cpu")(8)
    lengths, starts = [3, 4], [0, 5, 9]
    cu, padded = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)
    x = torch.randn(9, HIDDEN)
    kwargs = {"rotary_pos_emb": freqs, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    out = module(x, **kwargs, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, pad_between_seqs=True)
    for (a, _), n in zip(pairwise(starts), lengths, strict=True):
        alone = torch.tensor([0, n], dtype=torch.int32)
        want = module(x[a : a + n], rotary_pos_emb=freqs, cu_seqlens_q=alone, cu_seqlens_kv=alone)
        torch.testing.assert_close(out[a : a + n], want, rtol=1e-4, atol=1e-5)


def test_returned_bias_and_norm_output() -> None:
    module = make(input_layernorm=True, return_bias=True, return_layernorm_output=True)
    x = torch.randn(S, B, HIDDEN)
    out, bias, normed = module(x)
    plain = make(input_layernorm=True)
    torch.testing.assert_close(out + bias, plain(x))
    w = ref.doubles(module)
    want = ref.norm(x.double(), w, "layernorm_qkv.", names=("layer_norm_weight", "layer_norm_bias"))
    torch.testing.assert_close(normed.double(), want, rtol=1e-4, atol=1e-5)


def test_parameter_names() -> None:
    def names(**kwargs) -> set[str]:
        return {name for name, _ in make(**kwargs).named_parameters()}

    assert names(bias=False) == {f"qkv.{p}_weight" for p in ("query", "key", "value")} | {"proj.weight"}
    assert names(bias=False, fuse_qkv_params=True) == {"qkv.weight", "proj.weight"}
    assert names(input_layernorm=True, fuse_qkv_params=True) == {
        "layernorm_qkv.layer_norm_weight", "layernorm_qkv.layer_norm_bias", "layernorm_qkv.weight", "layernorm_qkv.bias",
        "proj.weight", "proj.bias",
    }  # fmt: skip
    assert names(bias=False, attention_type="cross", input_layernorm=True, normalization="RMSNorm") == {
        "layernorm_query.layer_norm_weight", "layernorm_query.query_weight", "key_value.key_weight", "key_value.value_weight",
        "proj.weight",
    }  # fmt: skip
    assert {"q_norm.weight", "k_norm.weight"} < names(qk_norm_type="RMSNorm")


def test_parameters_are_in_the_order_of_transformer_engine() -> None:
    """Optimizers keep their state by position: a state of TransformerEngine's module is this one's."""
    module = make(qk_norm_type="RMSNorm", fuse_qkv_params=True, softmax_type="learnable", bias=False)
    assert [name for name, _ in module.named_parameters()] == [
        *("q_norm.weight", "k_norm.weight", "qkv.weight", "core_attention.softmax_offset", "proj.weight"),
    ]


def test_l2_normalization_rounds_once() -> None:
    x = torch.randn(3, 8).bfloat16()
    want = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(L2Normalization()(x).double(), want, rtol=5e-3, atol=0)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_size \(30\) must be a multiple of num_attention_heads \(4\)"):
        MultiheadAttention(30, 4)
    with pytest.raises(ValueError, match=r"num_attention_heads \(4\) must be a multiple of num_gqa_groups \(3\)"):
        MultiheadAttention(32, 4, num_gqa_groups=3)
    with pytest.raises(ValueError, match="Did you mean 'RMSNorm'"):
        MultiheadAttention(32, 4, qk_norm_type="RMSnorm")
    with pytest.raises(ValueError, match="Did you mean 'padding_causal'"):
        MultiheadAttention(32, 4, attn_mask_type="padding_casual")
    with pytest.raises(ValueError, match="counts from 1"):
        MultiheadAttention(32, 4, layer_number=0)
    module = make()
    with pytest.raises(ValueError, match="the last of 32"):
        module(torch.randn(S, B, 31))
    with pytest.raises(ValueError, match="3 dimensions"):
        module(torch.randn(S, HIDDEN))
    with pytest.raises(ValueError, match="encoder_output"):
        make(attention_type="cross")(torch.randn(S, B, HIDDEN))
    with pytest.raises(ValueError, match="context parallelism"):
        module.set_context_parallel_group(object())
    with pytest.raises(ValueError, match="key-value cache"):
        module(torch.randn(S, B, HIDDEN), inference_params=object())
