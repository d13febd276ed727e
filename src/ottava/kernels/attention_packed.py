"""Attention over sequences that lie end to end, told apart by cumulative lengths: no padding, and no [s, s] mask.

q [t, h, d], k [u, g, d], v [u, g, d] with h a multiple of g; keys are not repeated over the queries that share them. Sequence i has the
queries cu_q[i] ... cu_q[i+1] - 1 and the keys cu_k[i] ... cu_k[i+1] - 1; empty sequences are allowed, so cumulative lengths may be
padded at the end with the number of tokens. The lengths stay on the device: nothing here waits for it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.attention_backend import flash4


@functools.cache
def _varlen() -> tuple[Any, dict[str, Any]]:
    """torch's module, imported where it is used, and what it has to be told about heads that share keys: torch 2.12 on asks for
    enable_gqa, 2.11 takes them as they are."""
    from torch.nn.attention import varlen

    asks = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
    return varlen, {"enable_gqa": True} if asks else {}


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    causal: bool,
    backend: str,
) -> Tensor:
    """[t, h, d]. `causal` aligns the last query of a sequence with its last key. cu_*: int32; longest_*: upper bounds of the lengths.

    backend: "flash" (FlashAttention 2, in torch) or "flash4", see `attention_backend`. Both have a backward of their own. The kernel
    "flash" starts a block for every 128 of `longest_q` in every sequence, so a tight bound is worth having.
    """
    if backend == "flash4":
        module = flash4()
        assert module is not None
        with torch.cuda.device(q.device):
            out, _ = module.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
                softmax_scale=scale, causal=causal,
            )  # fmt: skip
        return out
    varlen, shared = _varlen()
    window = (-1, 0) if causal else (-1, -1)
    longest_q = max(longest_q, 2)  # for one query a sequence torch takes another way, made for decoding
    return varlen.varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=window, **shared)
