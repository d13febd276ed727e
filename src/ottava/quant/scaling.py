"""amax -> scale, one function a rule. Plain torch on any device; the arithmetic is exact and recorded in docs/numerics.md.

Division is tensor by tensor throughout: torch turns `448.0 / tensor` into a reciprocal and a product, which rounds twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max


def amax_of(x: Tensor, dim: tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """max(|x|) as float32, ignoring NaN; 0 for an empty tensor. Over all elements: shape [1]."""
    magnitude = torch.nan_to_num(x.detach().abs().float(), nan=0.0, posinf=float("inf"))
    if dim is None:
        return magnitude.amax().reshape(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)
    return magnitude.amax(dim=dim, keepdim=keepdim)


def round_down_to_power_of_two(scale: Tensor) -> Tensor:
    """Clears the mantissa bits."""
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)  # 0xFF800000


def scale_from_amax(
    amax: Tensor, fp8_max: float, epsilon: float, power_of_two: bool, inf_value: float = FLOAT32_MAX
) -> Tensor:
    """The scale that maps `amax` to `fp8_max`. 1 where amax is 0 or not finite; `inf_value` where the quotient overflows."""
    if epsilon:
        amax = amax.clamp_min(epsilon)
    usable = torch.isfinite(amax) & (amax > 0)
    scale = torch.full_like(amax, fp8_max) / torch.where(usable, amax, torch.ones_like(amax))
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, inf_value), scale)
    if power_of_two:
        scale = round_down_to_power_of_two(scale)
    return torch.where(usable, scale, torch.ones_like(scale))


def e8m0_from_amax(amax: Tensor, fp8_max: float) -> Tensor:
    """Biased exponent (uint8) of the smallest power of two that is at least `amax / fp8_max`, as MXFP8 stores it."""
    ratio = amax * torch.full_like(amax, fp8_max).reciprocal()
    bits = ratio.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    round_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + round_up.int()).clamp_max(254)
    return torch.where(ratio == 0, torch.zeros_like(exponent), exponent).to(torch.uint8)


def delayed_update(
    history: Tensor, scale: Tensor, window: int, fp8_max: float, margin: int, most_recent: bool
) -> tuple[Tensor, Tensor]:
    """One step of delayed scaling: (new history, new scale).

    history: [L, n] float32, of which rows 0..window-1 are in use; row 0 holds the running amax of this step. scale: [n] float32.
    Columns that recorded nothing (row 0 is zero) neither roll nor change. The window includes the row that drops out now.
    """
    used = history[:window]
    newest = used[0]
    amax = newest if most_recent else used.amax(dim=0)
    scale = delayed_scale(amax, scale, fp8_max, margin)
    return roll_history(history, window), scale


def delayed_scale(amax: Tensor, scale: Tensor, fp8_max: float, margin: int) -> Tensor:
    """`fp8_max / 2^margin / amax` where amax is finite and positive, else the old scale."""
    usable = torch.isfinite(amax) & (amax > 0)
    fresh = torch.full_like(amax, fp8_max / 2**margin) / torch.where(usable, amax, torch.ones_like(amax))
    fresh = torch.where(torch.isinf(fresh), torch.full_like(fresh, FLOAT32_MAX), fresh)
    return torch.where(usable, fresh, scale)


def roll_history(history: Tensor, window: int) -> Tensor:
    """Moves each recorded column up by one inside the window: the newest goes to the end, the oldest drops, row 0 becomes 0."""
    used = history[:window]
    rolled = torch.cat([torch.zeros_like(used[:1]), used[2:], used[:1]]) if window > 1 else torch.zeros_like(used)
    used = torch.where(used[0] != 0, rolled, used)
    return torch.cat([used, history[window:]])
