"""The one order in which partial results of ranks are added: whoever moves them, and in however many pieces they come."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_halves(parts: Tensor, bias: Tensor | None = None) -> Tensor:
    """parts [size, m, N] -> [m, N]: float32 additions, halves of the ranks first; then the bias, then one rounding.

    A row of the result depends on that row of the parts alone, so tokens may be summed in pieces.
    """
    wide = torch.promote_types(parts.dtype, torch.float32)
    terms = [part.to(wide) for part in parts]
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2])] + odd
    total = terms[0] if bias is None else terms[0] + bias.to(wide)
    return total.to(parts.dtype)
