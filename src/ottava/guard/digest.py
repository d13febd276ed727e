"""`digest`: the bits of a tensor as one number, on its device. Nobody waits for it.

Rows of 256 words of 8 bytes, or of elements where these do not fill such words, are XORed (`torch.hash_tensor`), and the rows' results
added with odd factors that depend on the row. A single changed bit always changes it; so do rows that change places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 256
MOST_KEPT = 2**18
"""Factors of rows that stay on a device: 2 MiB, for tensors of up to 512 MiB."""
_FACTORS: dict[torch.device, Tensor] = {}
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
    total: Tensor | None = None
    if whole:
        rows = torch.hash_tensor(words[:whole].view(-1, ROW), dim=1).view(torch.int64)
        total = (rows * _factors(rows.numel(), tensor.device)).sum()
    if whole < count:
        rest = torch.hash_tensor(words[whole:]).view(torch.int64) * _ODD
        total = rest if total is None else total + rest
    if total is None:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return total + tensor.nbytes


@torch.no_grad()
def digest_rows(rows: Tensor) -> Tensor:
    """int64 [n]: the digest of every row of a contiguous tensor [n, ROW] of any type."""
    size = rows[0].nbytes if len(rows) else 0
    return torch.hash_tensor(rows.view(torch.int64), dim=1).view(torch.int64) * _ODD + size


def _factors(count: int, device: torch.device) -> Tensor:
    """int64 [count]: one for each row, odd. Those of most tensors are made once."""
    made = _FACTORS.get(device)
    if made is None or made.numel() < count:
        size = max(count, MOST_KEPT)
        made = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _ODD | 1
        if size == MOST_KEPT:
            _FACTORS[device] = made
    return made[:count]


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
