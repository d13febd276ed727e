"""The number of a module in the order of construction: what weights that leave the meta device are drawn by.

Ranks construct the same modules in the same order, so numbers are equal on every mesh, whatever ranks draw from their generators.
"""

from __future__ import annotations


class ConstructionOrder:
    """Hands out numbers."""

    def __init__(self) -> None:
        self._next = 0

    def number(self) -> int:
        """Of the module that is constructed now."""
        self._next += 1
        return self._next - 1

    def restart(self) -> None:
        """The next module is the first: with the same seed, a model that is built again gets the same weights. On all ranks alike."""
        self._next = 0


ORDER = ConstructionOrder()
