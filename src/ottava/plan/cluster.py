"""`Cluster`: GPUs of one kind, how many to a node, and what joins them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ottava.plan.devices import GpuKind, find_gpu
from ottava.plan.links import Fabric, Link

MOST_GPUS = 2**24

DEFAULT_LINK = "ib400"


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind and what joins them."""

    gpu: GpuKind
    gpus: int
    per_node: int
    """GPUs that NVLink joins: mostly those of a node."""
    fabric: Fabric

    @staticmethod
    def of(
        gpu: str, gpus: int, per_node: int = 8, link: str = DEFAULT_LINK, tables: Iterable[str | Path] = ()
    ) -> Cluster:
        """A cluster by names.

        gpu: of `known_gpus`. link: between nodes, as `Link.parse` takes it. tables: files with more GPUs.

            >>> Cluster.of("h200", gpus=64).nodes
            8
        """
        if gpus < 1 or per_node < 1:
            raise ValueError(f"--gpus and --per-node are numbers of GPUs, 1 or more; got {gpus} and {per_node}.")
        if gpus > MOST_GPUS:
            raise ValueError(f"--gpus {gpus:,} are more than anybody has: at most {MOST_GPUS:,}.")
        if gpus > per_node and gpus % per_node:
            below, above = gpus // per_node * per_node, -(-gpus // per_node) * per_node
            raise ValueError(
                f"{gpus} GPUs do not fill nodes of {per_node}: take --gpus {below} or {above}, or another --per-node."
            )
        kind = find_gpu(gpu, tables)
        inside = Link(kind.nvlink_gb_s * 1e9, kind.nvlink_latency_us * 1e-6)
        return Cluster(kind, gpus, per_node, Fabric(inside, Link.parse(link)))

    @property
    def island(self) -> int:
        """GPUs of this cluster that NVLink joins."""
        return min(self.per_node, self.gpus)

    @property
    def nodes(self) -> int:
        """How many."""
        return self.gpus // self.island

    def resized(self, gpus: int) -> Cluster:
        """The same with another number of GPUs."""
        return Cluster(self.gpu, gpus, self.per_node, self.fabric)
