"""Network cards (HCAs: InfiniBand, RoCE) of this machine, and whether NCCL is told to use the right ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ottava.detect.finding import Finding

FOLDER = Path("/sys/class/infiniband")
SLOW = 0.5
"""Of the fastest card's rate: a card below it is for storage or management."""


@dataclass(frozen=True)
class Card:
    """A port of a card, as the kernel lists it."""

    name: str
    port: int
    active: bool
    gbit_s: float
    layer: str = "InfiniBand"

    @property
    def bytes_s(self) -> float:
        """What it can send."""
        return self.gbit_s / 8 * 1e9


def read_cards(folder: Path = FOLDER) -> list[Card]:
    """All ports of this machine's cards; none where the kernel has no such cards.

    >>> read_cards()
    [Card(name='mlx5_0', port=1, active=True, gbit_s=400.0, layer='InfiniBand')]
    """
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        rate = re.match(r"[\d.]+", _read(port / "rate"))
        found.append(
            Card(
                port.parent.parent.name,
                int(port.name),
                "ACTIVE" in _read(port / "state"),
                float(rate[0]) if rate else 0.0,
                _read(port / "link_layer") or "InfiniBand",
            )
        )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def chosen_cards(value: str, cards: Iterable[Card]) -> list[Card]:
    """Those that a value of NCCL_IB_HCA means: beginnings of names, with or without a port, "=" for whole names, "^" for all others.

    >>> chosen_cards("=mlx5_1:1", [Card("mlx5_1", 1, True, 400.0), Card("mlx5_10", 1, True, 400.0)])
    [Card(name='mlx5_1', port=1, active=True, gbit_s=400.0, layer='InfiniBand')]
    """
    others, exact = value.startswith("^"), "=" in value[:2]
    words = [word.partition(":") for word in value.lstrip("^=").split(",") if word]

    def meant(card: Card) -> bool:
        return any(
            (card.name == name if exact else card.name.startswith(name)) and port in ("", str(card.port))
            for name, _, port in words
        )

    return [card for card in cards if meant(card) is not others]


def check_cards(cards: list[Card], value: str | None) -> list[Finding]:
    """What is wrong in NCCL_IB_HCA=`value` on a machine with these cards. None: it is not set, and NCCL looks for itself.

    >>> check_cards(read_cards(), os.environ.get("NCCL_IB_HCA"))
    []
    """
    if not value:
        return []
    meant = chosen_cards(value, cards)
    known = ", ".join(f"{card.name}:{card.port}" for card in cards) or "none"
    down = [card for card in meant if not card.active]
    best = max((card.gbit_s for card in cards if card.active), default=0.0)
    slow = [card for card in meant if card.active and card.gbit_s < SLOW * best]
    if not meant:
        said = f"names no network card of this machine, which has {known}: NCCL falls back to sockets, or stops"
    elif down:
        said = f"means {_named(down)}, whose port is not active; the machine has {known}"
    elif slow:
        said = (
            f"means {_named(slow)} at {slow[0].gbit_s:g} Gb/s, while a card of this machine has {best:g}: name that one"
        )
    else:
        return []
    return [Finding("warning", f"NCCL_IB_HCA={value} {said}", "ACS or wrong card")]


def _named(cards: list[Card]) -> str:
    return ", ".join(f"{card.name}:{card.port}" for card in cards)
