"""Attention of sequences that lie end to end, by kernels that need no mask: documents in rows, and "thd"; in FP8 or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.kernels import attention_backend as backends
from ottava.kernels.attention_documents import document_attention
from ottava.kernels.attention_packed import packed_attention
from ottava.nn import attention_fp8 as fp8
from ottava.nn import attention_mask as masks
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.attention_request import Request
from ottava.nn.random_replay import perhaps_again


def attend_packed(
    request: Request, q: Tensor, k: Tensor, v: Tensor, asked: fp8.Asked | None, maskless: bool
) -> Tensor | None:
    """What the module returns; None where none of the kernels does what is asked for: a mask does it then.

    asked: whether FP8 is asked for. maskless: nothing is asked for that only a mask's way does.
    """
    if isinstance(request.mask, PackedDocuments):
        return _attend_documents(request, q, k, v, asked, maskless)
    if "padding" not in request.mask_type or request.mask is not None:
        return None  # which is an error, and the padded way explains it
    if asked is not None:
        out = _sequences_fp8(request, q, k, v, asked)
        if out is not None:
            return out
    return _sequences_by_lengths(request, q, k, v) if maskless else None


# -------------------------------------------------------------------------------------------------------- documents in rows


def _attend_documents(
    request: Request, q: Tensor, k: Tensor, v: Tensor, asked: fp8.Asked | None, maskless: bool
) -> Tensor | None:
    """[s, b, h * d] or [b, s, h * d]."""
    _check_documents(request, q, k)
    if asked is not None:
        out = _documents_fp8(request, q, k, v, asked)
        if out is not None:
            return out
    if not maskless or not backends.varlen_fits(q, k, v):
        return None
    backend = documents_backend(q, k, v, request.mask)
    if backend == "triton":
        return _documents_by_bounds(request, q, k, v)
    return _documents_by_lengths(request, q, k, v, backend)


def _check_documents(request: Request, q: Tensor, k: Tensor) -> None:
    mask_type, layout = request.mask_type, request.layout
    if mask_type != "arbitrary" or layout == "thd":
        raise ValueError(
            f"PackedDocuments goes with attn_mask_type 'arbitrary' and qkv_format 'sbhd' or 'bshd', got {mask_type!r} and {layout!r}."
        )
    seq_dim, batch_dim = (1, 0) if layout == "bshd" else (0, 1)
    if request.sequences.cu_seqlens_q is not None or request.sequences.cu_seqlens_kv is not None:
        raise ValueError(
            "PackedDocuments knows where its documents lie: pass no cu_seqlens_q and cu_seqlens_kv beside it."
        )
    request.mask.check(q.shape[batch_dim], q.shape[seq_dim], k.shape[seq_dim])


def _documents_fp8(request: Request, q: Tensor, k: Tensor, v: Tensor, asked: fp8.Asked) -> Tensor | None:
    """In FP8; None where it does not run."""
    documents: PackedDocuments = request.mask
    options: dict[str, Any] = {"causal": True, "batch_first": request.layout == "bshd", "scale": request.scale}
    if not fp8.runs(asked.obstacle or fp8.unfit(q, k, v, kind="packed", queries=documents.length, **options)):
        return None
    return fp8.attend(asked.scales, q, k, v, documents.bounds(), options, request.recompute).flatten(-2)


def _documents_by_bounds(request: Request, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the first and last position of each token's document."""
    scale, batch_first = request.scale, request.layout == "bshd"
    starts, ends = request.mask.bounds()

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention(q, k, v, starts, ends, scale=scale, batch_first=batch_first)

    return perhaps_again(core, request.recompute, q, k, v).flatten(-2)


