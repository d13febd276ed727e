"""Checks that the configurations of all models share."""

from __future__ import annotations

from typing import Any


def check_positive(config: Any, *names: str) -> None:
    """Each of the fields must be above 0."""
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{type(config).__name__}: {name} must be positive, got {getattr(config, name)}.")


def check_shape(config: Any) -> None:
    """What every transformer needs."""
    sizes = ("vocab_size", "hidden_size", "ffn_hidden_size", "layers", "heads", "max_length", "pad_vocab_to")
    check_positive(config, *sizes)
    if config.hidden_size % config.heads:
        raise ValueError(
            f"{type(config).__name__}: hidden_size ({config.hidden_size}) must be a multiple of heads ({config.heads})."
        )
    if config.init_std < 0:
        raise ValueError(f"{type(config).__name__}: init_std must not be negative, got {config.init_std}.")
