"""The tally: how many numbers that are not finite each operand had when it was quantized.

FP8 hides them: an infinity saturates to the format's largest number, and training goes on with it. So every quantizing op counts what it
casts, where it has the values in registers anyway, into a counter of its device. Nobody waits for it: who wants to know reads all
counters at once, with the loss of a step.

    tally.reset(device)
    loss.backward()
    tally.counts(device)         # int32 [slots]: what was not finite, by slot

[Note: slots] `slot` says which counter the next op counts into. A module that was given slots (`QuantizedModule.tally`) sets it before it
quantizes: three a stage, for input, weight and gradient. Everything else counts into ELSEWHERE. Weights that are quantized together, after
a step of the optimizer, count into WEIGHTS how many of their amax are not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

ELSEWHERE, WEIGHTS, FIRST = 0, 1, 2
"""Slots of no module; the first that one may have."""
OPERANDS = ("input", "weight", "gradient")
"""The three slots of a stage, in order."""
SLOTS = 8192
AGAIN = SLOTS - 1
"""The slot of operands that backward makes again: forward has counted them, and nobody reads this one."""
_STRIDE = 4  # int32 numbers from one counter to the next: kernels are compiled for addresses that 16 bytes divide

slot = ELSEWHERE
"""See [Note: slots]."""
counters: dict[int, list[Tensor]] = {}
"""By device (-1: the CPU) and slot, where somebody has asked for one before: see `counter`."""
_BOARDS: dict[int, Tensor] = {}


def counter(values: Tensor) -> Tensor:
    """int32 [1] on the device of `values`: what an op that quantizes them adds to."""
    device = values.get_device()
    if device not in counters:
        _board(values.device)
    return counters[device][slot]


class again:  # a function to its users; as one of contextlib's it would be three calls more in every product of backward
    """Around what backward quantizes a second time: see `AGAIN`."""

    __slots__ = ("counted",)

    def __enter__(self) -> None:
        global slot
        self.counted, slot = slot, AGAIN

    def __exit__(self, *error: object) -> None:
        global slot
        slot = self.counted


def count(values: Tensor) -> None:
    """Adds how many of the values are not finite. For ops without a kernel that does it on the way."""
    if type(values) is Tensor and values.numel() and values.device.type != "meta":
        counter(values).add_(values.numel() - torch.isfinite(values).sum(dtype=torch.int32))


def weights_counter(values: Tensor) -> Tensor:
    """`counter` of weights that are quantized together."""
    _board(values.device)
    return counters[values.get_device()][WEIGHTS]


def count_amax(amax: Tensor) -> None:
    """`count` of the amax of weights that are quantized together."""
    if type(amax) is Tensor and amax.device.type != "meta":
        weights_counter(amax).add_(amax.numel() - torch.isfinite(amax).sum(dtype=torch.int32))


def counts(device: torch.device, slots: int = SLOTS) -> Tensor:
    """int32 [slots], the live counters of `device`."""
    return _board(device).view(SLOTS, _STRIDE)[:slots, 0]


def reset(device: torch.device, weights: bool = True) -> None:
    """All counters of `device` are 0 again. weights: also that of weights, which were counted after the step before."""
    board = _board(device)
    (board if weights else board[FIRST * _STRIDE :]).zero_()


def _board(device: torch.device) -> Tensor:
    """Memory that stays where it is: a CUDA graph has its addresses."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    key = -1 if device.type == "cpu" else int(index or 0)
    board = _BOARDS.get(key)
    if board is None:
        with torch.inference_mode(False):
            board = _BOARDS[key] = torch.zeros(SLOTS * _STRIDE, dtype=torch.int32, device=device)
            counters[key] = list(board.view(SLOTS, _STRIDE)[:, :1].unbind(0))
    return board
