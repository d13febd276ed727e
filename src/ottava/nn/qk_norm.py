"""Norms of queries and keys, head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.nn.attention_mask import one_of
from ottava.nn.layernorm import LayerNorm, RMSNorm

QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")


class L2Normalization(torch.nn.Module):
    """x / sqrt(sum(x^2) + eps) over the last dimension, in float32, without parameters.

    >>> L2Normalization()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return f"eps={self.eps}"


def qk_norms(
    kind: str | None, channels: int, eps: float, params_dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """A norm for queries and one for keys."""
    if kind is None:
        return None, None
    one_of("qk_norm_type", kind, QK_NORMS)
    if kind == "L2Normalization":
        return L2Normalization(eps), L2Normalization(eps)
    norm = RMSNorm if kind == "RMSNorm" else LayerNorm
    q, k = (norm(channels, eps=eps, params_dtype=params_dtype, device=device) for _ in range(2))
    return q, k
