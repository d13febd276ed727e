"""The sizes that `ottava bench layer` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the batch."""

    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    batch: int = 1
    sequence: int = 8192


SMALL = Shape(layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, batch=1, sequence=128)
