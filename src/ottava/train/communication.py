"""`CommunicationWatch`: what a run's steps say about its communication, asked of the detectors (`ottava.detect`) in all ranks together.

Every step: how long computing waited. Every `GATHER_EVERY` steps: whose own work takes longest. Every `SUM_EVERY`, where gradients are
summed in bfloat16: how far the sums are off. What is wrong is said once.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ottava.detect.exposed import ExposedCommunication, Setup, explain, slow_rank
from ottava.detect.fabric import Fabric, gather_rate, should_carry
from ottava.detect.finding import Finding
from ottava.detect.machine import Machine
from ottava.detect.reduction import ReductionProbe
from ottava.notices import warn_once
from ottava.train.config import Config
from ottava.train.model import DistributedModel
from ottava.train.world import World

GATHER_EVERY = 10
LOOKS = 3
"""In which a rank must be the slow one before it is named as the reason: 20 steps and some."""
SUM_EVERY = 100
FIRST_SUM = 5
"""Step of the first look at sums: gradients of the first steps are unlike all others."""


@dataclass(frozen=True)
class Seen:
    """What a step's line says besides."""

    slow_rank: int | None = None
    slow_rank_times: float | None = None
    reduction_error: float | None = None
    event: str | None = None


class CommunicationWatch:
    """Every rank calls everything, with the same numbers where they are over all ranks.

    >>> watch = CommunicationWatch(config, world, model)
    >>> with watch.look(step):
    ...     backward()
    >>> seen = watch.see(step, step_s, communication_s, work_s)
    """

    def __init__(self, config: Config, world: World, model: DistributedModel) -> None:
        self.config, self.world, self.model = config, world, model
        self.exposed = ExposedCommunication()
        self.measured = world.size > 1 and config.parallel.strategy in ("fsdp2", "none")
        """DDP and FSDP1 wait inside torch, where nobody can look."""
        self.probe = ReductionProbe.of(model.module) if world.size > 1 else None
        self._looked: int | None = None  # the step whose sums were looked at, and not told yet
        self._work, self._steps = 0.0, 0  # of this rank since the last look
        self._looks: deque[tuple[int, float] | None] = deque(maxlen=LOOKS)

    def look(self, step: int) -> AbstractContextManager[Any]:
        """Goes around the backward pass of `step`, from 0."""
        if self.probe is None or step % SUM_EVERY != FIRST_SUM:
            return nullcontext()
        self._looked = step + 1
        return self.probe.look()

    def see(self, step: int, step_s: float, communication_s: float, work_s: float) -> Seen:
        """A step, from 1, that is done. The first two are the slowest rank's seconds; work_s: what this rank computed."""
        found: list[Finding] = []
        error = self._error(step, found)
        slow = self._slow_rank(step, work_s)
        if self.measured and (share := self.exposed.see(step_s, communication_s)) is not None:
            found.append(explain(share, step_s, self._setup(), self._fabric(), self._straggler()))
        if self.world.leads:
            for finding in found:
                warn_once(f"ottava train: step {step}: {finding.message}")
        event = "; ".join(finding.message for finding in found) or None
        rank, times = slow or (None, None)
        return Seen(rank, times, error, event)

    # ------------------------------------------------------------------------------------------------------------- parts

    def _error(self, step: int, found: list[Finding]) -> float | None:
        if self.probe is None or self._looked != step:
            return None
        self._looked = None
        (error,) = self.world.max([self.probe.error() or 0.0])
        if finding := self.probe.finding(error):
            found.append(finding)
        return error

    def _slow_rank(self, step: int, work_s: float) -> tuple[int, float] | None:
        """Over the steps since it was last asked."""
        self._work, self._steps = self._work + work_s, self._steps + 1
        if not self.measured or step % GATHER_EVERY:
            return None
        return self._look_for_slow_rank()

    def _look_for_slow_rank(self) -> tuple[int, float] | None:
        everyone = self.world.gather(self._work / self._steps)
        self._work, self._steps = 0.0, 0
        self._looks.append(slow_rank(everyone, self.world.device.type))
        return self._looks[-1]

    def _straggler(self) -> tuple[int, float] | None:
        """The rank that was slow in each of the last looks, the last of which is now: once, anybody's other work may be the reason."""
        if self._steps:
            self._look_for_slow_rank()
        ranks = {look and look[0] for look in self._looks}
        return self._looks[-1] if len(self._looks) == LOOKS and len(ranks) == 1 else None

    def _fabric(self) -> Fabric:
        meshes, device = self.model.meshes, self.world.device
        mesh = next(m for m in (meshes.shard, meshes.replicate, meshes.tp) if m.size() > 1)
        rates = self.world.gather(gather_rate(mesh.get_group(), device))
        should = None
        if device.type == "cuda":
            ranks = dist.get_process_group_ranks(mesh.get_group())
            should = self.world.share(should_carry(ranks, Machine.detect().gpus_per_node) if self.world.leads else None)
        return Fabric(tuple(rates), should, device.type)

    def _setup(self) -> Setup:
        found = setup_of(self.config, self.world.size, self.world.device.type, Machine.detect().island)
        if found.dp_shard == 1:
            return found
        plan = self.config.plan(self.world.device.type)
        wire = 1 if self.model.recipe is not None else plan.param_dtype.itemsize
        gathers = found.micro_batches * (2 if found.reshard_after_forward else 1)
        part = self.model.parameters / found.tp * (found.dp_shard - 1) / found.dp_shard
        return replace(found, moved=part * (gathers * wire + plan.reduce_dtype.itemsize))


def setup_of(config: Config, ranks: int, device: str, island: int) -> Setup:
    """How the run of `config` is spread over `ranks` of a kind of device, `island` of which fast links join.

    >>> setup_of(preset("llama3-8b"), 64, "cuda", island=8).beyond_island
    True
    """
    plan = config.plan(device).resolve(ranks)
    data_parallel = plan.dp_replicate * plan.dp_shard
    train = config.on_ranks(data_parallel).train
    return Setup(
        strategy=plan.strategy,
        dp_shard=plan.dp_shard,
        dp_replicate=plan.dp_replicate,
        tp=plan.tp,
        prefetch=plan.prefetch,
        overlap=plan.overlap,
        sequence_parallel=plan.sequence_parallel,
        reshard_after_forward=plan.reshard_after_forward,
        micro_batches=train.global_batch // (train.micro_batch * data_parallel),
        beyond_island=plan.dp_shard * plan.tp > island,
        device=device,
    )
