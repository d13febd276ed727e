"""What programs ask TransformerEngine's compiled part about the machine. Ottava has none, and torch knows the answers."""

from __future__ import annotations

import torch

from ottava import torch_private

__all__ = ["device_supports_multicast", "get_stream_priority_range", "ubuf_built_with_mpi"]


def device_supports_multicast(device_id: int = -1) -> bool:
    """Whether one store of the GPU reaches all GPUs of a node (NVLink SHARP); -1 is the current one. False without a GPU."""
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch_private.has_multicast(device_id if device_id >= 0 else current)


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """(lowest, highest) priority of a CUDA stream; (0, 0) without a GPU."""
    return torch.cuda.Stream.priority_range() if torch.cuda.is_available() else (0, 0)  # type: ignore[call-arg]


def ubuf_built_with_mpi() -> bool:
    """False: ranks meet through torch.distributed."""
    return False
