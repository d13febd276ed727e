"""Which states may be saved and gone back to: those whose every number is finite. A checkpoint of another is worse than none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ottava.checkpoint.boxes import part_of
from ottava.checkpoint.flat import flatten


def non_finite(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of which this rank holds a number that is not finite. One wait for the device.

    >>> non_finite({"w": torch.tensor([1.0, torch.inf]), "step": 3})
    ['w']
    """
    names: list[str] = []
    fine: list[Tensor] = []
    for name, leaf in flatten(state).tensors.items():
        for _, view in part_of(name, leaf).views:
            if view.is_floating_point() and view.numel():
                # The ends of a tensor with a NaN in it are NaN. FP8 has no order of its own.
                least, most = torch.aminmax(view.float() if view.element_size() == 1 else view)
                names.append(name)
                fine.append(torch.stack([least, most]).isfinite().all())
    devices = {flag.device for flag in fine}  # optimizers keep counts on the CPU
    read = {device: iter(torch.stack([f for f in fine if f.device == device]).tolist()) for device in devices}
    return sorted({name for name, flag in zip(names, fine) if not next(read[flag.device])})
