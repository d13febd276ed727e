"""TransformerEngine's functions beside its modules: a loss, the order of gated weights, initial values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ottava.distributed.cross_entropy import vocab_parallel_cross_entropy

__all__ = [
    "deinterleave_glu_tensor",
    "init_method_normal",
    "interleave_glu_tensor",
    "parallel_cross_entropy",
    "scaled_init_method_normal",
]


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """`vocab_parallel_cross_entropy` of `ottava.distributed.cross_entropy` by its name there: a loss a token, or the mean of those that are
    not ignored (`reduce_loss`). is_cg_capturable: it always is."""
    return vocab_parallel_cross_entropy(
        inp,
        target,
        dist_process_group,
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
    )


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """An `init_method`: normal with deviation `sigma`."""
    return lambda tensor: nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """An `output_layer_init_method`: normal with deviation sigma / sqrt(2 num_layers)."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Rows [gate | up] -> interleave_size rows of the gate, as many of up, and so on."""
    _check_rows(tensor, interleave_size)
    return tensor.unflatten(0, (2, -1, interleave_size)).transpose(0, 1).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Undoes `interleave_glu_tensor`: rows [gate | up], as `LayerNormMLP` has them."""
    _check_rows(tensor, interleave_size)
    return tensor.unflatten(0, (-1, 2, interleave_size)).transpose(0, 1).reshape(tensor.shape)


def _check_rows(tensor: Tensor, size: int) -> None:
    if size < 1 or tensor.shape[0] % (2 * size):
        raise ValueError(
            f"{tensor.shape[0]} rows cannot be gate and up in pieces of interleave_size={size}: give a multiple of {2 * size} rows."
        )
