"""Network cards: is NCCL told to use some that are there, active and fast."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from ottava.detect.cards import Card, check_cards, read_cards
from ottava.doctor.finding import Check, Facts, Finding, listed


def measure(options: Any) -> Facts:
    """Of this machine, and what this rank is told."""
    cards, chosen = read_cards(), os.environ.get("NCCL_IB_HCA")
    if not cards and not chosen:
        return {"not here": "no InfiniBand or RoCE card"}
    return {"cards": [asdict(card) for card in cards], "chosen": chosen}


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """A card that is told and cannot be used is a problem of that rank."""
    found = []
    for rank, (fact, name) in enumerate(zip(facts, names)):
        for said in check_cards([Card(**card) for card in fact["cards"]], fact["chosen"]):
            found.append(Finding("cards", "problem", f"{name}: {said.message}", (rank,)))
    if not found:
        cards = [Card(**card) for card in facts[0]["cards"]]
        shown = [f"{c.name}:{c.port} {c.gbit_s:g} Gb/s{'' if c.active else ' (not active)'}" for c in cards]
        found.append(Finding("cards", "ok", listed(shown)))
    return found


CHECK = Check("cards", measure, judge)
