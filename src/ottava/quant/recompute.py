"""Recomputed forwards must quantize as the first one did: same scales, nothing recorded twice.

A forward that runs inside a backward pass is a recomputation. `ottava.checkpoint` additionally keeps the scales of each
checkpointed call, so that several microbatches may be in flight; with torch's own checkpoint the last call's scales are used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from ottava import torch_private
from ottava.quant.delayed import DelayedState
from ottava.quant.state import CURRENT


class _Recompute(threading.local):
    """What the innermost `ottava.checkpoint` of this thread is doing."""

    def __init__(self) -> None:
        self.stash: list[Tensor] | None = None
        """First pass: scales are appended here, one a module call."""
        self.replay: Iterator[Tensor] | None = None
        """Recomputation: the same scales, in the same order."""


RECOMPUTE = _Recompute()


def forward_scale(state: DelayedState, compiling: bool) -> tuple[Tensor, bool]:
    """(the forward scales to use now [n], whether this forward records). compiling: a compiler traces now."""
    if compiling:
        return state.fwd_scale, torch.is_grad_enabled() and not torch_private.is_exporting()
    if RECOMPUTE.replay is not None:
        scale = next(RECOMPUTE.replay)
        if RECOMPUTE.stash is not None:  # a checkpoint inside the one that is being recomputed
            RECOMPUTE.stash.append(scale)
        return scale, False
    if RECOMPUTE.stash is not None:
        RECOMPUTE.stash.append(state.fwd_scale.clone())
        return state.fwd_scale, True
    if torch_private.backward_id() != -1:
        if torch_private.in_reentrant_checkpoint():  # the first run, under no_grad, recorded nothing: this one does
            return state.fwd_scale, torch.is_grad_enabled()
        return state.scale_of_first_forward(), False
    return state._buffers["fwd_scale"], torch.is_grad_enabled() or CURRENT.calibrating  # type: ignore[return-value]
