"""`ottava::fp8_attention`: attention whose two products have FP8 operands, and whose backward is the one of bf16. Design note 10.

q, k and v are each quantized to e4m3 with one scale a tensor, from their own amax. Then, a block of `KEYS` keys after the other:

    scores  = (q_bytes k_bytes^T) * (1/scale_q * 1/scale_k * softmax_scale * log2 e)        float32
    new     = max(largest, row maximum of scores)
    weights = 2^(scores - new + 8)                                                          float32, at most 256
    total   = total * 2^(largest - new) + sum of weights
    out     = out * 2^(largest - new) + e4m3(weights) v_bytes                               float32

and at the end out / total * 1/scale_v, in the dtype of q, and the logarithm of the sum of exp(score). A weight is at most 1 after the
running maximum is taken off, so its scale is fixed: 2^8, which costs nothing in the exponent. What is below 2^-18 of the largest is 0.

Shapes: q [s, b, h, d], k and v [t, b, g, d], or with b first (`batch_first`), any strides; h is a multiple of g. `causal` counts from the
top left corner. `starts` int32 [b, s], with `causal` and s = t: the first key that a query sees, as in `attention_documents.py`.
A query that sees nothing gets 0. Sums: float32 [b, h, s].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels import attention as dense
from ottava.kernels import attention_documents as documents
from ottava.kernels.fixed_order import matmul
from ottava.kernels.registry import define
from ottava.quant.scaling import amax_of, scale_from_amax

E4M3_MAX = 448.0
WEIGHT_EXPONENT = 8
"""Weights are multiplied by 2 to this before they are rounded to e4m3: the largest power of two that 1 may become."""
KEYS = 128
"""Keys of a block: with it comes the order in which weights are rounded and added."""
PAD = 128
"""Bytes of q, k and v have a multiple of this many rows, the last ones 0."""
CHANNELS = (64, 128)
"""Channels of a head that the kernel takes; the reference takes any."""


# ------------------------------------------------------------------------------------------------------------- the reference


def quantized(x: Tensor, peak: float, epsilon: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn of the shape of x, 1 / scale as float32 [1])."""
    scale = scale_from_amax(amax_of(x), peak, epsilon, power_of_two)
    data = (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return data, torch.ones_like(scale) / scale


def operands(
    q: Tensor, k: Tensor, v: Tensor, batch_first: bool, peak: float, epsilon: float, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes of q [b, h, rows, d], of k [b, g, rows, d], of v [b, g, d, rows], with rows filled up to a multiple of `PAD`; 1 / scale [3]."""
    laid, inverses = [], []
    for x in (q, k, v):
        data, inverse = quantized(x, peak, epsilon, power_of_two)
        by_head = dense._by_head(data.view(torch.uint8), batch_first)  # [b, h, s, d]
        laid.append(torch.nn.functional.pad(by_head, (0, 0, 0, -by_head.shape[2] % PAD)))
        inverses.append(inverse)
    return laid[0], laid[1], laid[2].transpose(2, 3).contiguous(), torch.cat(inverses)


def _fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, ends: Tensor | None, scale: float, causal: bool, batch_first: bool,
    peak: float, epsilon: float, power_of_two: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result in the shape of q, and the logarithm of the sum of exp(score) over the keys of each query.

    peak: what the amax of q, k and v becomes; epsilon, power_of_two: of their scales, see `quant.scaling.scale_from_amax`.
    """
    data = [quantized(x, peak, epsilon, power_of_two) for x in (q, k, v)]
    fq, fk, fv = (dense._by_head(bytes_.float(), batch_first) for bytes_, _ in data)  # [b, h or g, s or t, d]
    factor = (
        data[0][1] * data[1][1] * torch.tensor([scale / math.log(2.0)], dtype=torch.float32, device=q.device)
    ).clamp_min(1e-37)
    batch, heads, queries, channels = fq.shape
    groups, keys = fk.shape[1:3]
    folded = fq.reshape(batch, groups, -1, channels)  # heads that share keys are rows of one product
    state = (batch, heads, queries, 1)
    largest, total = q.new_full(state, -1e30, dtype=torch.float32), q.new_zeros(state, dtype=torch.float32)
    out = q.new_zeros(batch, heads, queries, channels, dtype=torch.float32)
    row = torch.arange(queries, device=q.device)[:, None]
    for low in range(0, keys, KEYS):
        block = slice(low, min(low + KEYS, keys))
        scores = matmul(folded, fk[:, :, block].transpose(-1, -2).contiguous()).view(batch, heads, queries, -1)
        column = torch.arange(block.start, block.stop, device=q.device)
        hidden = column > row if causal else torch.zeros_like(column > row)
        hidden = hidden if starts is None else hidden | (column < starts[:, None, :, None])
        scores = scores.masked_fill(hidden, float("-inf"))
        new = torch.maximum(largest, scores.amax(-1, keepdim=True) * factor)
        shrink = torch.exp2(largest - new)
        weights = torch.exp2(scores * factor - (new - WEIGHT_EXPONENT))
        total = total * shrink + weights.sum(-1, keepdim=True)
        rounded = weights.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
        product = matmul(rounded.reshape(batch, groups, -1, rounded.shape[-1]), fv[:, :, block].contiguous())
        out = out * shrink + product.view(out.shape)
        largest = new
    alive = total > 0
    safe = torch.where(alive, total, torch.ones_like(total))
    sums = torch.where(alive, (largest + safe.log2() - WEIGHT_EXPONENT) * math.log(2.0), -math.inf)
    return dense._like(out * (data[2][1] / safe), q, batch_first), sums[..., 0]


def _fp8_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, ends: Tensor | None, scale: float, causal: bool, batch_first: bool,
    peak: float, epsilon: float, power_of_two: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, queries = (q.shape[0], q.shape[1]) if batch_first else (q.shape[1], q.shape[0])
    return q.new_empty(q.shape), q.new_empty(batch, q.shape[2], queries, dtype=torch.float32)


def _fp8_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor | None, ends: Tensor | None,
    scale: float, causal: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v: those of attention in the dtype of q, given the output and the sums that forward had in FP8."""
    allowed = None if starts is None else documents._allowed(starts)
    scores = dense._Scores(q, k, allowed, None, None, scale, causal and starts is None, batch_first)
    work = scores.work
    values, grad = (dense._by_head(x, batch_first).to(work).contiguous() for x in (v, grad))
    delta = (grad * dense._by_head(out, batch_first).to(work)).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(scores.q, dtype=work), torch.zeros_like(scores.k), torch.zeros_like(values)
    for low, high, end in scores.blocks():
        p = torch.exp(scores.masked(low, high, end) - sums[:, :, low:high, None].to(work))
        dout = scores.fold(grad[:, :, low:high])
        dp = scores.unfold(matmul(dout, values[:, :, :end].transpose(-1, -2)))
        dv[:, :, :end] += matmul(scores.fold(scores.operand(p)).transpose(-1, -2), dout)
        ds = scores.fold(scores.operand(p * (dp - delta[:, :, low:high]) * scale))
        dq[:, :, low:high] = scores.unfold(matmul(ds, scores.k[:, :, :end]))
        dk[:, :, :end] += matmul(ds.transpose(-1, -2), scores.rows(low, high))
    return dense._like(dq, q, batch_first), dense._like(dk, k, batch_first), dense._like(dv, v, batch_first)


def _fp8_attention_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor | None, ends: Tensor | None,
    scale: float, causal: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# -------------------------------------------------------------------------------------------------------------------- on CUDA


def _launch(*args: Any) -> tuple[Tensor, Tensor]:
    from ottava.kernels import attention_fp8_triton

    return attention_fp8_triton.fp8_attention(*args)


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor | None, ends: Tensor | None,
    scale: float, causal: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The kernels that bf16 attention has: cuDNN's, or for packed documents the one by bounds."""
    if starts is not None:
        assert ends is not None
        of_log2 = sums * (1.0 / math.log(2.0))
        return documents._backward_op(grad, q, k, v, out, of_log2, starts, ends, scale, batch_first)
    by_head = [dense._by_head(x, batch_first) for x in (grad, q, k, v, out)]
    grads = torch_private.cudnn_attention_backward(by_head, sums, causal, scale)
    back = [x.transpose(1, 2) if batch_first else x.permute(2, 0, 1, 3) for x in grads]
    return back[0].contiguous(), back[1].contiguous(), back[2].contiguous()


_forward_op = define("fp8_attention", _fp8_attention, _fp8_attention_fake, _launch)
_backward_op = define("fp8_attention_backward", _fp8_attention_backward, _fp8_attention_backward_fake, _fused_backward)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, ends, scale, causal, batch_first, *_ = inputs
    ctx.save_for_backward(q, k, v, *output, starts, ends)
    ctx.options = (scale, causal, batch_first)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_backward_op(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 8


torch.library.register_autograd("ottava::fp8_attention", _backward, setup_context=_setup)


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    batch_first: bool,
    bounds: tuple[Tensor, Tensor] | None = None,
    peak: float = E4M3_MAX,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> Tensor:
    """Attention in the shape of q, in FP8 forward and the dtype of q backward.

    bounds: (starts, ends) of `attention_documents`, for causal attention within documents. peak, epsilon, power_of_two: of the scales.
    """
    starts, ends = (None, None) if bounds is None else bounds
    return _forward_op(q, k, v, starts, ends, scale, causal, batch_first, peak, epsilon, power_of_two)[0]
