"""Attention: softmax(scale q k^T + bias) v. `ottava::attention` is the reference; CUDA takes torch's fused kernels where they fit.

The reference does what the fused kernels do: products and sums in float32 (float64 for float64 inputs), with the operands of a
product (the weights exp(score - largest), and in backward p and ds) rounded to the input dtype; q, k, v and the output are kept
for backward and the weights recomputed, a block of query rows at a time. On the CPU it gives the same bits for any number of
threads; torch's own bfloat16 attention stops with an illegal instruction on some CPUs. A query that may attend to nothing gets 0.

Shapes: q [s, b, h, d], k [t, b, g, d], v [t, b, g, dv], or with b first (`batch_first`); h is a multiple of g. `allowed` (bool) and
`bias` broadcast to [b, h, s, t]; `sink` [h] is the logit of one more key with value 0; `keep` [b, h, s, t] is a dropout mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from ottava import torch_private
from ottava.kernels import attention_backend as backends
from ottava.kernels.fixed_order import matmul
from ottava.kernels.registry import define

BLOCK_ELEMENTS = 2**24  # scores held at once by the reference: 64 MiB of float32


# --------------------------------------------------------------------------------------------------------- the arithmetic


def _by_head(x: Tensor, batch_first: bool) -> Tensor:
    """[s, b, h, d] or [b, s, h, d] -> a view [b, h, s, d]."""
    return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)


class _Scores:
    """The scores of a block of query rows: recomputed in backward, so they are described once."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        allowed: Tensor | None,
        bias: Tensor | None,
        sink: Tensor | None,
        scale: float,
        causal: bool,
        batch_first: bool,
    ) -> None:
        self.work = torch.promote_types(q.dtype, torch.float32)
        self.q = _by_head(q, batch_first)  # [b, h, s, d]
        self.k = _by_head(k, batch_first).to(self.work).contiguous()  # [b, g, t, d]
        self.batch, self.heads, self.queries, _ = self.q.shape
        self.groups, self.keys = self.k.shape[1:3]
        full = (self.batch, self.heads, self.queries, self.keys)
        self.allowed = None if allowed is None else allowed.expand(full)
        self.bias = None if bias is None else bias.expand(full)
        self.sink = sink
        self.scale = scale
        self.causal = causal

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first row, end row, end of the keys that these rows can see); nothing where there are no keys."""
        if self.keys == 0:
            return
        rows = max(16, BLOCK_ELEMENTS // max(self.batch * self.heads * self.keys, 1))
        for low in range(0, self.queries, rows):
            high = min(low + rows, self.queries)
            yield low, high, min(self.keys, high) if self.causal else self.keys

    def fold(self, x: Tensor) -> Tensor:
        """[b, h, rows, n] -> [b, g, h/g * rows, n]: the heads that share a key become rows of one product; nothing is repeated."""
        return x.reshape(self.batch, self.groups, (self.heads // self.groups) * x.shape[2], x.shape[3])

    def unfold(self, x: Tensor) -> Tensor:
        """The inverse of `fold`."""
        return x.reshape(self.batch, self.heads, x.shape[2] * self.groups // self.heads, x.shape[3])

    def rows(self, low: int, high: int) -> Tensor:
        """The queries of a block, folded, [b, g, h/g * rows, d]."""
        return self.fold(self.q[:, :, low:high].to(self.work))

    def masked(self, low: int, high: int, end: int) -> Tensor:
        """The scores of a block [b, h, rows, end], -inf where a query may not look."""
        scores = self.unfold(matmul(self.rows(low, high), self.k[:, :, :end].transpose(-1, -2))) * self.scale
        if self.bias is not None:
            scores = scores + self.bias[:, :, low:high, :end].to(self.work)
        if self.causal:
            row = torch.arange(low, high, device=scores.device)[:, None]
            scores = scores.masked_fill(torch.arange(end, device=scores.device) > row, float("-inf"))
        if self.allowed is not None:
            scores = scores.masked_fill(~self.allowed[:, :, low:high, :end], float("-inf"))
        return scores

    def weights(self, low: int, high: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """exp(score - largest score) of a block [b, h, rows, end], their sum [b, h, rows, 1], and the sink's part of that sum."""
        scores = self.masked(low, high, end)
        largest = scores.amax(-1, keepdim=True)
        sink = None
        if self.sink is not None:
            logit = self.sink.to(self.work).view(1, -1, 1, 1)
            largest = torch.maximum(largest, logit)
            sink = torch.exp(logit - largest)
        # A row that may attend to nothing: all weights 0, and a sum of 1 so that 0 stays 0.
        largest = largest.masked_fill(largest == float("-inf"), 0.0)
        weights = torch.exp(scores - largest)
        total = weights.sum(-1, keepdim=True)
        total = total if sink is None else total + sink
        return weights, total.masked_fill(total == 0.0, 1.0), sink

    def operand(self, x: Tensor) -> Tensor:
        """x as matrix units take it: rounded to the dtype of q. The products still add up in float32."""
        return x.to(self.q.dtype).to(self.work)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    keep: Tensor | None,
    keep_scale: float,
    scale: float,
    causal: bool,
    batch_first: bool,
) -> Tensor:
    scores = _Scores(q, k, allowed, bias, sink, scale, causal, batch_first)
    values = _by_head(v, batch_first).to(scores.work).contiguous()  # [b, g, t, dv]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for low, high, end in scores.blocks():
        weights, total, _ = scores.weights(low, high, end)
        if keep is not None:
            weights = weights * keep[:, :, low:high, :end] * keep_scale
        block = scores.unfold(matmul(scores.fold(scores.operand(weights)), values[:, :, :end]))
        _by_head(out, batch_first)[:, :, low:high].copy_(block / total)
    return out


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    keep: Tensor | None,
    keep_scale: float,
    scale: float,
    causal: bool,
    batch_first: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and sink; the last two empty where not asked for or not given."""
    scores = _Scores(q, k, allowed, bias, sink, scale, causal, batch_first)
    work = scores.work
    values = _by_head(v, batch_first).to(work).contiguous()
    grad = _by_head(grad, batch_first).to(work)
    delta = (grad * _by_head(out, batch_first).to(work)).sum(-1, keepdim=True)  # sum over keys of p dp, [b, h, s, 1]
    dq, dk, dv = torch.zeros_like(scores.q, dtype=work), torch.zeros_like(scores.k), torch.zeros_like(values)
    dbias = grad.new_zeros(scores.batch, scores.heads, scores.queries, scores.keys) if bias_grad else grad.new_zeros(0)
    dsink = grad.new_zeros(0 if sink is None else scores.heads)
    for low, high, end in scores.blocks():
        weights, total, sink_part = scores.weights(low, high, end)
        p = weights / total
        dout = scores.fold(grad[:, :, low:high])
        dp = scores.unfold(matmul(dout, values[:, :, :end].transpose(-1, -2)))
        kept = p
        if keep is not None:
            factor = keep[:, :, low:high, :end] * keep_scale
            kept, dp = p * factor, dp * factor
        dv[:, :, :end] += matmul(scores.fold(scores.operand(kept)).transpose(-1, -2), dout)
        ds = p * (dp - delta[:, :, low:high])
        if bias_grad:
            dbias[:, :, low:high, :end] = ds
        if sink_part is not None:
            dsink -= (sink_part / total * delta[:, :, low:high]).sum((0, 2, 3))
        ds = scores.fold(scores.operand(ds * scale))
        dq[:, :, low:high] = scores.unfold(matmul(ds, scores.k[:, :, :end]))
        dk[:, :, :end] += matmul(ds.transpose(-1, -2), scores.rows(low, high))
    grads = [_like(g, x, batch_first) for g, x in ((dq, q), (dk, k), (dv, v))]
    if bias_grad and bias is not None:
        dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
    return grads[0], grads[1], grads[2], dbias, dsink if sink is None else dsink.to(sink.dtype)


def _like(grad: Tensor, x: Tensor, batch_first: bool) -> Tensor:
    """A gradient [b, h, s, d] in the layout and dtype of x, contiguous."""
    result = x.new_empty(x.shape)
    _by_head(result, batch_first).copy_(grad)
    return result


def _attention_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, allowed: Tensor | None, bias: Tensor | None,
    sink: Tensor | None, keep: Tensor | None, keep_scale: float, scale: float, causal: bool, batch_first: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    work = torch.promote_types(q.dtype, torch.float32)
    dbias = bias.new_empty(bias.shape) if bias_grad and bias is not None else q.new_empty(0, dtype=work)
    dsink = q.new_empty(0, dtype=work) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias, dsink


reference_attention = define("attention", _attention, _attention_fake)
reference_attention_backward = define("attention_backward", _attention_backward, _attention_backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output, *inputs[3:7])
    ctx.options = inputs[7:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    has_bias, has_sink = ctx.needs_input_grad[4], ctx.needs_input_grad[5]
    dq, dk, dv, dbias, dsink = reference_attention_backward(grad, *ctx.saved_tensors, *ctx.options, has_bias)
    return dq, dk, dv, None, dbias if has_bias else None, dsink if has_sink else None, *(None,) * 5


torch.library.register_autograd("ottava::attention", _backward, setup_context=_setup)


# ----------------------------------------------------------------------------------------------------------- what users call


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    batch_first: bool,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention on any device, [s, b, h, dv] (or batch first). `causal` counts rows and keys from the top left corner.

    torch's fused kernels take the bias in the dtype of q, so a float32 bias (ALiBi distances, say) goes the reference way.
    """
    if q.is_cuda and sink is None and (bias is None or bias.dtype == q.dtype) and q.dtype is not torch.float64:
        return _fused(q, k, v, scale, causal, batch_first, allowed, bias, dropout)
    keep = None
    if dropout > 0.0:
        batch, heads = (q.shape[0], q.shape[2]) if batch_first else (q.shape[1], q.shape[2])
        length, keys = (q.shape[1], k.shape[1]) if batch_first else (q.shape[0], k.shape[0])
        keep = torch.rand(batch, heads, length, keys, dtype=torch.float32, device=q.device) >= dropout
    keep_scale = 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
    return reference_attention(q, k, v, allowed, bias, sink, keep, keep_scale, scale, causal, batch_first)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    batch_first: bool,
    allowed: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """torch's scaled_dot_product_attention. Keys and values are repeated over their queries only where a mask forces it."""
    q, k, v = (_by_head(x, batch_first) for x in (q, k, v))
    special = allowed is not None or bias is not None or dropout > 0.0
    kernels = backends.dense_kernels(q, k, v, causal, special)
    if kernels is None:
        return _flash4(q, k, v, scale, causal, batch_first)
    alive = None
    mask = allowed
    if mask is not None or bias is not None:
        if causal:
            triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            mask = triangle if mask is None else mask & triangle
        if mask is not None:
            alive = mask.any(-1, keepdim=True)
            mask = mask | ~alive  # a row without a key would be NaN: let it see all, and zero it afterwards
        if bias is not None:
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        share = q.shape[1] // k.shape[1]
        if share > 1:
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        causal = False
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal, "scale": scale}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    if not torch.compiler.is_compiling():
        with torch_private.sdpa_in_order(kernels):
            out = F.scaled_dot_product_attention(q, k, v, **options)
    elif backends.choice_is_ours():
        with sdpa_kernel(kernels, set_priority=True):  # which torch.compile knows
            out = F.scaled_dot_product_attention(q, k, v, **options)
    else:
        out = F.scaled_dot_product_attention(q, k, v, **options)
    if alive is not None:
        out = torch.where(alive, out, torch.zeros((), dtype=out.dtype, device=out.device))
    return out.transpose(1, 2) if batch_first else out.permute(2, 0, 1, 3)


def _flash4(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, batch_first: bool) -> Tensor:
    """flash-attn-4 on [b, h, s, d]; it takes any strides, and answers [b, s, h, d]."""
    module = backends.flash4()
    assert module is not None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.cuda.device(q.device):
        out, _ = module.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    return out if batch_first else out.transpose(0, 1)
