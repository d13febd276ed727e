"""What is added to the scores of attention: a user's bias, or ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.nn import attention_mask as masks
from ottava.nn.attention_request import Request

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


def check_bias(kind: str, bias: Tensor | None, slopes: Tensor | None, heads: int) -> None:
    """Names arguments of a call that do not go together, or with this rank's `heads`."""
    masks.one_of("core_attention_bias_type", kind, BIAS_TYPES)
    if (bias is not None) != (kind in ("pre_scale_bias", "post_scale_bias")):
        raise ValueError(
            f"core_attention_bias_type {kind!r} {'takes no' if bias is not None else 'needs a'} core_attention_bias."
        )
    if slopes is not None and kind != "alibi":
        raise ValueError(f"alibi_slopes are given, but core_attention_bias_type is {kind!r}: use 'alibi'.")
    if bias is not None and (bias.dim() != 4 or bias.shape[1] not in (1, heads)):
        raise ValueError(
            f"core_attention_bias must be broadcastable to [batch, heads, queries, keys], with {heads} heads of this rank, got "
            f"{tuple(bias.shape)}."
        )
    if slopes is not None and (slopes.dim() not in (1, 2) or slopes.shape[-1] != heads):
        raise ValueError(
            f"alibi_slopes must be [{heads}] or [batch, {heads}], one for each head of this rank, got {tuple(slopes.shape)}."
        )


def added_to_scores(
    request: Request, queries: int, keys: int, valid: masks.Valid | None, device: torch.device
) -> Tensor | None:
    """What is added to the scaled scores, broadcastable to [b, h, s, t]; None: nothing. `check_bias` has looked at the request."""
    if request.bias_type == "alibi":
        assert request.alibi_slopes is not None
        relative = masks.relative_positions(queries, keys, request.bottom_right, valid, device)
        return masks.alibi_bias(request.alibi_slopes, relative)
    if request.bias is None:
        return None
    return request.bias * request.scale if request.bias_type == "pre_scale_bias" else request.bias
