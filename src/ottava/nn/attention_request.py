"""What a call of attention asks for: the names that are known, the tensors that fit, and the rest of its arguments in one value."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ottava.nn.attention_mask import one_of

FORMATS = ("sbhd", "bshd", "thd")

# Arguments of later TransformerEngine releases, with the value that asks for nothing.
_NOT_OFFERED: dict[str, Any] = {
    "fp8_output": False,
    "bf16_backward": False,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
    "qkv_layer": None,
    "kv_layer": None,
    "qkv_interleave_dim": -3,
    "g": None,
    "beta": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
}


class Sequences(NamedTuple):
    """Where sequences begin and end, as TransformerEngine's arguments of these names say."""

    cu_seqlens_q: Tensor | None
    """[b + 1], of the real tokens."""
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    """[b + 1], if padding lies between sequences."""
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    pad_between_seqs: bool | None


class Request(NamedTuple):
    """One call, beside its tensors: arguments of the call, or of the module where the call leaves them out, checked."""

    layout: str
    """One of `FORMATS`."""
    mask_type: str
    mask: Any
    """A bool tensor, a pair of them, `PackedDocuments` or None."""
    window: tuple[int, int]
    bottom_right: bool
    sequences: Sequences
    bias_type: str
    bias: Tensor | None
    """Broadcastable to [b, h, s, t]."""
    alibi_slopes: Tensor | None
    """[h] or [b, h]; there where bias_type is "alibi"."""
    scale: float
    """What scores are multiplied by."""
    recompute: bool
    """Backward makes again what forward would keep."""


def refuse_what_is_not_offered(others: dict[str, Any]) -> None:
    """others: arguments that the module has no name for."""
    for key, value in others.items():
        if one_of("DotProductAttention: argument", key, tuple(_NOT_OFFERED)) and value != _NOT_OFFERED[key]:
            raise ValueError(f"DotProductAttention does not offer {key}={value!r:.60}; leave it out.")


def refuse_context_parallel(cp_group: Any) -> None:
    """Context parallelism splits sequences over ranks, which the attention here does not do."""
    if cp_group is not None:
        raise ValueError("context parallelism is not offered: attention runs over whole sequences on each rank.")


def check_heads(heads: int, groups: int, tp_size: int) -> None:
    """Heads must divide evenly into groups, and both over the tensor-parallel ranks."""
    if heads <= 0 or groups <= 0 or heads % groups:
        raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_gqa_groups ({groups}).")
    if heads % tp_size or groups % tp_size:
        raise ValueError(
            f"num_attention_heads ({heads}) and num_gqa_groups ({groups}) must be multiples of the tensor-parallel size ({tp_size})."
        )


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, layout: str, heads: int, groups: int, channels: int, value_channels: int
) -> None:
    """Names the tensor whose shape does not fit the module, rather than leaving it to a matrix product."""
    dims = 3 if layout == "thd" else 4
    wanted = (
        ("query_layer", q, heads, channels),
        ("key_layer", k, groups, channels),
        ("value_layer", v, groups, value_channels),
    )
    for what, x, count, width in wanted:
        if x.dim() != dims or tuple(x.shape[-2:]) != (count, width):
            raise ValueError(
                f"{what} for qkv_format {layout!r} must have {dims} dimensions ending in [{count}, {width}] (heads, channels), "
                f"got {tuple(x.shape)}."
            )
    batch_dim = 1 if layout == "sbhd" else 0
    if k.shape[:-2] != v.shape[:-2] or (layout != "thd" and q.shape[batch_dim] != k.shape[batch_dim]):
        raise ValueError(
            f"query, key and value must agree in batch, key and value in length: {layout} got {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}."
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"query, key and value must have one dtype and device, got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
            f"{v.dtype} on {v.device}."
        )
