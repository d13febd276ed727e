"""A model whose forward runs under `torch.autocast`, whoever calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def multiply_in(model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
    """Makes forward passes of `model` multiply in `dtype`; None and float32 leave it as it is.

    >>> multiply_in(model, "cuda", torch.bfloat16)
    """
    if dtype in (None, torch.float32):
        return
    contexts: list[torch.autocast] = []

    def enter(*_: Any) -> None:
        contexts.append(torch.autocast(device_type, dtype))
        contexts[-1].__enter__()

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
