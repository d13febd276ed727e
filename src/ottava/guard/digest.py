"""`digest`: the bits of a tensor as one number, on its device. Nobody waits for it.

Rows of 256 words of 8 bytes, or of elements where these do not fill such words, are XORed (`torch.hash_tensor`), and the rows' results
added with odd factors that depend on the row. A single changed bit always changes it; so do rows that change places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 256
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D  # a factor of Knuth's generators: neighbouring rows get very different ones


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """int64 [] of a plain tensor of any type, contiguous or not.

    >>> int(digest(torch.zeros(3))) != int(digest(torch.tensor([0.0, -0.0, 0.0])))
    True
    """
    words = _words(tensor.detach().contiguous().view(-1))
    count = words.numel()
    whole = count - count % ROW
    total = torch.full((), tensor.nbytes, dtype=torch.int64, device=tensor.device)
    if whole:
        rows = torch.hash_tensor(words[:whole].view(-1, ROW), dim=1).view(torch.int64)
        number = torch.arange(1, rows.numel() + 1, dtype=torch.int64, device=tensor.device)
        total = total + (rows * (number * _ODD | 1)).sum()
    if whole < count:
        total = total + torch.hash_tensor(words[whole:]).view(torch.int64) * _ODD
    return total


def _words(flat: Tensor) -> Tensor:
    """The bytes as integers of 8 bytes, which a GPU hashes as fast as smaller ones; of the element's size if they do not fill those."""
    size = flat.element_size()
    if flat.numel() * size % 8:
        return flat.view(_WORDS[size])
    aligned = flat.storage_offset() * size % 8 == 0 and flat.data_ptr() % 8 == 0
    return (flat if aligned else flat.clone()).view(torch.int64)


def read(digests: Sequence[Tensor]) -> list[int]:
    """The numbers, with one wait a device."""
    found: list[int] = [0] * len(digests)
    for device in {d.device for d in digests}:
        places = [i for i, d in enumerate(digests) if d.device == device]
        for place, value in zip(places, torch.stack([digests[i] for i in places]).tolist()):
            found[place] = value
    return found
