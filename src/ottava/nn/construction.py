"""The number of a module in the order of construction, from the seed on: what weights that leave the meta device are drawn by.

Ranks construct the same modules in the same order, so numbers are equal on every mesh. A program that seeds torch again and builds the
same model again expects the same weights: numbers then begin anew. That torch was seeded is seen by its generator, which is as
`manual_seed` leaves it; drawing weights takes one number from it, after which it is not.
"""

from __future__ import annotations

import torch


class ConstructionOrder:
    """Hands out numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._drawn = False

    def number(self) -> int:
        """Of the module that is constructed now."""
        if self._drawn and _just_seeded():
            self._next, self._drawn = 0, False
        self._next += 1
        return self._next - 1

    def note_drawn(self) -> None:
        """Weights are drawn now: another model after the same seed is another one."""
        self._drawn = True
        torch.rand((), device="cpu")


def _just_seeded() -> bool:
    """Whether nothing was drawn from torch's generator since it was seeded."""
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    return torch.equal(fresh.get_state(), torch.get_rng_state())


ORDER = ConstructionOrder()