def _documents_by_lengths(request: Request, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    """By their cumulative lengths, which the host knows."""
    documents: PackedDocuments = request.mask
    scale, batch_first = request.scale, request.layout == "bshd"
    offsets, longest = documents.cu_seqlens, documents.longest
    assert offsets is not None and longest is not None

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Rows end to end. With one row, or the batch first, a view; else a copy of each, 0.1 ms a layer for 4x4096 at 2048 channels.
        flat = [(x if batch_first else x.transpose(0, 1)).reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        out = packed_attention(
            flat[0], flat[1], flat[2], offsets, offsets, longest, longest,
            scale=scale, causal=True, backend=backend,
        ).view(documents.batch, documents.length, *q.shape[2:])  # fmt: skip
        return out if batch_first else out.transpose(0, 1)

    return perhaps_again(core, request.recompute, q, k, v).flatten(-2)


def documents_backend(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments) -> str:
    """The kernel for packed documents: "triton" where the host does not know their lengths, or when it is asked for."""
    if torch.compiler.is_compiling():
        return "triton"
    chosen = "triton"
    if documents.cu_seqlens is not None and backends.forced() != "triton":
        chosen = backends.packed_backend(q, k, v) or "triton"
    backends.say_once(f"ottava: attention of packed documents with heads of {q.shape[-1]} channels uses {chosen}.")
    return chosen


# -------------------------------------------------------------------------------------------------------------------- "thd"


def _packing_beyond_fp8(request: Request) -> str | None:
    """What FP8 does not do of "thd", if it is asked for: it does causal attention of sequences to themselves, end to end."""
    cu_q, cu_kv, cu_q_padded, cu_kv_padded, _, _, pad_between = request.sequences
    if cu_q_padded is not None or cu_kv_padded is not None or (pad_between is not None and pad_between is not False):
        return "there is padding between packed sequences"
    if "causal" not in request.mask_type:
        return f"packed sequences have the mask type {request.mask_type!r}, and it knows causal ones"
    return None if cu_q is cu_kv else "cu_seqlens_q and cu_seqlens_kv are two tensors: pass one for both"


def _sequences_fp8(request: Request, q: Tensor, k: Tensor, v: Tensor, asked: fp8.Asked) -> Tensor | None:
    """In FP8, [t, h * d]; None where it does not run. Tokens after the last sequence give 0."""
    options: dict[str, Any] = {"causal": True, "batch_first": True, "scale": request.scale}
    obstacle = asked.obstacle or _packing_beyond_fp8(request)
    if not fp8.runs(obstacle or fp8.unfit(q, k, v, kind="packed", queries=q.shape[0], **options)):
        return None
    offsets, longest = request.sequences.cu_seqlens_q, request.sequences.max_seqlen_q
    masks.packed(offsets, None, q.shape[0] if longest is None else longest, q.shape[0], "q")  # names wrong ones
    assert offsets is not None
    real = masks.before(offsets[-1], q)
    # What lies after the last sequence may be anything, and would decide on the scales.
    q, k, v = (torch.where(real, x, x.new_zeros(()))[None] for x in (q, k, v))
    bounds = masks.bounds_of(offsets, q.shape[1])
    out = fp8.attend(asked.scales, q, k, v, bounds, options, request.recompute)[0]
    return torch.where(real, out, out.new_zeros(())).flatten(-2)


def _sequences_by_lengths(request: Request, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """By cumulative lengths, [t, h * d]; None where the kernel does not do it. Tokens after the last sequence give 0."""
    cu_q, cu_kv, cu_q_padded, cu_kv_padded, max_q, max_kv, pad_between = request.sequences
    scale, causal = request.scale, "causal" in request.mask_type
    level = request.bottom_right or cu_q is cu_kv or not causal  # which corner: the same
    if cu_q_padded is not None or cu_kv_padded is not None or pad_between or not level:
        return None
    backend = backends.packed_backend(q, k, v)
    if backend is None:
        return None
    of_q = masks.packed(cu_q, None, max_q, q.shape[0], "q")
    of_k = of_q if cu_kv is cu_q else masks.packed(cu_kv, None, max_kv, k.shape[0], "kv")
    if of_q.lengths.shape != of_k.lengths.shape:
        return None  # the padded way explains it
    assert cu_q is not None and cu_kv is not None
    offsets_q, offsets_k = cu_q.to(torch.int32), cu_kv.to(torch.int32)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # No kernel writes what lies after the last sequence, in forward or backward: whatever memory held would be a gradient.
        real_q, real_k = masks.before(offsets_q[-1], q), masks.before(offsets_k[-1], k)
        q, k, v = (torch.where(r, x, x.new_zeros(())) for r, x in ((real_q, q), (real_k, k), (real_k, v)))
        out = packed_attention(
            q, k, v, offsets_q, offsets_k, of_q.longest, of_k.longest,
            scale=scale, causal=causal, backend=backend,
        )  # fmt: skip
        return torch.where(real_q, out, out.new_zeros(()))

    return perhaps_again(core, request.recompute, q, k, v).flatten(-2)
