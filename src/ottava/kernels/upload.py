"""Small tables of numbers that kernels read, written by the host: one copy that nobody waits for, and none while the numbers stay."""

from __future__ import annotations

import torch
from torch import Tensor


class Upload:
    """int64 numbers on a device, kept up to date.

    >>> table = Upload()
    >>> table([1, 2, 3], torch.device("cuda"))
    tensor([1, 2, 3], device='cuda:0')
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._host: Tensor | None = None
        self._there: Tensor | None = None
        self._captured: list[tuple[Tensor | None, Tensor | None]] = []

    def __call__(self, numbers: list[int], device: torch.device) -> Tensor:
        """The numbers on `device`, where kernels of the current stream can read them."""
        if self._there is None or self._there.device != device or numbers != self._numbers:
            pin = device.type == "cuda"
            # A new buffer each time: a copy that is under way still reads the old one, and torch frees it after that.
            self._host = torch.tensor(numbers, dtype=torch.int64, pin_memory=pin)
            self._there = self._host.to(device, non_blocking=True)
            self._numbers = numbers
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A graph copies from and reads these addresses whenever it is replayed.
            self._captured.append((self._host, self._there))
        return self._there
