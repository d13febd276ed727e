"""State that several ranks hold the same of: replicas of weights and moments under DDP and HSDP, norms of tensor-parallel ranks, delayed
scales, the optimizer's step. Digests of it are compared over ranks; who differs from the most is wrong.

Ranks hold the same of a tensor if they hold the same box of it: no strategy is asked.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.guard.digest import ROW, digest, digest_rows, read
from ottava.guard.finding import Finding
from ottava.guard.state import Entry

Gather = Callable[[Tensor], list[Tensor]]
"""A tensor [n, ...] of this rank on the CPU -> those of all ranks, in order; n may differ from rank to rank."""


class Sealed:
    """The digests of a rank's state at one moment. Nobody waits until they are asked for."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        self._digests = [digest(entry.tensor) for entry in self.entries]

    @cached_property
    def numbers(self) -> list[int]:
        """Of the entries, in order. Waits for the device."""
        digests, self._digests = self._digests, []
        return read(digests)

    def changes(self, now: Sealed) -> list[Finding]:
        """Tensors whose bits are not those of this moment any more."""
        then = {(e.name, e.box): number for e, number in zip(self.entries, self.numbers)}
        return [
            Finding("memory", e.layer, e.operand)
            for e, number in zip(now.entries, now.numbers)
            if e.sealed and then.get((e.name, e.box), number) != number
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


class Evidence(NamedTuple):
    """Some elements of a disputed tensor, as each rank held them: to be compared with what the steps give when they are done again."""

    places: Tensor
    """int64 [n], of the elements of this rank's part in order."""
    values: dict[int, Tensor]
    """float64 [n], by rank."""

    def farthest(self, now: Tensor) -> int | None:
        """The rank whose numbers are farthest from those of now; None if two are equally far.

        Ranks that differ have trained each other: gradients are summed, so after some steps none has the right numbers any more. But
        where they differ, the one whose number was changed is farther off.
        """
        right = now.detach().reshape(-1)[self.places.to(now.device)].double().cpu()
        off = {rank: float((values - right).abs().nan_to_num(torch.inf).sum()) for rank, values in self.values.items()}
        first, second, *_ = sorted(off.values(), reverse=True)
        return None if first == second else max(off, key=lambda rank: off[rank])


MOST_TENSORS, MOST_ROWS = 4, 8


def evidence(disputes: dict[int, Dispute], gather: Gather) -> dict[int, Evidence]:
    """Of the first disputes, by key, in ranks that hold them. All ranks call it together."""
    found = {}
    for key, dispute in list(disputes.items())[:MOST_TENSORS]:
        flat = torch.empty(0, dtype=torch.int64) if dispute.entry is None else dispute.entry.tensor.detach().reshape(-1)
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % ROW)).view(-1, ROW)
        tables = gather(digest_rows(rows).cpu())
        held = [tables[rank] for rank in dispute.digests]
        chosen = torch.stack([(table != held[0]) for table in held]).any(0).nonzero().reshape(-1)[:MOST_ROWS]
        mine = rows[chosen.to(rows.device)].double().cpu() if len(rows) else rows.new_empty(0, ROW, dtype=torch.float64)
        everyone = gather(mine)
        if dispute.entry is None:
            continue
        values = {rank: everyone[rank].reshape(-1) for rank in dispute.digests}
        bits = [v.view(torch.int64) for v in values.values()]
        differ = torch.stack([b != bits[0] for b in bits]).any(0).nonzero().reshape(-1)
        index = chosen[differ // ROW] * ROW + differ % ROW
        found[key] = Evidence(index, {rank: v[differ] for rank, v in values.items()})
    return found
