"""`plan_run`: every sensible layout of a run on a cluster, judged by memory and by time, and the best of them.

>>> found = plan_run(preset("llama3-8b"), Cluster.of("h200", gpus=64))
>>> found.best[0].layout.name
'HSDP'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ottava.plan.chart import advice
from ottava.plan.cluster import Cluster
from ottava.plan.devices import RATE_OF_RECIPE
from ottava.plan.footprint import ElementBytes, Footprint, footprint
from ottava.plan.layouts import NEEDS_ONE_RANK, Layout, layouts, tp_sizes
from ottava.plan.model_size import ModelSize
from ottava.plan.step_time import StepTime, step_time
from ottava.train.config import Config
from ottava.train.flops import Bound, device_peak, quantized_precision

USABLE = 0.95
"""Of a GPU's memory: an allocator cannot use all of it."""
SHOWN = 5
TIE = 1e-6
"""Of a score: no difference. Layouts come simplest first."""
DOES_NOT_FIT = "more memory than a GPU has"
SLOWER = "slower than another with the same mesh"
SLOWER_MESH = "slower than the meshes shown"
LARGEST = 2**17
"""GPUs up to which a size that would do is looked for."""


class NothingFits(ValueError):
    """No layout runs on these GPUs. The message says what would."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs."""

    layout: Layout
    memory: Footprint
    time: StepTime
    tokens_per_s: float
    """Of all GPUs together."""
    mfu: float | None
    score: float
    """Tokens a second, less what a harder layout and fewer bits have to earn."""

    def days(self, tokens: float) -> float:
        """To train on `tokens`."""
        return tokens / self.tokens_per_s / 86400


@dataclass(frozen=True)
class Plan:
    """What was found."""

    config: Config
    cluster: Cluster
    best: tuple[Candidate, ...]
    """One for each mesh, the best first."""
    considered: int
    dropped: dict[str, int]
    """How many layouts were passed over, by reason."""
    tokens: float
    """That the run is to be trained on."""
    advice: str
    document: float | None = None

    @property
    def winner(self) -> Candidate:
        """The best."""
        return self.best[0]

    def winning_config(self) -> Config:
        """What `ottava train` takes."""
        return self.winner.layout.apply(self.config, self.cluster.per_node)


def plan_run(config: Config, cluster: Cluster, tokens: float | None = None, document: float | None = None) -> Plan:
    """Plans the run of `config` on `cluster`.

    tokens: to train on; as many as the configuration's steps have, if not given. document: mean tokens of a document, if attention
    stays within documents (data.document_mask); None counts whole sequences.
    """
    size = ModelSize.of(config)
    _check_recipe(config, cluster)
    if config.precision.dtype("cuda") == torch.float32:
        raise ValueError("A plan has rates of bfloat16 alone: --set precision.activations=auto.")
    if config.parallel.cpu_offload:
        raise ValueError("A plan does not know how fast host memory is: leave parallel.cpu_offload off.")
    if document is not None and not (0 < document < math.inf and config.data.document_mask):
        raise ValueError(
            f"A mean document of {document:g} tokens is for data.document_mask, which is {config.data.document_mask}, and above 0."
        )
    dropped: Counter[str] = Counter()
    fitting, considered = [], 0
    limit = cluster.gpu.memory_gib * 2**30 * USABLE
    bytes_, bound, closest = ElementBytes.of(config), _bound(config, cluster), None
    step_tokens = config.train.global_batch * size.length
    for layout in layouts(config, size, cluster.gpus, cluster.per_node, dropped):
        considered += 1
        memory = footprint(config, size, bytes_, layout)
        if memory.total > limit:
            dropped[DOES_NOT_FIT] += 1
            closest = min(memory.total, closest or memory.total)
            continue
        time = step_time(config, size, bytes_, cluster, layout, document)
        rate = step_tokens / time.total
        score = rate * layout.handicap(cluster.island)
        fitting.append(Candidate(layout, memory, time, rate, bound.mfu(size.flops, rate / cluster.gpus), score))
    if not fitting:
        raise NothingFits(_nothing(config, size, cluster, closest, dropped))
    best = _best_of_each_mesh(fitting, dropped)
    budget = tokens or float(step_tokens * config.train.steps)
    shown = tuple(best[:SHOWN])
    if len(best) > SHOWN:
        dropped[SLOWER_MESH] += len(best) - SHOWN
    whole = any(candidate.layout.shard == candidate.layout.tp == 1 for candidate in fitting)
    rungs = shown[0].layout.states.rungs
    near = any(c.layout.shard * c.layout.tp <= cluster.island and c.layout.states.rungs <= rungs for c in fitting)
    words = advice(config, cluster, shown[0].layout, shown[0].time, whole, near)
    return Plan(config, cluster, shown, considered, dict(dropped), budget, words, document)


