"""`SymmetricMemory`: copies between GPUs by their copy engines, on streams of their own."""

from __future__ import annotations

from typing import Any

import torch

from ottava.overlap.transport import Transport


def missing_because(group: Any, device: torch.device) -> str | None:
    """Why a group has no symmetric memory; None if it has."""
    return f"tensors lie on {device.type}, and it is CUDA's" if device.type != "cuda" else "not written yet"


class SymmetricMemory(Transport):
    """Buffers that all ranks of a group can write."""

    def __init__(self, group: Any, device: torch.device) -> None:
        raise NotImplementedError
