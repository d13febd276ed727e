"""`digest`: the bits of a tensor as one number, on its device. Nobody waits for it.

Rows of 1,024 words are XORed (`torch.hash_tensor`), and the rows' results added with odd factors that depend on the row. A single changed
bit always changes it; so do rows that change places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 1024
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D  # a factor of Knuth's generators: neighbouring rows get very different ones


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """int64 [] of a plain tensor of any type, contiguous or not.

    >>> int(digest(torch.zeros(3))) != int(digest(torch.tensor([0.0, -0.0, 0.0])))
    True
    """
    words = tensor.detach().contiguous().view(-1)
    words = words.view(_WORDS[words.element_size()]) if words.numel() else words.view(torch.uint8)
    count = words.numel()
    whole = count - count % ROW
    total = torch.full((), count, dtype=torch.int64, device=tensor.device)
    if whole:
        rows = torch.hash_tensor(words[:whole].view(-1, ROW), dim=1).view(torch.int64)
        number = torch.arange(1, rows.numel() + 1, dtype=torch.int64, device=tensor.device)
        total = total + (rows * (number * _ODD | 1)).sum()
    if whole < count:
        total = total + torch.hash_tensor(words[whole:]).view(torch.int64) * _ODD
    return total


def read(digests: Sequence[Tensor]) -> list[int]:
    """The numbers, with one wait a device."""
    found: list[int] = [0] * len(digests)
    for device in {d.device for d in digests}:
        places = [i for i, d in enumerate(digests) if d.device == device]
        for place, value in zip(places, torch.stack([digests[i] for i in places]).tolist()):
            found[place] = value
    return found
