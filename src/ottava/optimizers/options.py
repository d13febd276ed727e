"""What an optimizer is made with, and which numbers make sense."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Options:
    """What holds for the whole optimizer. (What may differ between groups is in `param_groups`.)"""

    adam_w_mode: bool
    capturable: bool
    master_weights: bool
    use_decoupled_grad: bool
    store_param_remainders: bool
    stochastic_rounding: bool = False
    seed: int = 0


def check_numbers(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Of a parameter group."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"FusedAdam: lr as a tensor must have one element, got shape {tuple(lr.shape)}.")
    if not isinstance(lr, Tensor) and not lr >= 0.0:
        raise ValueError(f"FusedAdam: lr must be at least 0, got {lr}.")
    if not (len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)):
        raise ValueError(f"FusedAdam: betas must be two numbers in [0, 1), got {betas}.")
    if not eps >= 0.0:
        raise ValueError(f"FusedAdam: eps must be at least 0, got {eps}.")
    if not weight_decay >= 0.0:
        raise ValueError(f"FusedAdam: weight_decay must be at least 0, got {weight_decay}.")
