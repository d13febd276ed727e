"""`Layout`: one way to spread a run over GPUs; `layouts` counts the sensible ones up and says why others are not.

A layout is a mesh (copies x shards x tensor parallelism), what is recomputed, how many sequences a rank takes at a time, and the types of
what the optimizer keeps. What a plan may not change is left alone: the recipe, the global batch, the type in which gradients are summed.

[Note: simple first]
Estimates are right to some per cent, so what is hardly faster is not better: a layout that is harder to run or to understand (shards,
tensor parallelism, copies of shards where plain copies would do) has to earn `SIMPLER` for each of these. One whose shards leave the
NVLink domain has to earn `BEYOND`: every gather crosses the network, and the slowest card of all nodes sets the pace of every layer,
which an estimate of sound links knows nothing of.

[Note: rungs]
Fewer bits for moments, gradients or weights save memory and time, and are not the run that was asked for. Each such change is a rung
down from the configuration, and has to earn `RUNG` of speed: a plan goes down where memory or speed is really won, not for a per cent.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ottava.distributed.plan import RECOMPUTE
from ottava.kernels.block_moment import BLOCK
from ottava.overlap.schedule import default_method
from ottava.plan.model_size import ModelSize
from ottava.quant.quantization import Quantization
from ottava.train.config import Config

RUNG = 0.04
"""Share of the speed that a change of types has to earn."""
SIMPLER = 0.01
"""Share of the speed that a harder layout has to earn, see [Note: simple first]."""
BEYOND = 0.08
"""Share of the speed that shards outside one NVLink domain have to earn."""
MOMENTS = ("float32", "bfloat16", "float8")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)

NOT_DIVIDED = "the global batch is no multiple of micro-batch x data-parallel ranks"
TOO_FEW_SEQUENCES = "fewer sequences in the global batch than data-parallel ranks"
TP_CUTS = "tensor parallelism does not divide heads, channels, vocabulary or sequence"
NEEDS_ONE_RANK = "train.cuda_graph needs one rank, without full recomputation"
ACROSS_ISLANDS = "a shard group that neither fills nor divides an NVLink domain"


@dataclass(frozen=True)
class States:
    """Types of what is kept of a parameter between steps."""

    optimizer: str
    weights: str
    fp8_weights: bool
    masters: str
    moments: str
    gradients: str
    rungs: int
    """How many types have fewer bits than the configuration asks for, see [Note: rungs]."""

    def __str__(self) -> str:
        stored = "FP8" if self.fp8_weights else self.weights
        gradients = self.gradients if self.weights == "float32" else self.weights  # of the weights' own type
        return f"{stored} weights, {self.moments} moments, {gradients} gradients"


@dataclass(frozen=True)
class Layout:
    """How a run is spread."""

    replicate: int
    shard: int
    tp: int
    sequence_parallel: bool
    recompute: str
    micro_batch: int
    accumulate: int
    """Micro-batches of a step."""
    states: States
    strategy: str = "fsdp2"

    @property
    def ranks(self) -> int:
        """In all."""
        return self.replicate * self.shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that see different data."""
        return self.replicate * self.shard

    @property
    def name(self) -> str:
        """What people call it."""
        if self.data_parallel == 1:
            base = "one GPU" if self.tp == 1 else "TP alone"
        elif self.shard == 1:
            base = "DDP" if self.strategy == "ddp" else "copies"
        else:
            base = "FSDP2" if self.replicate == 1 else "HSDP"
        split = f" x TP{'+SP' if self.sequence_parallel else ''}" if self.tp > 1 and base != "TP alone" else ""
        return base + split

    def handicap(self, island: int) -> float:
        """What its speed is multiplied by before it is compared, see [Note: rungs] and [Note: simple first]."""
        harder = (self.shard > 1) + (self.tp > 1)
        harder += self.replicate > 1 and 1 < self.shard * self.tp < island
        beyond = self.shard > 1 and self.shard * self.tp > island
        return (1 - RUNG) ** self.states.rungs * (1 - SIMPLER) ** harder * (1 - BEYOND) ** beyond

    def _overlap(self, config: Config) -> str:
        """The configuration's own method where it can act, if it has one; else the default of the mesh."""
        default = default_method(self.tp, self.sequence_parallel)
        return default if "none" in (default, config.parallel.overlap) else config.parallel.overlap

    def apply(self, config: Config, per_node: int) -> Config:
        """The configuration of this layout. Raises ValueError where `ottava train` would."""
        states = self.states
        parallel: dict[str, Any] = {
            "ranks": self.ranks if self.ranks <= per_node else None,
            "dp_replicate": self.replicate,
            "dp_shard": self.shard,
            "tp": self.tp,
            "strategy": self.strategy,
            "recompute": self.recompute,
            "sequence_parallel": self.sequence_parallel,
            "overlap": self._overlap(config),
        }
        optimizer: dict[str, Any] = {"name": states.optimizer, "moments": states.moments, "masters": states.masters}
        precision: dict[str, Any] = {
            "weights": states.weights,
            "fp8_weights": states.fp8_weights,
            "gradients": states.gradients,
        }
        return replace(
            config,
            parallel=replace(config.parallel, **parallel),
            optimizer=replace(config.optimizer, **optimizer),
            precision=replace(config.precision, **precision),
            train=replace(config.train, micro_batch=self.micro_batch),
        )


