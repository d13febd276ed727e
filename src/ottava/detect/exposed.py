"""Communication that nothing hides: seen in a run's steps, said once, with what to change.

It takes two numbers a step: how long it took, and for how long computing waited for communication (`distributed.waits.comm_wait_hook`,
the trainer's metric `communication_s`). When the share stays over a threshold there are three reasons, and only one is a matter of overlap:

    a rank is slow      the others wait for it: their waits are long and its own is short
    links are slow      a gather by itself is far below what other ranks, or the hardware, give
    neither             the work is not arranged so that anything computes meanwhile: this is the failure mode, and can be changed
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ottava.detect.fabric import Fabric
from ottava.detect.finding import Finding

SHARE = 0.2
"""Of a step: communication above this is worth a word."""
WINDOW, WARMUP = 20, 3
"""Steps whose median counts, and first steps that do not: memory and connections are made in them."""
SLOWER = {"cpu": 1.5, "cuda": 1.15}
"""Times the usual work of a step: a rank above this holds the others up. CPUs are shared with other work."""


class ExposedCommunication:
    """Is told every step; knows when it is time to say something, which is once.

    >>> watch = ExposedCommunication()
    >>> for step_s, exposed_s in steps:
    ...     if (share := watch.see(step_s, exposed_s)) is not None:
    ...         print(explain(share, step_s, Setup(prefetch=0), fabric).message)
    """

    def __init__(self, share: float = SHARE, window: int = WINDOW, warmup: int = WARMUP) -> None:
        self.share, self.told = share, False
        self._left = warmup
        self._recent: deque[float] = deque(maxlen=window)

    def see(self, step_s: float, exposed_s: float) -> float | None:
        """The median share of the last steps, the first time that it is too large; else None. Seconds."""
        if self._left > 0:
            self._left -= 1
            return None
        self._recent.append(exposed_s / step_s if step_s > 0 else 0.0)
        if self.told or len(self._recent) < (self._recent.maxlen or 1):
            return None
        usual = statistics.median(self._recent)
        if usual <= self.share:
            return None
        self.told = True
        return usual


@dataclass(frozen=True)
class Setup:
    """How a run is spread, as far as it decides what hides what. Names are those of `ParallelPlan`."""

    strategy: str = "fsdp2"
    dp_shard: int = 1
    dp_replicate: int = 1
    tp: int = 1
    prefetch: int = 1
    overlap: str = "none"
    sequence_parallel: bool = False
    reshard_after_forward: bool = True
    micro_batches: int = 1
    """Of a step."""
    beyond_island: bool = False
    """Whether shards lie in several NVLink domains."""
    moved: float | None = None
    """Bytes a step that come over a rank's link; None: not known."""
    device: str = "cuda"


def slow_rank(work_s: Sequence[float], device: str = "cuda") -> tuple[int, float] | None:
    """(rank, times the usual) of the rank whose own work takes longest, if that is far longer; None if they are alike.

    work_s: seconds that each rank computes in a step, without its waits.

        >>> slow_rank([1.0, 1.02, 1.6, 0.99])
        (2, 1.58)
    """
    usual = statistics.median_low(work_s)
    rank = max(range(len(work_s)), key=lambda n: work_s[n])
    times = work_s[rank] / usual if usual > 0 else 1.0
    return (rank, round(times, 2)) if times > SLOWER[device] else None


def explain(
    share: float,
    step_s: float,
    setup: Setup,
    fabric: Fabric | None,
    straggler: tuple[int, float] | None = None,
    variables: Mapping[str, str] = os.environ,
) -> Finding:
    """What is said of communication that takes `share` of a step of `step_s` seconds, and what to change.

    fabric: what a gather gives now; None: not measured. straggler: what `slow_rank` says.
    """
    seen = f"{share:.0%} of a step ({share * step_s:.3g} of {step_s:.3g} s) is communication that nothing hides"
    if straggler is not None:
        rank, times = straggler
        said = f": the others wait for rank {rank}, whose own work takes {times:g} times as long. `ottava doctor` on its machine says why."
        return Finding("warning", seen + said)
    if fabric is not None and fabric.trouble is not None:
        said = f", and the links are slow: {fabric.trouble}. `ottava doctor` names the link."
        return Finding("warning", seen + said)
    sound = f", and the links are sound ({fabric.usual / 1e9:.3g} GB/s a rank)" if fabric is not None else ""
    todo = "; ".join(changes(setup, share * step_s, step_s, fabric, variables)[:3])
    # gloo's gathers run in the way of what computes
    host = " (A CPU has no streams, so FSDP2 hides nothing there; a GPU does.)" if setup.device == "cpu" else ""
    return Finding("warning", f"{seen}{sound}. Change: {todo}.{host}", "no overlap")


def changes(
    setup: Setup, exposed_s: float, step_s: float, fabric: Fabric | None, variables: Mapping[str, str] = os.environ
) -> list[str]:
    """What to change, the likeliest first."""
    found = [text for name, text in _SERIAL.items() if variables.get(name) == "1"]
    sharded = setup.strategy in ("fsdp2", "fsdp1") and setup.dp_shard > 1
    if sharded and setup.tp == 1 and variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append("unset CUDA_DEVICE_MAX_CONNECTIONS=1, with which gathers queue behind products")
    if setup.tp > 1 and setup.overlap == "none":
        spread = "" if setup.sequence_parallel else " with parallel.sequence_parallel = true"
        found.append(f'parallel.overlap = "auto"{spread}, so that tensor parallelism communicates under products')
    if sharded and setup.beyond_island:
        found.append("HSDP, with parallel.dp_shard inside the NVLink domain and parallel.dp_replicate between")
    if setup.strategy == "fsdp2" and sharded and setup.prefetch < 2 and setup.device != "cpu":
        found.append(
            f"parallel.prefetch = {setup.prefetch + 1}, so that weights are gathered ahead of the layer that runs"
        )
    needed = setup.moved / fabric.usual if setup.moved and fabric is not None and fabric.usual > 0 else None
    if needed is not None and needed > step_s - exposed_s:
        found.insert(
            0,
            f"more tokens a rank and step (train.micro_batch, train.global_batch) or fewer ranks: the links need {needed:.3g} s for what a "
            f"step moves and it computes for {step_s - exposed_s:.3g} s, so no schedule hides all of it",
        )
    if sharded and setup.micro_batches > 1:
        found.append("a larger train.micro_batch: each micro-batch gathers all weights again")
    if sharded and setup.reshard_after_forward:
        found.append("parallel.reshard_after_forward = false, where memory allows it: one gather less")
    return found or ["a larger train.micro_batch, so that there is more to compute for the same bytes"]


_SERIAL = {
    "CUDA_LAUNCH_BLOCKING": "unset CUDA_LAUNCH_BLOCKING=1, with which one kernel runs at a time",
    "TORCH_NCCL_BLOCKING_WAIT": "unset TORCH_NCCL_BLOCKING_WAIT=1, with which the host waits for every collective",
}
