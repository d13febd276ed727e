"""A zero for a kernel to raise: most kernels that find an amax want one, and a fill of its own for each is a launch of a few microseconds.

Many are made by one fill, each on an address that 16 divides, and handed out once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava import torch_private

COUNT = 256
_LEFT: dict[tuple[int, int], list[Tensor]] = {}
"""By device and stream: the fill is launched there, so what comes after on the same stream finds zeros."""


_SCRATCH: dict[int, Tensor] = {}


def scratch_like(x: Tensor) -> Tensor:
    """float32 [1] where x is, the same one each time: for a kernel to raise that finds an amax which nobody wants."""
    device = x.get_device()
    found = _SCRATCH.get(device)
    if found is None:
        with torch.inference_mode(False):
            found = _SCRATCH[device] = x.new_zeros(1, dtype=torch.float32)
    return found


def zero_like(x: Tensor) -> Tensor:
    """float32 [1], zero, where x is: for kernels of the current stream, and nobody else's.

    >>> zero_like(torch.empty(3, device="cuda"))
    tensor([0.], device='cuda:0')
    """
    # A graph has to fill anew whenever it is replayed, and a tensor that is made under inference_mode cannot be saved for a backward.
    if not x.is_cuda or torch_private.is_capturing() or torch.is_inference_mode_enabled():
        return x.new_zeros(1, dtype=torch.float32)
    device = x.get_device()
    key = (device, torch_private.current_stream(device))
    left = _LEFT.get(key)
    if not left:
        # `data`: views that autograd takes for tensors of their own, so that who changes one (a MAX over ranks) changes no other's version.
        left = _LEFT[key] = [one.data for one in x.new_zeros(COUNT, 4, dtype=torch.float32)[:, :1].unbind()]
    return left.pop()
