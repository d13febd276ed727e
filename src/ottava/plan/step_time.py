"""Seconds of a training step, by what they go to: products, attention, memory traffic, the loss, the optimizer, communication.

Products and attention by measured rates; everything else on the GPU is bound by memory, and counted in bytes (docs/planning.md has the
table). Communication hides under the computing of one layer and shows where it is longer; of tensor parallelism's only what
`overlap="bulk"` hides counts as hidden (`overlap_time.py` has the other methods). The host is a floor: a layer that the GPU finishes before
Python has launched the next one waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ottava.plan.cluster import Cluster
from ottava.plan.devices import RATE_OF_RECIPE, GpuKind
from ottava.plan.footprint import PLAIN, ElementBytes
from ottava.plan.layouts import Layout
from ottava.plan.links import Group
from ottava.plan.model_size import ModelSize
from ottava.train.config import Config

LAUNCH_S = 4e-6
"""Before and after a product, at its two ends."""
GAP = 0.03
"""Of the GPU's time: between kernels."""
GRAPH_GAP = 0.01
"""The same where one launch has them all (train.cuda_graph)."""
INTERFERENCE = 0.08
"""Of communication that hides: what it takes from the products that it hides under."""
FSDP_HOST_MS = 1.5
"""Of the host, a layer: gathers and reductions to be launched."""
RECOMPUTED_HOST = 0.4
"""Of the host's time for a layer: its forward once more."""
PLAIN_HOST = 0.62
"""Of the host's time for a layer: where nothing is quantized."""
CAST_SHARE = {"bf16": 1.0, "current": 1.0, "delayed": 0.87, "block": 0.54}
"""Of `elementwise_share`, by kind: every block of 128 has a scale to find, and delayed scaling keeps its state."""
WEIGHT_BYTES, ADDED_BYTES = 14.0, {"bf16": 40.0, "quantized": 25.0}
"""An element of a weight, in a step's first micro-batch (its cast and its gradient), and in every later one (the sum of gradients too)."""
FUSED_SHARE, TORCH_SHARE = 1.0, 0.76
"""Of the copy's rate: FusedAdam, and torch's AdamW over many tensors."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    parts: dict[str, float]
    """Products, attention, elementwise, loss, optimizer, communication that shows, host."""
    communication: float
    """All of it, hidden or not."""

    @property
    def total(self) -> float:
        """Of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer and micro-batch on one GPU."""

    gemm: float
    attention: float
    elementwise: float
    forward: float
    """Of all three, the part before backward."""


def step_time(config: Config, size: ModelSize, bytes_: ElementBytes, cluster: Cluster, layout: Layout,
              document: float | None = None) -> StepTime:  # fmt: skip
    """Seconds of a step of `layout`. document: mean tokens of a document, where attention stays within documents."""
    gpu, kind = cluster.gpu, RATE_OF_RECIPE[config.precision.recipe]
    tokens = layout.micro_batch * size.length
    fast = _layer(gpu, kind, size, tokens, layout.tp, layout.sequence_parallel, document)
    slow = _layer(gpu, "bf16", size, tokens, layout.tp, layout.sequence_parallel, document)
    plain = config.precision.unquantized(size.layers) if kind != "bf16" else 0
    parts = dict.fromkeys(("products", "attention", "elementwise", "loss", "optimizer", "communication", "host"), 0.0)
    for layer, count in ((fast, size.layers - plain), (slow, plain)):
        again = {"none": (0.0, 0.0, 0.0), "selective": (0.0, 0.0, 0.25), "full": (1 / 3, 1 / 3.5, 0.4)}[
            layout.recompute
        ]
        parts["products"] += count * layer.gemm * (1 + again[0])
        parts["attention"] += count * layer.attention * (1 + again[1])
        parts["elementwise"] += count * layer.elementwise * (1 + again[2])
    head = kind if config.precision.fp8_head else "bf16"
    parts["loss"] = _loss(gpu, head, size, tokens, layout.tp, config.train.max_logits)
    gap = GRAPH_GAP if config.train.cuda_graph else GAP
    busy = sum(parts.values()) * (1 + gap)
    host = 0.0 if config.train.cuda_graph else size.layers * gpu.host_ms_per_layer * 1e-3
    host *= PLAIN_HOST if kind == "bf16" else 1.0
    if layout.recompute == "full":
        host *= 1 + RECOMPUTED_HOST
    if layout.strategy == "fsdp2" and layout.data_parallel > 1:
        host += size.layers * FSDP_HOST_MS * 1e-3
    forward = fast.forward * (1 + gap)
    backward = (busy - parts["loss"]) / size.layers - forward
    forward, backward = max(forward, host / size.layers / 3), max(backward, host / size.layers * 2 / 3)
    tensor = _tensor_parallel(size, bytes_, cluster, layout, tokens)
    hidden, shown, data_parallel = _data_parallel(size, bytes_, cluster, layout, forward, backward)
    floor = max(host - busy - tensor, 0.0)
    parts = {name: seconds * layout.accumulate for name, seconds in parts.items()}
    parts["elementwise"] += _weights(gpu, kind, size, layout)
    parts["optimizer"] = _optimizer(gpu, size, layout)
    parts["host"] = layout.accumulate * (floor + gap / (1 + gap) * busy)
    parts["communication"] = layout.accumulate * tensor + shown + INTERFERENCE * hidden
    return StepTime(parts, layout.accumulate * tensor + data_parallel)


@lru_cache(maxsize=8192)
def _layer(
    gpu: GpuKind, kind: str, size: ModelSize, tokens: int, tp: int, spread: bool, document: float | None
) -> _Layer:
    gemm = 0.0
    for outputs, inputs, side in size.products:
        n, k = (outputs // tp, inputs) if side == "outputs" else (outputs, inputs // tp)
        for a, b, c in ((tokens, n, k), (tokens, k, n), (n, k, tokens)):
            gemm += 2.0 * a * b * c / (gpu.product_tflops(kind, a, b, c) * 1e12) + LAUNCH_S
    rates, packed = gpu.attention(size.head_channels), "packed_" if document is not None else ""
    # Documents whose lengths spread like those of texts are as costly as even ones of twice the mean.
    seen = size.length if document is None else min(2.0 * document, size.length)
    pairs = (
        2.0 * tokens * seen * size.heads * size.head_channels / tp
    )  # causal: a product of queries and keys, and one with values
    forward = pairs / (rates[f"{packed}forward"] * 1e12)
    backward = 2.5 * pairs / (rates[f"{packed}backward"] * 1e12)
    traffic_forward, traffic_backward = _traffic(size, kind, tokens, tp, spread)
    rate = gpu.copy_tb_s * 1e12 * gpu.elementwise_share * CAST_SHARE.get(kind, CAST_SHARE["block"])
    elementwise = (traffic_forward + traffic_backward) / rate
    return _Layer(gemm, forward + backward, elementwise, gemm / 3 + forward + traffic_forward / rate)


def _traffic(size: ModelSize, kind: str, tokens: int, tp: int, spread: bool) -> tuple[float, float]:
    """Bytes that a layer's casts, norms, activations, rotations and sums read and write: forward, backward.

    Every tensor is read and written once by each kernel that needs it. h, f and qkv are channels; bf16 has 2 bytes, each FP8 copy 1.
    """
    quantized = kind != "bf16"
    between, inside = size.hidden / (tp if spread else 1), size.hidden / tp
    f, fc1, qkv = size.ffn / tp, size.fc1 / tp, size.qkv / tp
    norms, sums = 2 * 4.0 * between, 2 * 6.0 * between
    turned = 4.0 * qkv if size.rotary else 2.0 * qkv
    forward = norms + sums + turned + (2.0 * fc1 + 2.0 * f) + (4.0 * inside if quantized else 0.0)
    backward = 2 * 8.0 * between + (2.0 * fc1 + 2.0 * f + 2.0 * fc1) + turned
    if quantized:
        backward += 2 * 4.0 * between + 4.0 * qkv
    else:  # the activation's output once more
        backward += 2.0 * fc1 + 2.0 * f
    if kind == "current":  # the largest value first, where no producer has it
        forward += 2.0 * (2 * between + inside + f)
        backward += 2.0 * (2 * between + fc1 + qkv)
    return tokens * forward, tokens * backward


def _weights(gpu: GpuKind, kind: str, size: ModelSize, layout: Layout) -> float:
    """Casts of weights, and their gradients as they are written and added up, of all micro-batches."""
    held = (size.layers * size.matrices + size.tables) / (layout.shard * layout.tp)
    later = ADDED_BYTES["bf16" if kind == "bf16" else "quantized"]
    return held * (WEIGHT_BYTES + later * (layout.accumulate - 1)) / (gpu.copy_tb_s * 1e12)


def _loss(gpu: GpuKind, kind: str, size: ModelSize, tokens: int, tp: int, max_logits: int) -> float:
    """The head's three products, and its logits read twice and written once. Quantized, they are read twice more and written as bytes,
    row by row and column by column, and the weight's gradient of a chunk is added to that of the others."""
    rows, h = size.vocabulary // tp, size.hidden
    seconds = 0.0
    for m, n, k in ((tokens, rows, h), (tokens, h, rows), (rows, h, tokens)):
        seconds += 2.0 * m * n * k / (gpu.product_tflops(kind, m, n, k) * 1e12) + LAUNCH_S
    traffic = 3 * PLAIN * tokens * rows / gpu.elementwise_share + 3 * 4.0 * rows * h
    if kind != "bf16":
        chunks = -(-tokens * rows // max_logits)
        traffic += (2 * PLAIN + 2.0) * tokens * rows / gpu.elementwise_share + (chunks - 1) * 4 * 4.0 * rows * h
    return seconds + traffic / (gpu.copy_tb_s * 1e12)


def _optimizer(gpu: GpuKind, size: ModelSize, layout: Layout) -> float:
    """Gradients read for their norm and once more, masters and moments read and written, weights and FP8 copies written."""
    states = layout.states
    held = (size.layers * size.matrices + size.tables) / (layout.shard * layout.tp)
    gradient = 2.0 if states.gradients == "bfloat16" or states.weights == "bfloat16" else 4.0
    moments = {"float32": 8.0, "bfloat16": 4.0, "float8": 2.1}[states.moments]
    each = 2 * gradient + 2 * 4.0 + 2 * moments + 1.0 + (4.0 if not states.fp8_weights else 0.0)
    share = FUSED_SHARE if states.optimizer == "fused_adam" else TORCH_SHARE
    return held * each / (gpu.copy_tb_s * 1e12) / share


def _tensor_parallel(size: ModelSize, bytes_: ElementBytes, cluster: Cluster, layout: Layout, tokens: int) -> float:
    """Of all layers and one micro-batch. Nothing hides in forward; with tokens spread, half of backward's does."""
    if layout.tp == 1:
        return 0.0
    group, fabric, whole = Group.of(layout.tp, 1, cluster.per_node), cluster.fabric, tokens * size.hidden
    reductions = 2 if layout.recompute != "full" else 3
    if not layout.sequence_parallel:  # two sums a layer in forward, two in backward
        return size.layers * reductions * 2 * fabric.all_reduce(whole * PLAIN, group)
    gather = fabric.all_gather(whole * min(bytes_.wire, PLAIN), group)
    scatter = fabric.reduce_scatter(whole * PLAIN, group)
    forward = 2 * (gather + scatter) * (1 if layout.recompute != "full" else 2)
    return size.layers * (forward + 0.5 * (4 * gather + 2 * scatter))


def _data_parallel(
    size: ModelSize, bytes_: ElementBytes, cluster: Cluster, layout: Layout, forward: float, backward: float
) -> tuple[float, float, float]:
    """(hidden, shown, all) seconds a step. forward, backward: computing of one layer."""
    if layout.data_parallel == 1:
        return 0.0, 0.0, 0.0
    gather, scatter, total, first, last = _collectives(size, bytes_, cluster, layout.replicate, layout.shard, layout.tp)
    times, layers = layout.accumulate, size.layers
    shown = times * layers * (max(gather - forward, 0.0) + max(gather - backward, 0.0))
    shown += layers * (max(gather + scatter + total - backward, 0.0) - max(gather - backward, 0.0))
    everything = layers * (2 * times * gather + scatter + total) + times * first + last
    shown += times * first + last + gather  # embedding and head at both ends, and the first layer
    return everything - shown, shown, everything


@lru_cache(maxsize=4096)
def _collectives(
    size: ModelSize, bytes_: ElementBytes, cluster: Cluster, replicate: int, shard: int, tp: int
) -> tuple[float, float, float, float, float]:
    """Seconds of a layer's gather, reduce-scatter and sum over copies, and of embedding and head at the two ends of a step."""
    fabric = cluster.fabric
    shards, copies = Group.of(shard, tp, cluster.per_node), Group.of(replicate, shard * tp, cluster.per_node)
    layer, tables, summed = size.matrices / tp, size.tables / tp, 4.0  # gradients are summed in float32
    return (
        fabric.all_gather(layer * bytes_.wire, shards),
        fabric.reduce_scatter(layer * summed, shards),
        fabric.all_reduce(layer * summed / shard, copies),
        fabric.all_gather(tables * PLAIN, shards),
        fabric.reduce_scatter(tables * summed, shards) + fabric.all_reduce(tables * summed / shard, copies),
    )
