"""`Fabric`: what the links between ranks give, measured by a gather, beside what they should give."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ottava.detect.cards import read_cards
from ottava.detect.command import run_command

BYTES = {"cpu": 2**20, "cuda": 64 * 2**20}
ROUNDS = 5
UNEVEN = {"cpu": 0.2, "cuda": 0.5}
"""Share of the usual rate below which a rank's link is slow: on a CPU the ranks share the cores that copy."""
SHOULD = 0.4
"""Share of what the hardware says that a gather should reach; sound ones reach 0.6 to 0.9."""


@dataclass(frozen=True)
class Fabric:
    """Rates of a gather, by rank, in bytes a second that one rank's link carries.

    >>> Fabric((40e9, 41e9, 3e9, 40e9)).trouble
    'rank 2 gathers at 3 GB/s, others at 40.5'
    """

    rates: tuple[float, ...]
    should: float | None = None
    """What the links can carry; None: not known."""
    device: str = "cuda"

    @property
    def usual(self) -> float:
        """The median rate."""
        return statistics.median(self.rates)

    @property
    def trouble(self) -> str | None:
        """What is wrong with the links; None: they are sound."""
        slow = [n for n, rate in enumerate(self.rates) if rate < UNEVEN[self.device] * self.usual]
        if slow:
            ranks = ", ".join(map(str, slow[:4])) + (f" and {len(slow) - 4} more" if len(slow) > 4 else "")
            word = "rank" if len(slow) == 1 else "ranks"
            verb = "gathers" if len(slow) == 1 else "gather"
            return f"{word} {ranks} {verb} at {self.rates[slow[0]] / 1e9:.3g} GB/s, others at {self.usual / 1e9:.3g}"
        if self.should is not None and self.usual < SHOULD * self.should:
            return f"ranks gather at {self.usual / 1e9:.3g} GB/s, and these links carry {self.should / 1e9:.3g}"
        return None


def gather_rate(group: Any, device: torch.device) -> float:
    """Bytes a second that come over this rank's link in a gather over `group`: the best of a few. All its ranks call it.

    >>> rate = gather_rate(mesh.get_group(), torch.device("cuda", 0))
    """
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    size = dist.get_world_size(group)
    part = torch.ones(BYTES[device.type] // size, dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * size, dtype=torch.uint8, device=device)
    best = float("inf")
    for turn in range(ROUNDS + 1):
        _wait(device)
        start = time.perf_counter()
        gather(whole, part, group=group)
        _wait(device)
        if turn:
            best = min(best, time.perf_counter() - start)
    return part.numel() * (size - 1) / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def should_carry(ranks: Sequence[int], ranks_a_node: int) -> float | None:
    """What the links of a group should give a rank, in bytes a second: NVLink inside a node, network cards between nodes.

    None where neither nvidia-smi nor the kernel says.
    """
    if len({rank // ranks_a_node for rank in ranks}) == 1:
        return nvlink_rate(run_command(["nvidia-smi", "nvlink", "--status"]) or "")
    cards = [card for card in read_cards() if card.active]
    fastest = max((card.gbit_s for card in cards), default=0.0)
    total = sum(card.bytes_s for card in cards if card.gbit_s == fastest)  # the others are for storage
    return total / ranks_a_node or None


def nvlink_rate(text: str) -> float | None:
    """Bytes a second that a GPU can send over NVLink, from `nvidia-smi nvlink --status`: of its weakest GPU. None without NVLink.

    >>> nvlink_rate("GPU 0: NVIDIA H200" + chr(10) + " Link 0: 26.562 GB/s" + chr(10) + " Link 1: 26.562 GB/s")
    53124000000.0
    """
    gpus: list[float] = []
    for line in text.splitlines():
        if re.match(r"GPU \d+:", line):
            gpus.append(0.0)
        elif gpus and (match := re.search(r"Link \d+: ([\d.]+) GB/s", line)):
            gpus[-1] += float(match[1])
    return round(min(gpus) * 1e9) * 1.0 or None if gpus else None
