"""`initialize_ub` and `destroy_ub`, which scripts written for TransformerEngine call around overlapped tensor parallelism.

There they allocate the communication buffers that `ub_*` switches of modules need. Ottava's collectives need none: they travel
through the process group. So these two check what they are given, and remember that they were called.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

__all__ = ["UserBufferQuantizationMode", "destroy_ub", "initialize_ub", "is_ub_initialized"]


class UserBufferQuantizationMode(Enum):
    """What travels: tensors in the activation dtype, or FP8 bytes."""

    NONE = "none"
    FP8 = "fp8"


_SHAPE: list[tuple[int, ...]] = []


def initialize_ub(
    shape: list[int] | tuple[int, ...],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict[str, Any] | list[dict[str, Any]] | None = None,
    bootstrap_backend: str | None = None,
) -> None:
    """shape: [tokens, hidden] of the layers' input, of which each of `tp_size` ranks has an equal part. The rest is accepted.

    >>> ottava.distributed.initialize_ub([4096, 1024], tp_size=2)
    """
    if _SHAPE:
        raise ValueError(f"initialize_ub was called already, with shape {list(_SHAPE[0])}: call destroy_ub() first.")
    if len(shape) != 2 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"initialize_ub: shape must be [tokens, hidden], got {shape!r}.")
    if not isinstance(tp_size, int) or tp_size < 1 or shape[0] % tp_size:
        raise ValueError(f"initialize_ub: {shape[0]} tokens cannot be split evenly over tp_size={tp_size!r} ranks.")
    _SHAPE.append(tuple(shape))


def destroy_ub() -> None:
    """Undoes `initialize_ub`.

    >>> ottava.distributed.destroy_ub()
    """
    _SHAPE.clear()


def is_ub_initialized() -> bool:
    """Between `initialize_ub` and `destroy_ub`."""
    return bool(_SHAPE)
