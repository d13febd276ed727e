"""Optimizers that know FP8 storage, under the name TransformerEngine gives them."""

from ottava.optimizers.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
