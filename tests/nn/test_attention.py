"""DotProductAttention against attention written out in float64, query by query."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ottava.kernels import attention as kernel
from ottava.nn.attention import DotProductAttention


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """q [s, b, h, d], k, v [t, b, g, d], seen bool [b, h, s, t] -> float64 [s, b, h * d]. A query that sees nothing gets 0."""
    q, k, v = q.double(), k.double(), v.double()
    s, b, h, d = q.shape
    share = h // k.shape[2]
    scale = 1 / math.sqrt(d) if scale is None else scale
    out = []
    for batch in range(b):
        for head in range(h):
            score = q[:, batch, head] @ k[:, batch, head // share].T * scale
            if bias is not None:
                score = score + bias.double().expand(b, h, s, k.shape[0])[batch, head]
            weight = torch.where(seen[batch, head], score.exp(), torch.zeros((), dtype=torch.float64))
            total = weight.sum(1, keepdim=True) + (0 if sink is None else sink[head].double().exp())
            out.append(torch.where(total > 0, weight / total.clamp(min=1e-300), total * 0) @ v[:, batch, head // share])
    return torch.stack(out, 1).view(s, b, h * v.shape[-1])


def everything(b: int, h: int, s: int, t: int) -> Tensor:
    return torch.ones(b, h, s, t, dtype=torch.bool)


def inputs(s: int = 9, t: int = 9, b: int = 2, h: int = 4, g: int = 2, d: int = 8, dtype: torch.dtype = torch.float32):
    return tuple(torch.randn(n, b, m, d, dtype=dtype).requires_grad_() for n, m in ((s, h), (t, g), (t, g)))


def compare(
    module: DotProductAttention, seen: Tensor, tensors, *, bias=None, scale=None, sink=None, tol=2e-5, **kwargs
) -> None:
    """Output and gradients of sbhd tensors."""
    q, k, v = tensors
    out = module(q, k, v, **kwargs)
    copies = [x.detach().double().requires_grad_() for x in tensors]
    expected = by_hand(*copies, seen, bias, scale, sink)
    torch.testing.assert_close(out.double(), expected, rtol=tol, atol=tol)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad)
    wanted = torch.autograd.grad(expected, copies, grad.double())
    for got, want in zip(grads, wanted, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.double(), want, rtol=tol * 5, atol=tol * 5)


def test_more_than_64_groups_of_keys() -> None:
    """The groups are a batch of products; only a contraction is added by halves."""
    compare(
        DotProductAttention(72, 4, num_gqa_groups=72, attn_mask_type="no_mask", attention_dropout=0.0),
        everything(1, 72, 3, 5),
        inputs(s=3, t=5, b=1, h=72, g=72, d=4),
    )


# -------------------------------------------------------------------------------------------------------------- mask types


@pytest.mark.parametrize("s,t", [(9, 9), (5, 9), (9, 5), (1, 7)])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_masks_without_padding(mask: str, s: int, t: int) -> None:
    row, col = torch.arange(s)[:, None], torch.arange(t)
    shift = t - s if mask == "causal_bottom_right" else 0
    seen = everything(2, 4, s, t) & ((col <= row + shift) if mask != "no_mask" else torch.tensor(True))
    compare(DotProductAttention(4, 8, 2, attn_mask_type=mask, attention_type="cross"), seen, inputs(s, t))


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("how", ["masks", "cu_seqlens"])
def test_padding_between_different_lengths(mask: str, how: str) -> None:
    s, t, q_len, k_len = 6, 8, torch.tensor([6, 3]), torch.tensor([5, 8])
    row, col = torch.arange(s)[:, None], torch.arange(t)
    seen = everything(2, 4, s, t)
    for i in range(2):
        shift = k_len[i] - q_len[i] if "bottom_right" in mask else 0
        seen[i] &= (
            (row < q_len[i]) & (col < k_len[i]) & ((col <= row + shift) if "causal" in mask else torch.tensor(True))
        )
    if how == "masks":
        pad = lambda n, lens: (torch.arange(n) >= lens[:, None])[:, None, None]  # noqa: E731
        kwargs = {"attention_mask": (pad(s, q_len), pad(t, k_len))}
    else:
        cu = lambda lens: torch.cat([torch.zeros(1), lens.cumsum(0)]).int()  # noqa: E731
        kwargs = {"cu_seqlens_q": cu(q_len), "cu_seqlens_kv": cu(k_len)}
    compare(DotProductAttention(4, 8, 2, attn_mask_type=mask, attention_type="cross"), seen, inputs(s, t), **kwargs)


def test_causal_padding_of_one_side_needs_no_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.tensor([9, 4])
    cu = torch.tensor([0, 9, 13], dtype=torch.int32)
    row, col = torch.arange(9)[:, None], torch.arange(9)
    seen = everything(2, 4, 9, 9) & (col <= row) & (row < lengths.view(2, 1, 1, 1)) & (col < lengths.view(2, 1, 1, 1))
    module = DotProductAttention(4, 8, 2, attn_mask_type="padding,causal")
    compare(module, seen, inputs(), cu_seqlens_q=cu, cu_seqlens_kv=cu)
    given = []
    monkeypatch.setattr(
        "ottava.nn.attention.attention", lambda *a, **k: given.append(k["allowed"]) or kernel.attention(*a, **k)
    )
    module(*inputs(), cu_seqlens_q=cu, cu_seqlens_kv=cu)
    assert given == [None]


def test_left_padding_by_mask() -> None:
    mask = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = True
    real = ~mask[:, 0, 0]
    seen = everything(2, 4, 9, 9) & real[:, None, :, None] & real[:, None, None, :]
    compare(DotProductAttention(4, 8, 2, attn_mask_type="padding"), seen, inputs(), attention_mask=mask)


def test_arbitrary_mask_and_rows_that_see_nothing() -> None:
    mask = torch.rand(2, 1, 9, 9) < 0.4
    mask[0, 0, 3] = True
    compare(
        DotProductAttention(4, 8, 2, attn_mask_type="arbitrary"),
        ~mask.expand(2, 4, 9, 9),
        inputs(),
        attention_mask=mask,
    )
    out = DotProductAttention(4, 8, 2)(*inputs(), attention_mask=mask, attn_mask_type="arbitrary")
    assert torch.equal(out[3, 0], torch.zeros(32))


@pytest.mark.parametrize(
    "mask,window", [("causal", (3, 0)), ("causal", (2, -1)), ("no_mask", (2, 1)), ("no_mask", (-1, 2))]
)
@pytest.mark.parametrize("corner", [None, False])
@pytest.mark.parametrize("s,t", [(9, 9), (5, 9)])
def test_sliding_window(mask: str, window: tuple[int, int], corner: bool | None, s: int, t: int) -> None:
    shift = 0 if mask == "causal" or corner is False else t - s
    relative = torch.arange(s)[:, None] + shift - torch.arange(t)
    left, right = window[0], 0 if mask == "causal" else window[1]
    inside = (relative <= left) if left >= 0 else relative > -100
    inside &= (relative >= -right) if right >= 0 else relative > -100
    module = DotProductAttention(4, 8, 2, attn_mask_type=mask, window_size=window, bottom_right_diagonal=corner)
    compare(module, everything(2, 4, s, t) & inside, inputs(s, t))


# ------------------------------------------------------------------------------------------------------- biases and softmax


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
def test_bias_and_its_gradient(kind: str) -> None:
    bias = torch.randn(1, 4, 9, 9, requires_grad=True)
    module = DotProductAttention(4, 8, 2, softmax_scale=0.3)
    q, k, v = inputs()
    out = module(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias)
    copy = bias.detach().double().requires_grad_()
    seen = everything(2, 4, 9, 9).tril()
    expected = by_hand(q.detach(), k.detach(), v.detach(), seen, copy * (0.3 if kind == "pre_scale_bias" else 1), 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    grad = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, bias, grad)
    (want,) = torch.autograd.grad(expected, copy, grad.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads,slopes", [(4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]), (3, [1 / 16, 1 / 256, 1 / 4])])
def test_alibi_slopes_and_distance(heads: int, slopes: list[float]) -> None:
    tensors = inputs(5, 7, h=heads, g=heads)
    distance = (torch.arange(5)[:, None] - torch.arange(7)).abs()
    bias = -torch.tensor(slopes).view(1, heads, 1, 1) * distance
    module = DotProductAttention(heads, 8, attn_mask_type="causal")
    compare(module, everything(2, heads, 5, 7).tril(), tensors, bias=bias, core_attention_bias_type="alibi")
    bias = -torch.tensor(slopes).view(1, heads, 1, 1) * (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    compare(
        module, everything(2, heads, 5, 7), tensors, bias=bias, core_attention_bias_type="alibi", attn_mask_type="no_mask",
        alibi_slopes=torch.tensor(slopes),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_attention_sinks(kind: str) -> None:
    module = DotProductAttention(4, 8, 2, softmax_type=kind)
    sink = torch.zeros(4)
    if kind == "learnable":
        assert list(module.state_dict()) == ["softmax_offset"]
        sink = torch.randn(4)
        module.softmax_offset.data.copy_(sink)
    else:
        assert not module.state_dict()
    tensors = inputs()
    compare(module, everything(2, 4, 9, 9).tril(), tensors, sink=sink)
    if kind == "learnable":
        module(*tensors).square().sum().backward()
        copy = sink.double().requires_grad_()
        by_hand(*(x.detach() for x in tensors), everything(2, 4, 9, 9).tril(), sink=copy).square().sum().backward()
        torch.testing.assert_close(module.softmax_offset.grad.double(), copy.grad, rtol=1e-4, atol=1e-4)


def test_key_and_value_channels_may_differ() -> None:
    q, k, _ = inputs()
    v = torch.randn(9, 2, 2, 5, requires_grad=True)
    compare(DotProductAttention(4, (8, 5), 2), everything(2, 4, 9, 9).tril(), (q, k, v))


# ----------------------------------------------------------------------------------------------------------------- layouts


def test_bshd_is_the_transpose_of_sbhd() -> None:
    q, k, v = inputs()
    a = DotProductAttention(4, 8, 2)(q, k, v)
    b = DotProductAttention(4, 8, 2, qkv_format="bshd")(*(x.transpose(0, 1) for x in (q, k, v)))
    assert torch.equal(a, b.transpose(0, 1))


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("given_max", [False, True])
def test_packed_sequences(mask: str, gaps: bool, given_max: bool) -> None:
    q_len, k_len = [3, 0, 5, 1], [4, 2, 5, 0]
    starts = lambda lens: torch.tensor([0, *lens]).cumsum(0).int()  # noqa: E731
    q_at = starts([n + 2 for n in q_len] if gaps else q_len)
    k_at = starts([n + 1 for n in k_len] if gaps else k_len)
    q = torch.randn(int(q_at[-1]) + gaps, 4, 8)
    k, v = torch.randn(int(k_at[-1]), 2, 8), torch.randn(int(k_at[-1]), 2, 8)
    if gaps:  # what lies between sequences must not matter, not even NaN
        q[3:5] = float("nan")
        k[4], v[4] = float("nan"), float("inf")
    tensors = [x.requires_grad_() for x in (q, k, v)]
    kwargs = {"max_seqlen_q": 5, "max_seqlen_kv": 7} if given_max else {}
    if gaps:
        kwargs |= {"cu_seqlens_q_padded": q_at, "cu_seqlens_kv_padded": k_at, "pad_between_seqs": True}
    module = DotProductAttention(4, 8, 2, qkv_format="thd", attn_mask_type=mask)
    out = module(*tensors, cu_seqlens_q=starts(q_len), cu_seqlens_kv=starts(k_len), **kwargs)
    copies = [x.detach().double().requires_grad_() for x in tensors]
    expected = torch.zeros(q.shape[0], 32, dtype=torch.float64)
    for i in range(4):
        a, b = int(q_at[i]), int(k_at[i])
        mine = [copies[0][a : a + q_len[i]], *(x[b : b + k_len[i]] for x in copies[1:])]
        shift = k_len[i] - q_len[i] if "bottom_right" in mask else 0
        seen = everything(1, 4, q_len[i], k_len[i])
        seen = seen.tril(shift) if "causal" in mask else seen
        if q_len[i] and k_len[i]:
            rows = by_hand(*(x[:, None] for x in mine), seen)[:, 0]
            expected = torch.cat([expected[:a], rows, expected[a + q_len[i] :]])
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, copies, grad.double())
    for got, want in zip(torch.autograd.grad(out, tensors, grad), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ precision, threads, memory


def test_bfloat16_accumulates_in_float32() -> None:
    tensors = inputs(512, 512, d=16, dtype=torch.bfloat16)
    out = DotProductAttention(4, 16, 2, attn_mask_type="no_mask")(*tensors)
    copies = [x.detach().double().requires_grad_() for x in tensors]
    exact = by_hand(*copies, everything(2, 4, 512, 512))
    assert out.dtype is torch.bfloat16
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad)
    wanted = torch.autograd.grad(exact, copies, grad.double())
    for got, want in zip((out, *grads), (exact, *wanted), strict=True):
        # bfloat16 has 2^-9 = 0.002 of relative rounding; sums of 512 terms in bfloat16 would be off by 0.05 and more.
        assert (got.double() - want).norm() < 6e-3 * want.norm()


@pytest.mark.parametrize("shape", [(1, 1, 1, 999), (1, 4, 300, 300), (2, 3, 65, 130), (1, 8, 2048, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_threads(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, h, s, t = shape

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        q, k, v = (torch.randn(n, b, m, 16, dtype=dtype).requires_grad_() for n, m in ((s, h), (t, 1), (t, 1)))
        out = DotProductAttention(h, 16, 1, attn_mask_type="causal_bottom_right", window_size=(200, 0))(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.randn_like(out))]

    once = run(1)
    for threads in (2, 4):
        assert all(torch.equal(a, b) for a, b in zip(once, run(threads), strict=True))


def test_blocks_of_query_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(50, 50, dtype=torch.float64)
    bias = torch.randn(1, 4, 50, 50, dtype=torch.float64, requires_grad=True)
    kwargs = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    module = DotProductAttention(4, 8, 2)
    whole = module(*tensors, **kwargs)
    wanted = torch.autograd.grad(whole.sum(), (*tensors, bias))
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", 1)  # 16 rows at a time
    blocks = module(*tensors, **kwargs)
    torch.testing.assert_close(blocks, whole)
    for got, want in zip(torch.autograd.grad(blocks.sum(), (*tensors, bias)), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_backward_keeps_q_k_v_and_the_output_only() -> None:
    q, k, v = inputs(64, 64, d=16, dtype=torch.bfloat16)
    saved: dict[int, int] = {}
    keep = lambda x: saved.__setitem__(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = DotProductAttention(4, 16, 2)(q, k, v)
    assert sum(saved.values()) == sum(2 * x.numel() for x in (q, k, v, out))
    assert out.untyped_storage().data_ptr() in saved  # the projection that follows shares it


# ------------------------------------------------------------------------------------------- dropout, recompute, compile


class Streams:
    """A random-state tracker with one stream, as modules take it."""

    def __init__(self) -> None:
        self.states = {"only": torch.Generator().manual_seed(7).get_state()}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = dict(states)

    @contextmanager
    def fork(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states["only"])
        yield
        self.states["only"] = torch.get_rng_state()
        torch.set_rng_state(outside)


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    v = torch.ones(64, 2, 4, 8)
    module = DotProductAttention(4, 8, attention_dropout=0.25, attn_mask_type="no_mask")
    out = module(torch.zeros(64, 2, 4, 8), torch.zeros(64, 2, 4, 8), v)
    weights = out.view(64, 2, 4, 8)[..., 0] * 64 * 0.75  # kept keys of each query
    assert torch.allclose(weights, weights.round(), atol=1e-3) and abs(float(weights.mean()) - 48) < 1
    assert torch.equal(module.eval()(torch.zeros(64, 2, 4, 8), torch.zeros(64, 2, 4, 8), v), torch.ones(64, 2, 32))


@pytest.mark.parametrize("tracked", [False, True])
def test_recomputed_attention_is_bitwise_the_same(tracked: bool) -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        streams = Streams()
        module = DotProductAttention(
            4, 8, 2, attention_dropout=0.3, get_rng_state_tracker=(lambda s=streams: s) if tracked else None
        )
        tensors = inputs()
        outside = torch.get_rng_state()
        out = module(*tensors, checkpoint_core_attention=recompute)
        again = module(*tensors, checkpoint_core_attention=recompute)
        assert torch.equal(outside, torch.get_rng_state()) == tracked
        results.append([out, again, *torch.autograd.grad((out * again).sum(), tensors)])
        assert not torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_compiles_as_one_graph(layout: str) -> None:
    module = DotProductAttention(
        4, 8, 2, qkv_format=layout, attn_mask_type="padding_causal" if layout == "thd" else "causal"
    )
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(b=1)
    kwargs: dict = {"window_size": (4, 0)}
    if layout == "thd":
        q, k, v = (x.detach()[:, 0].requires_grad_() for x in (q, k, v))
        cu = torch.tensor([0, 4, 9], dtype=torch.int32)
        kwargs |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    eager, traced = module(q, k, v, **kwargs), compiled(q, k, v, **kwargs)
    assert torch.equal(eager, traced)
    grad = torch.randn_like(eager)
    for a, b in zip(
        torch.autograd.grad(eager, (q, k, v), grad), torch.autograd.grad(traced, (q, k, v), grad), strict=True
    ):
        assert torch.equal(a, b)


def test_op_passes_torch_opcheck() -> None:
    q, k, v = inputs(5, 6)
    bias, sink = torch.randn(1, 4, 5, 6, requires_grad=True), torch.randn(4, requires_grad=True)
    torch.library.opcheck(torch.ops.ottava.attention.default, (q, k, v, None, bias, sink, None, 1.0, 0.5, True, False))
    torch.library.opcheck(
        torch.ops.ottava.attention.default,
        (q, k, v, torch.rand(2, 1, 5, 6) > 0.2, None, None, None, 1.0, 0.5, False, False),
    )


def test_empty_batch_and_empty_sequence() -> None:
    module = DotProductAttention(4, 8, 2, attn_mask_type="no_mask")
    assert module(*inputs(b=0)).shape == (9, 0, 32)
    q, k, v = inputs(5, 0)
    assert torch.equal(module(q, k, v), torch.zeros(5, 2, 32))


# ---------------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_in_the_constructor_are_named() -> None:
    with pytest.raises(ValueError, match="Did you mean 'causal'"):
        DotProductAttention(4, 8, attn_mask_type="casual")
    with pytest.raises(ValueError, match=r"\(4\) must be a multiple of num_gqa_groups \(3\)"):
        DotProductAttention(4, 8, 3)
    with pytest.raises(ValueError, match="tensor-parallel size"):
        DotProductAttention(4, 8, 2, tp_size=4)
    with pytest.raises(ValueError, match="qkv_format"):
        DotProductAttention(4, 8, qkv_format="hsbd")
    with pytest.raises(ValueError, match="is a causal mask"):
        DotProductAttention(4, 8, attn_mask_type="no_mask", window_size=(-1, 0))
    with pytest.raises(ValueError, match="context parallelism"):
        DotProductAttention(4, 8, cp_group=object())
    with pytest.raises(ValueError, match="probability"):
        DotProductAttention(4, 8, attention_dropout=1.5)


def test_mistakes_in_the_call_are_named() -> None:
    q, k, v = inputs()
    module = DotProductAttention(4, 8, 2)
    cu = torch.tensor([0, 9, 18])
    cases: list[tuple[str, tuple, dict]] = [
        ("query_layer", (q[..., :7], k, v), {}),
        ("key_layer", (q, q, v), {}),
        ("one dtype", (q, k, v.double()), {}),
        ("agree in batch", (q, k[:, :1], v[:, :1]), {}),
        ("needs attention_mask", (q, k, v), {"attn_mask_type": "padding"}),
        ("given twice", (q, k, v), {"attn_mask_type": "padding", "attention_mask": torch.zeros(2, 1, 1, 9).bool(), "cu_seqlens_q": cu}),
        ("bool", (q, k, v), {"attn_mask_type": "padding", "attention_mask": torch.zeros(2, 1, 1, 9)}),
        ("'arbitrary' needs", (q, k, v), {"attn_mask_type": "arbitrary"}),
        ("has no padding", (q, k, v), {"cu_seqlens_q": cu}),
        ("batch \\+ 1", (q, k, v), {"attn_mask_type": "padding", "cu_seqlens_q": cu[:2], "cu_seqlens_kv": cu}),
        ("needs a padding mask type", (q[:, 0], k[:, 0], v[:, 0]), {"qkv_format": "thd"}),
        ("cu_seqlens_q", (q[:, 0], k[:, 0], v[:, 0]), {"qkv_format": "thd", "attn_mask_type": "padding"}),
        ("key-value cache", (q, k, v), {"inference_params": object()}),
        ("score_mod", (q, k, v), {"score_mod": print}),
        ("needs a core_attention_bias", (q, k, v), {"core_attention_bias_type": "post_scale_bias"}),
        ("takes no core_attention_bias", (q, k, v), {"core_attention_bias": torch.zeros(1, 4, 9, 9)}),
        (
            "with 4 heads of this rank",
            (q, k, v),
            {"core_attention_bias": torch.zeros(1, 8, 9, 9), "core_attention_bias_type": "post_scale_bias"},
        ),
        ("alibi_slopes", (q, k, v), {"alibi_slopes": torch.ones(4)}),
        ("core_attention_bias_type", (q, k, v), {"core_attention_bias_type": "alibe"}),
    ]  # fmt: skip
    for message, args, kwargs in cases:
        with pytest.raises(ValueError, match=message):
            module(*args, **kwargs)
    with pytest.raises(ValueError, match="there are 9 tokens"):
        module(q[:, 0], k[:, 0], v[:, 0], qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=cu, cu_seqlens_kv=cu)
