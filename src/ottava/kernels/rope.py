"""Rotary position embedding: `ottava::rope`, and `ottava::split_qkv` / `ottava::merge_qkv`, which rotate on the way.

A pair of channels (a, b) of a head at position p is turned by the angle f[p]: a' = a cos f - b sin f, b' = b cos f + a sin f,
in float32, rounded once. The pairs are (i, i + rot/2), or (2i, 2i+1) when interleaved; channels from `rot` on pass through.
The gradient is the transposed rotation, so backward needs the angles and never the values.

Angles are [rows, rot], or, on a GPU, their cosines and sines [2, rows, rot], which `tables` makes once for all layers: the kernels would
else make them again in every call.
Tokens are flat in all ops. The row of the angle table of token t is `positions[t]`, or `(t // seq_stride) % seq_len`
(seq_stride is the batch size for sbhd, 1 for bshd).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.registry import define

QueryKeyValue = tuple[Tensor, Tensor, Tensor]


# --------------------------------------------------------------------------------------------------------- the arithmetic


def table_rows(tokens: int, positions: Tensor | None, seq_stride: int, seq_len: int, device: torch.device) -> Tensor:
    """Row of the angle table for each token, [tokens]."""
    if positions is not None:
        return positions
    return (torch.arange(tokens, device=device) // max(seq_stride, 1)) % max(seq_len, 1)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second channel of every pair, each [..., rot/2], as views of x [..., rot]."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def rotate(x: Tensor, freqs: Tensor, rows: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    """x [T, heads, d] turned by the angles freqs[rows] [T, rot]; contiguous, in x's dtype."""
    rot = freqs.shape[-1]
    work = torch.promote_types(x.dtype, torch.float32)
    if freqs.dim() == 3:
        cosine, sine = (table.to(work)[rows][:, None] for table in freqs)
    else:
        angle = freqs.to(work)[rows][:, None]  # [T, 1, rot]
        cosine, sine = torch.cos(angle), torch.sin(angle)
    cos, sin = _pairs(cosine, interleaved), _pairs(sine, interleaved)
    out = x.to(work, copy=True, memory_format=torch.contiguous_format)
    a, b = _pairs(x[..., :rot].to(work), interleaved)
    to_a, to_b = _pairs(out[..., :rot], interleaved)
    if transposed:
        to_a.copy_(a * cos[0] + b * sin[1])
        to_b.copy_(b * cos[1] - a * sin[0])
    else:
        to_a.copy_(a * cos[0] - b * sin[0])
        to_b.copy_(b * cos[1] + a * sin[1])
    return out.to(x.dtype)


def tables(angles: Tensor) -> Tensor:
    """angles [rows, rot] -> their cosines and sines, float32 [2, rows, rot]."""
    angles = angles.float()
    return torch.stack([torch.cos(angles), torch.sin(angles)])


# -------------------------------------------------------------------------------------------------------------------- rope


def _rope(
    x: Tensor,
    freqs: Tensor,
    positions: Tensor | None,
    seq_stride: int,
    seq_len: int,
    interleaved: bool,
    transposed: bool,
) -> Tensor:
    rows = table_rows(x.shape[0], positions, seq_stride, seq_len, x.device)
    return rotate(x, freqs, rows, interleaved, transposed)


def _rope_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _triton(name: str, reference: Callable) -> Callable:
    """The Triton version of an op, imported at its first call. Its arithmetic is float32, so float64 stays with the reference."""

    def launch(*args: Any) -> Any:
        import ottava.kernels.rope_triton as rope_triton

        return (reference if args[0].dtype is torch.float64 else getattr(rope_triton, name))(*args)

    return launch


rope = define("rope", _rope, _rope_fake, _triton("rope", _rope))


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, freqs, positions, *ctx.options = inputs
    ctx.save_for_backward(freqs, positions)


def _rope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    freqs, positions = ctx.saved_tensors
    *where, transposed = ctx.options
    return rope(grad, freqs, positions, *where, not transposed), None, None, None, None, None, None


torch.library.register_autograd("ottava::rope", _rope_backward, setup_context=_rope_setup)


# --------------------------------------------------------------------------------------------------- split and merge qkv


