"""Which tokens of a batch are real: padding by masks or by lengths, and packed sequences as a padded batch."""

from __future__ import annotations

from torch import Tensor

from ottava.nn import attention_mask as masks
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.attention_request import Request


def valid_of_batch(request: Request, q: Tensor, k: Tensor) -> masks.Valid | None:
    """Which tokens of a padded batch, "sbhd" or "bshd", are real; None where the mask type has no padding."""
    mask_type, attention_mask = request.mask_type, request.mask
    cu_seqlens_q, cu_seqlens_kv = request.sequences[:2]
    if "padding" not in mask_type:
        if cu_seqlens_q is not None or cu_seqlens_kv is not None:
            raise ValueError(
                f"cu_seqlens are given, but attn_mask_type {mask_type!r} has no padding: use a padding mask type."
            )
        return None
    seq_dim, batch_dim = (1, 0) if request.layout == "bshd" else (0, 1)
    queries, keys, batch = q.shape[seq_dim], k.shape[seq_dim], q.shape[batch_dim]
    assert not isinstance(attention_mask, PackedDocuments)  # which goes with "arbitrary" only
    if attention_mask is not None:
        if cu_seqlens_q is not None or cu_seqlens_kv is not None:
            raise ValueError("padding is given twice: pass either attention_mask or cu_seqlens_q and cu_seqlens_kv.")
        return masks.valid_from_masks(attention_mask, batch, queries, keys)
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        raise ValueError(
            f"attn_mask_type {mask_type!r} needs attention_mask, or cu_seqlens_q and cu_seqlens_kv, to know the padding."
        )
    if cu_seqlens_q.shape != (batch + 1,) or cu_seqlens_kv.shape != (batch + 1,):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_kv must be [batch + 1] = [{batch + 1}], got {tuple(cu_seqlens_q.shape)} and "
            f"{tuple(cu_seqlens_kv.shape)}."
        )
    same = cu_seqlens_q is cu_seqlens_kv
    return masks.valid_from_lengths(
        queries, keys, masks.lengths_of(cu_seqlens_q), masks.lengths_of(cu_seqlens_kv), same
    )


def unpacked(
    request: Request, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, masks.Valid, masks.Packed]:
    """Packed sequences [t, h, d] as a padded batch [b, s, h, d], which tokens of it are real, and the way back."""
    cu_q, cu_kv, cu_q_padded, cu_kv_padded, max_q, max_kv, pad_between_seqs = request.sequences
    if "padding" not in request.mask_type:
        raise ValueError(
            f"qkv_format 'thd' needs a padding mask type, got {request.mask_type!r}: use 'padding_causal' or 'padding'."
        )
    if request.mask is not None:
        raise ValueError(
            "qkv_format 'thd' takes its padding from cu_seqlens_q and cu_seqlens_kv, not from attention_mask."
        )
    if pad_between_seqs and (cu_q_padded is None or cu_kv_padded is None):
        raise ValueError("pad_between_seqs=True needs cu_seqlens_q_padded and cu_seqlens_kv_padded.")
    of_q = masks.packed(cu_q, cu_q_padded, max_q, q.shape[0], "q")
    of_k = masks.packed(cu_kv, cu_kv_padded, max_kv, k.shape[0], "kv")
    if of_q.lengths.shape != of_k.lengths.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_kv must describe as many sequences, got {of_q.lengths.numel()} and "
            f"{of_k.lengths.numel()}."
        )
    q, k, v = of_q.spread(q), of_k.spread(k), of_k.spread(v)
    valid = masks.valid_from_lengths(q.shape[1], k.shape[1], of_q.lengths, of_k.lengths, cu_q is cu_kv)
    return q, k, v, valid, of_q
