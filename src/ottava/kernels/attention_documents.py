"""`ottava::document_attention`: causal attention within each of the documents of a row, told apart by where they begin and end.

A query sees one run of keys, from `starts` of its token to itself. Shapes: q [s, b, h, d], k and v [s, b, g, d], or with b first
(`batch_first`), any strides; starts, ends int32 [b, s], see `nn.attention_documents.document_bounds`. Nothing has the size of a mask, and
the number of documents is never asked for, so nothing waits for a GPU, and a captured graph serves any documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ottava.kernels import attention as dense
from ottava.kernels.registry import define


def _allowed(starts: Tensor) -> Tensor:
    """starts [b, s] -> [b, 1, s, s]: True from the beginning of a query's document to the query."""
    index = torch.arange(starts.shape[1], device=starts.device)
    return ((index[None, None, :] >= starts[:, :, None]) & (index[None, :] <= index[:, None]))[:, None]


def _document_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, scale: float, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """The result, and log2 of the sum of exp(score) over the keys of each query, float32 [b, h, s]."""
    allowed = _allowed(starts)
    out = dense.reference_attention(q, k, v, allowed, None, None, None, 1.0, scale, False, batch_first)
    scores = dense._Scores(q, k, allowed, None, None, scale, False, batch_first)
    sums = q.new_empty(scores.batch, scores.heads, scores.queries, dtype=torch.float32)
    for low, high, end in scores.blocks():
        sums[:, :, low:high] = scores.masked(low, high, end).logsumexp(-1) / math.log(2.0)
    return out, sums


def _document_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, scale: float, batch_first: bool
) -> tuple[Tensor, Tensor]:
    batch, length = starts.shape
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(batch, q.shape[2], length, dtype=torch.float32)


def _document_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: float,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. The reference makes the sums again."""
    dq, dk, dv, _, _ = dense.reference_attention_backward(
        grad, q, k, v, out, _allowed(starts), None, None, None, 1.0, scale, False, batch_first, False
    )
    return dq, dk, dv


def _document_attention_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _triton(name: str) -> Callable:
    """The Triton version of an op, imported at its first call."""

    def launch(*args: Any) -> Any:
        from ottava.kernels import attention_documents_triton

        return getattr(attention_documents_triton, name)(*args)

    return launch


_forward_op = define("document_attention", _document_attention, _document_attention_fake, _triton("document_attention"))
_backward_op = define(
    "document_attention_backward",
    _document_attention_backward,
    _document_attention_backward_fake,
    _triton("document_attention_backward"),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, ends, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, starts, ends)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_backward_op(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


torch.library.register_autograd("ottava::document_attention", _backward, setup_context=_setup)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, *, scale: float, batch_first: bool
) -> Tensor:
    """Attention of each token to the tokens of its document up to itself, in the shape of q."""
    return _forward_op(q, k, v, starts, ends, scale, batch_first)[0]
