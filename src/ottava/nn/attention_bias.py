"""What is added to the scores of attention: a user's bias, or ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.nn import attention_mask as masks
from ottava.nn.attention_request import Request

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


def added_to_scores(
    request: Request, heads: int, queries: int, keys: int, valid: masks.Valid | None, device: torch.device
) -> Tensor | None:
    """What is added to the scaled scores, broadcastable to [b, h, s, t]. heads: of the whole model."""
    kind, bias, slopes = request.bias_type, request.bias, request.alibi_slopes
    masks.one_of("core_attention_bias_type", kind, BIAS_TYPES)
    if (bias is not None) != (kind in ("pre_scale_bias", "post_scale_bias")):
        raise ValueError(
            f"core_attention_bias_type {kind!r} {'takes no' if bias is not None else 'needs a'} core_attention_bias."
        )
    if slopes is not None and kind != "alibi":
        raise ValueError(f"alibi_slopes are given, but core_attention_bias_type is {kind!r}: use 'alibi'.")
    if kind == "alibi":
        if slopes is None:
            slopes = masks.default_alibi_slopes(heads, device)
        relative = masks.relative_positions(queries, keys, request.bottom_right, valid, device)
        return masks.alibi_bias(slopes, relative)
    if bias is not None and bias.dim() != 4:
        raise ValueError(
            f"core_attention_bias must be broadcastable to [batch, heads, queries, keys], got {tuple(bias.shape)}."
        )
    return bias * request.scale if kind == "pre_scale_bias" and bias is not None else bias