def _parts(qkv: Tensor, heads: int, groups: int, by_group: bool) -> QueryKeyValue:
    """Views of q [T, g, r, d], k [T, g, 1, d] and v [T, g, 1, d] in qkv [T, (heads + 2 groups) d]; r = heads / groups."""
    tokens, share = qkv.shape[0], heads // groups
    dim = qkv.shape[1] // (heads + 2 * groups)
    if by_group:
        q, k, v = qkv.view(tokens, groups, share + 2, dim).split([share, 1, 1], dim=2)
    else:
        q, k, v = qkv.view(tokens, heads + 2 * groups, dim).split([heads, groups, groups], dim=1)
        q, k, v = q.unflatten(1, (groups, share)), k.unflatten(1, (groups, 1)), v.unflatten(1, (groups, 1))
    return q, k, v


def _split_qkv(
    qkv: Tensor,
    freqs_q: Tensor | None,
    freqs_k: Tensor | None,
    positions: Tensor | None,
    seq_stride: int,
    seq_len: int,
    heads: int,
    groups: int,
    by_group: bool,
    interleaved: bool,
    batch: int = 1,
) -> QueryKeyValue:
    """batch > 1: the tokens of qkv lie as [s, batch], those of q, k and v as [batch, s], each row together."""
    tokens = qkv.shape[0]
    rows = table_rows(tokens, positions, seq_stride, seq_len, qkv.device)
    parts = [
        part.reshape(tokens, -1, part.shape[-1]) for part in _parts(qkv.contiguous(), heads, groups, by_group)
    ]  # q [T, heads, d], k [T, groups, d], v [T, groups, d]
    q, k, v = (
        part.clone(memory_format=torch.contiguous_format)
        if freqs is None
        else rotate(part, freqs, rows, interleaved, False)
        for part, freqs in zip(parts, (freqs_q, freqs_k, None), strict=True)
    )
    return (q, k, v) if batch == 1 else (_turned_over(q, batch), _turned_over(k, batch), _turned_over(v, batch))


def _turned_over(x: Tensor, rows: int) -> Tensor:
    """[n * rows, ...] -> [rows * n, ...]: from n runs of `rows` tokens to `rows` runs of n."""
    return x.unflatten(0, (-1, rows)).transpose(0, 1).flatten(0, 1)


def _split_qkv_fake(
    qkv: Tensor,
    freqs_q: Tensor | None,
    freqs_k: Tensor | None,
    positions: Tensor | None,
    seq_stride: int,
    seq_len: int,
    heads: int,
    groups: int,
    by_group: bool,
    interleaved: bool,
    batch: int = 1,
) -> QueryKeyValue:
    dim = qkv.shape[1] // (heads + 2 * groups)
    q, k, v = (qkv.new_empty(qkv.shape[0], count, dim) for count in (heads, groups, groups))
    return q, k, v


def _merge_qkv(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    freqs_q: Tensor | None,
    freqs_k: Tensor | None,
    positions: Tensor | None,
    seq_stride: int,
    seq_len: int,
    by_group: bool,
    interleaved: bool,
    batch: int = 1,
) -> Tensor:
    tokens, heads, dim = dq.shape
    groups = dk.shape[1]
    if batch > 1:
        dq, dk, dv = (_turned_over(x, tokens // batch) for x in (dq, dk, dv))
    rows = table_rows(tokens, positions, seq_stride, seq_len, dq.device)
    out = dq.new_empty(tokens, (heads + 2 * groups) * dim)
    grads = zip(_parts(out, heads, groups, by_group), (dq, dk, dv), (freqs_q, freqs_k, None), strict=True)
    for part, grad, freqs in grads:
        turned = grad if freqs is None else rotate(grad, freqs, rows, interleaved, True)
        part.copy_(turned.unflatten(1, part.shape[1:3]))
    return out


def _merge_qkv_fake(dq: Tensor, dk: Tensor, *_: Any) -> Tensor:
    tokens, heads, dim = dq.shape
    return dq.new_empty(tokens, (heads + 2 * dk.shape[1]) * dim)


split_qkv = define("split_qkv", _split_qkv, _split_qkv_fake, _triton("split_qkv", _split_qkv))
merge_qkv = define("merge_qkv", _merge_qkv, _merge_qkv_fake, _triton("merge_qkv", _merge_qkv))


def _split_setup(ctx: Any, inputs: tuple[Any, ...], output: QueryKeyValue) -> None:
    _, freqs_q, freqs_k, positions, seq_stride, seq_len, _, _, by_group, interleaved, batch = inputs
    ctx.save_for_backward(freqs_q, freqs_k, positions)
    ctx.options = (seq_stride, seq_len, by_group, interleaved, batch)


def _split_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    return merge_qkv(dq, dk, dv, *ctx.saved_tensors, *ctx.options), *(None,) * 10


torch.library.register_autograd("ottava::split_qkv", _split_backward, setup_context=_split_setup)
