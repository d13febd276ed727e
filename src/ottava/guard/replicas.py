"""State that several ranks hold the same of: replicas of weights and moments under DDP and HSDP, norms of tensor-parallel ranks, delayed
scales, the optimizer's step. Digests of it are compared over ranks; who differs from the most is wrong.

Ranks hold the same of a tensor if they hold the same box of it: no strategy is asked.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.guard.digest import digest, read
from ottava.guard.finding import Finding
from ottava.guard.state import Entry

Gather = Callable[[Tensor], list[Tensor]]
"""int64 [n, 2] of this rank -> those of all ranks, in order."""


class Sealed(NamedTuple):
    """The digests of a rank's state at one moment."""

    entries: list[Entry]
    numbers: list[int]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Sealed:
        """Waits for the device."""
        held = list(entries)
        return cls(held, read([digest(entry.tensor) for entry in held]))

    def changes(self, now: Sealed) -> list[Finding]:
        """Tensors whose bits are not those of this moment any more."""
        then = {(e.name, e.box): number for e, number in zip(self.entries, self.numbers)}
        return [
            Finding("memory", e.layer, e.operand)
            for e, number in zip(now.entries, now.numbers)
            if then.get((e.name, e.box), number) != number
        ]

    def table(self) -> Tensor:
        """int64 [n, 2]: which tensor, and its digest; of what other ranks' copies can be compared with."""
        rows = [(key_of(e), number) for e, number in zip(self.entries, self.numbers) if e.shared]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def key_of(entry: Entry) -> int:
    """The same number in every rank that holds the same box of the same tensor."""
    text = f"{entry.name}@{entry.box}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


class Dispute(NamedTuple):
    """A tensor of which ranks hold different bits."""

    entry: Entry | None
    """None: this rank does not hold it."""
    digests: dict[int, int]
    """By rank."""
    wrong: list[int]
    """Ranks that differ from the most. Empty: there is no majority."""


def compare(sealed: Sealed, gather: Gather) -> dict[int, Dispute]:
    """What differs, by `key_of`, the same in every rank. All ranks call it together.

    gather: of tables whose length may differ from rank to rank.
    """
    held: dict[int, dict[int, int]] = {}
    for rank, table in enumerate(gather(sealed.table())):
        for key, number in table.tolist():
            held.setdefault(key, {})[rank] = number
    mine = {key_of(entry): entry for entry in sealed.entries}
    return {
        key: Dispute(mine.get(key), digests, _minority(digests))
        for key, digests in held.items()
        if len(set(digests.values())) > 1
    }


def _minority(digests: dict[int, int]) -> list[int]:
    (most, votes), *_ = Counter(digests.values()).most_common()
    if 2 * votes <= len(digests):
        return []
    return [rank for rank, number in digests.items() if number != most]