def _best_of_each_mesh(fitting: list[Candidate], dropped: Counter[str]) -> list[Candidate]:
    meshes: dict[tuple[object, ...], Candidate] = {}
    for candidate in fitting:
        mesh = candidate.layout
        key = (mesh.replicate, mesh.shard, mesh.tp, mesh.sequence_parallel)
        known = meshes.get(key)
        if known is None or candidate.score > known.score * (1 + TIE):
            meshes[key] = candidate
    if len(fitting) > len(meshes):
        dropped[SLOWER] += len(fitting) - len(meshes)
    return sorted(meshes.values(), key=lambda candidate: -candidate.score)


def _check_recipe(config: Config, cluster: Cluster) -> None:
    kind = RATE_OF_RECIPE[config.precision.recipe]
    if kind not in cluster.gpu.gemm_tflops:
        recipes = [name for name, rate in RATE_OF_RECIPE.items() if rate in cluster.gpu.gemm_tflops]
        raise ValueError(
            f"precision.recipe {config.precision.recipe!r} has no rate for {cluster.gpu.name}: it would be emulated and slow. Choose "
            f"{' or '.join(f'--set precision.recipe={name}' for name in recipes)}, or give measured rates with --table."
        )


def _bound(config: Config, cluster: Cluster) -> Bound:
    layers = config.model.layers
    quantized = quantized_precision(config.precision.make_recipe())
    share = config.precision.unquantized(layers) / layers if quantized is not None else 0.0
    return Bound(device_peak(cluster.gpu.name), "bf16", quantized, share, config.precision.fp8_head)


def _nothing(config: Config, size: ModelSize, cluster: Cluster, closest: float | None, dropped: Counter[str]) -> str:
    """Why, and the smallest number of GPUs that would do."""
    if closest is None:
        tps = tp_sizes(config, size, cluster.island)
        if dropped[NEEDS_ONE_RANK]:
            return f"No layout of {cluster.gpus} GPUs is possible: {NEEDS_ONE_RANK}. Leave that off."
        sequences, most = config.train.global_batch, tps[-1]
        ranks = cluster.gpus // most  # the fewest; tps divide a node
        step = math.lcm(ranks, config.train.micro_batch)
        would_do = f"--set train.global_batch={-(-sequences // step) * step}"
        if ranks > sequences:
            return (
                f"train.global_batch ({sequences}) has fewer sequences than {cluster.gpus} GPUs need: with tensor parallelism of "
                f"{most} they are {ranks} data-parallel ranks. Take at most {sequences * most} GPUs, or {would_do}."
            )
        return (
            f"train.global_batch ({sequences}) cannot be divided over {cluster.gpus} GPUs: the data-parallel ranks (GPUs / tp, with tp "
            f"one of {', '.join(map(str, tps))}) must divide it. Change --gpus, or {would_do}."
        )
    short = (
        f"No layout of this run fits {cluster.gpus} x {cluster.gpu.name} ({cluster.gpu.memory_gib:.0f} GiB): the smallest needs "
        f"{closest / 2**30:.0f} GiB a GPU."
    )
    for gpus in _larger(cluster):
        larger = cluster.resized(gpus)
        bytes_, limit = ElementBytes.of(config), cluster.gpu.memory_gib * 2**30 * USABLE
        if any(
            footprint(config, size, bytes_, layout).total <= limit
            for layout in layouts(config, size, gpus, larger.per_node, Counter())
        ):
            return f"{short} {gpus} GPUs would do: --gpus {gpus}."
    return f"{short} More GPUs do not help: shorten the sequences (data.length), or take a GPU with more memory."


def _larger(cluster: Cluster) -> Iterator[int]:
    gpus = cluster.gpus
    while gpus < LARGEST:
        gpus = gpus * 2 if gpus < cluster.per_node else (gpus // cluster.per_node * 2) * cluster.per_node
        yield gpus
