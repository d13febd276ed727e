"""How long collectives take: bandwidth and latency of the links inside a node and between nodes.

[Note: a group's shape]
n ranks of a group lie `inside` to a node on `nodes` nodes. Every GPU has a network card of its own, so a group's traffic between nodes
has `inside` cards on each side. To gather S bytes, a node receives S (nodes - 1) / nodes over its cards, and a GPU S (n - 1) / n over
NVLink; the slower of the two counts. A reduce-scatter is the same backwards, an all-reduce both. Rings start once a rank and hop; the
all-reduce may take a tree, whose hops grow with the logarithm.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

START_US = 10.0
"""A collective's launch, however small it is."""

LINKS = {
    "ib800": (90.0, 5.0),
    "ib400": (45.0, 5.0),
    "ib200": (22.0, 5.0),
    "roce400": (40.0, 8.0),
    "roce200": (20.0, 8.0),
    "ethernet100": (10.0, 25.0),
    "ethernet25": (2.5, 30.0),
    "ethernet10": (1.0, 30.0),
    "wan": (0.1, 20000.0),
}
"""Networks by name: what a GPU sends in 1e9 bytes a second (nine tenths of the line, or less), and microseconds a hop."""


@dataclass(frozen=True)
class Link:
    """What one GPU sends over a kind of link, in bytes a second, and seconds a hop."""

    bandwidth: float
    latency: float

    @staticmethod
    def parse(text: str) -> Link:
        """A name of `LINKS`, or a rate a GPU: "46GB/s", "400Gb/s", with a latency "46GB/s,8us".

        >>> Link.parse("400Gb/s,8us")
        Link(bandwidth=50000000000.0, latency=8e-06)
        """
        if text in LINKS:
            rate, latency = LINKS[text]
            return Link(rate * 1e9, latency * 1e-6)
        match = re.fullmatch(r"([0-9.]+)(G|M)(B|b)/s(?:,([0-9.]+)(us|ms))?", text.replace(" ", ""))
        if match is None or float(match[1]) <= 0:
            raise ValueError(
                f"--link {text!r} is neither a known network ({', '.join(LINKS)}) nor a rate a GPU such as 46GB/s, 400Gb/s or "
                "46GB/s,8us."
            )
        rate = float(match[1]) * {"G": 1e9, "M": 1e6}[match[2]] / (8 if match[3] == "b" else 1)
        late = float(match[4] or 5) * {"us": 1e-6, "ms": 1e-3}[match[5] or "us"]
        return Link(rate, late)


@dataclass(frozen=True)
class Group:
    """Ranks of a collective, see [Note: a group's shape]."""

    inside: int
    nodes: int = 1

    @property
    def size(self) -> int:
        """Ranks."""
        return self.inside * self.nodes

    @staticmethod
    def of(size: int, stride: int, per_node: int) -> Group:
        """`size` ranks, `stride` apart, on nodes of `per_node`.

        >>> Group.of(8, stride=2, per_node=8)
        Group(inside=4, nodes=2)
        """
        inside = min(size, max(per_node // stride, 1))
        return Group(inside, -(-size // inside))


@dataclass(frozen=True)
class Fabric:
    """The links of a cluster."""

    inside: Link
    between: Link

    def all_gather(self, size: float, group: Group) -> float:
        """Seconds until every rank has all `size` bytes."""
        return self._ring(size, group) if group.size > 1 else 0.0

    def reduce_scatter(self, size: float, group: Group) -> float:
        """Seconds until every rank has its part of the sum of `size` bytes."""
        return self.all_gather(size, group)

    def all_reduce(self, size: float, group: Group) -> float:
        """Seconds until every rank has the sum of `size` bytes: by a ring, or by a tree if that is faster."""
        if group.size == 1:
            return 0.0
        hops = 2 * math.ceil(math.log2(group.nodes)) * self.between.latency if group.nodes > 1 else 0.0
        hops += 2 * math.ceil(math.log2(group.inside)) * self.inside.latency if group.inside > 1 else 0.0
        tree = START_US * 1e-6 + hops + 2 * self._transfer(size, group)
        return min(tree, 2 * self._ring(size, group))

    def _transfer(self, size: float, group: Group) -> float:
        near = size * (group.size - 1) / group.size / self.inside.bandwidth if group.inside > 1 else 0.0
        far = size * (group.nodes - 1) / group.nodes / (group.inside * self.between.bandwidth)
        return max(near, far)

    def _ring(self, size: float, group: Group) -> float:
        hops = (group.inside - 1) * self.inside.latency + (group.nodes - 1) * self.between.latency
        return START_US * 1e-6 + hops + self._transfer(size, group)