def layouts(config: Config, size: ModelSize, gpus: int, per_node: int, dropped: Counter[str]) -> Iterator[Layout]:
    """All sensible ways to use `gpus`, on nodes of `per_node`. What is passed over is counted in `dropped`, by reason."""
    island = min(per_node, gpus)
    for tp in _divisors(island):
        if not _tp_fits(config, size, tp):
            dropped[TP_CUTS] += 1
            continue
        data_parallel = gpus // tp
        for shard in _divisors(data_parallel):
            width = shard * tp
            if island % width and width % island:
                dropped[ACROSS_ISLANDS] += 1
                continue
            batches = list(_batches(config, data_parallel, dropped))
            for states in _states(config, size, data_parallel, tp):
                strategy = "ddp" if shard == 1 < data_parallel and tp == 1 and not states.fp8_weights else "fsdp2"
                for spread, recompute in itertools.product((False, True) if tp > 1 else (False,), RECOMPUTE):
                    for micro_batch, accumulate in batches:
                        layout = Layout(
                            data_parallel // shard, shard, tp, spread, recompute, micro_batch, accumulate, states, strategy
                        )  # fmt: skip
                        reason = _refused(config, layout)
                        if reason is None:
                            yield layout
                        else:
                            dropped[reason] += 1


def _refused(config: Config, layout: Layout) -> str | None:
    """Why `ottava train` would refuse the layout with the rest of this configuration."""
    if config.train.cuda_graph and (layout.ranks > 1 or layout.recompute == "full"):
        return NEEDS_ONE_RANK
    return None


def layout_of(config: Config, ranks: int = 1) -> Layout:
    """The layout that a configuration has by itself, on `ranks`.

    >>> layout_of(preset("llama3-70b"), 64).tp
    8
    """
    plan, optimizer, precision, train = config.plan(), config.optimizer, config.precision, config.train
    if plan.strategy == "fsdp1" or plan.cpu_offload:
        raise ValueError(f"A plan knows no {'parallel.cpu_offload' if plan.cpu_offload else 'strategy fsdp1'}.")
    plan = plan.resolve(ranks)
    states = States(
        optimizer.name, precision.weights, precision.fp8_weights, optimizer.masters, optimizer.moments, precision.gradients, 0
    )  # fmt: skip
    turns = train.global_batch // (train.micro_batch * plan.dp_replicate * plan.dp_shard)
    return Layout(
        *plan.shape, plan.sequence_parallel, plan.recompute, train.micro_batch, turns, states, plan.strategy
    )  # fmt: skip


def _batches(config: Config, data_parallel: int, dropped: Counter[str]) -> Iterator[tuple[int, int]]:
    """(sequences at a time, times a step)."""
    sequences = config.train.global_batch
    if sequences < data_parallel:
        dropped[TOO_FEW_SEQUENCES] += 1
        return
    for micro_batch in sorted({*MICRO_BATCHES, config.train.micro_batch}):
        if micro_batch * data_parallel > sequences:
            return
        if sequences % (micro_batch * data_parallel):
            dropped[NOT_DIVIDED] += 1
            continue
        yield micro_batch, sequences // (micro_batch * data_parallel)


def _states(config: Config, size: ModelSize, data_parallel: int, tp: int) -> Iterator[States]:
    """The configuration's own types first, then those with fewer bits."""
    optimizer, precision = config.optimizer, config.precision
    quantized = precision.recipe != "none" and not precision.unquantized(size.layers)
    stored = [(precision.weights, precision.fp8_weights, optimizer.masters)]
    if quantized and not precision.fp8_weights:
        stored.append(("bfloat16", True, "float32"))
    blocks = all(width % (tp * BLOCK) == 0 for width in (size.hidden, size.ffn)) or tp == 1
    first = MOMENTS.index(optimizer.moments)
    for n, (weights, fp8_weights, masters) in enumerate(stored):
        for m, moments in enumerate(MOMENTS[first:]):
            if moments == "float8" and not blocks:
                continue
            gradients = [precision.gradients]
            if data_parallel == 1 and weights == "float32" and precision.gradients == "float32":
                gradients.append("bfloat16")
            for g, kept in enumerate(gradients):
                if n and kept == "bfloat16":
                    continue  # FP8 storage has gradients of its nominal type already
                changed = n + m + g
                yield States(
                    "fused_adam" if changed else optimizer.name,
                    weights,
                    fp8_weights,
                    masters,
                    moments,
                    "float32" if n else kept,
                    changed,
                )


def tp_sizes(config: Config, size: ModelSize, island: int) -> list[int]:
    """Sizes of tensor parallelism that the model allows, inside NVLink domains of `island` GPUs."""
    return [tp for tp in _divisors(island) if _tp_fits(config, size, tp)]


def _tp_fits(config: Config, size: ModelSize, tp: int) -> bool:
    if tp == 1:
        return True
    recipe = config.precision.make_recipe()
    multiple = 1 if recipe is None else Quantization.of(recipe).feature_multiple
    divided = (size.heads, size.kv_channels // size.head_channels, config.model.pad_vocab_to, size.length)
    return all(number % tp == 0 for number in divided) and all(
        width % (tp * multiple) == 0 for width in (size.hidden, size.ffn)
    )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
