"""`Machine`: the places of a run's ranks, and which of them the fast links join.

[Note: island]
The GPUs that reach each other over the fast links (NVLink, xGMI): mostly one node, and several nodes in a rack-scale machine.
Ranks are placed in order, so ranks 0 .. island-1 are the first island. A group of neighbouring ranks stays inside one island
if its size divides the island's. tp groups work in every layer and must; weight groups (dp_shard x tp) should.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process. None: it did not say.

    >>> Launch.from_torchrun({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    Launch(world_size=16, local_world_size=8)
    """

    world_size: int | None = None
    """Ranks of the whole run."""

    local_world_size: int | None = None
    """Ranks on this node."""

    @classmethod
    def from_torchrun(cls, variables: Mapping[str, str] | None = None) -> Launch:
        """Reads torchrun's rank variables: from `variables`, or from the environment that torchrun made for this process."""
        variables = os.environ if variables is None else variables
        return cls(_number(variables, "WORLD_SIZE"), _number(variables, "LOCAL_WORLD_SIZE"))


@dataclass(frozen=True)
class Machine:
    """The ranks' places: how many on a node, how many nodes, and how many GPUs the fast links join.

    >>> Machine(gpus_per_node=8, nodes=4).world_size
    32
    >>> Machine(gpus_per_node=4, nodes=18, island=72).islands  # a rack-scale NVLink domain
    1
    """

    gpus_per_node: int
    """Ranks on one node; one rank drives one GPU."""

    nodes: int = 1
    """Nodes of the run."""

    island: int = 0
    """Ranks joined by the fast links, see [Note: island]. 0: those of one node."""

    def __post_init__(self) -> None:
        for name, least in (("gpus_per_node", 1), ("nodes", 1), ("island", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Machine: {name} must be a whole number, {least} or more, got {value!r}.")
        object.__setattr__(self, "island", min(self.island or self.gpus_per_node, self.world_size))

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.gpus_per_node * self.nodes

    @property
    def islands(self) -> int:
        """Islands of the run; the last may be a part of one."""
        return -(-self.world_size // self.island)

    @classmethod
    def detect(cls, launch: Launch | None = None, island: int = 0) -> Machine:
        """The machine this process runs on.

        Ranks on a node: what the launcher says; else the GPUs here; else (CPU) all ranks. Ranks of the run: the process group's
        number; else the launcher's; else one node's. Several ranks that share one GPU without torchrun have to be said:
        `Machine(gpus_per_node=2)`, or `Machine.detect(Launch(local_world_size=2))`.

        >>> Machine.detect(Launch(world_size=16, local_world_size=8))
        Machine(gpus_per_node=8, nodes=2, island=8)
        """
        launch = launch or Launch.from_torchrun()
        world = launch.world_size
        if dist.is_available() and dist.is_initialized():
            world = dist.get_world_size()
        here = launch.local_world_size or torch.cuda.device_count() or world or 1
        world = world or here
        here = min(here, world)
        if world % here:
            raise ValueError(
                f"{world} ranks do not fill nodes of {here}: start the same number of ranks on every node, "
                "or give the places yourself with Machine(gpus_per_node=..., nodes=...)."
            )
        return cls(gpus_per_node=here, nodes=world // here, island=island)


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"{name} must be a number of ranks, 1 or more, got {text!r}: the launcher sets it, do not set it by hand."
        )
    return int(text)
