"""Memory of a rank by kind, from sizes alone: microseconds a layout, where `memory.estimate` runs a step without data for minutes.

[Note: when memory peaks]
Three moments can be the highest. At the loss every layer's activations are there, and logits; gradients only if earlier micro-batches
left some. At the first layer of backward the activations are still there, beside that layer's own gradients. At the end of backward
all gradients are there. Activations go and gradients come at an even pace in between, so nothing in the middle is higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

import ottava
from ottava.plan.layouts import Layout, States
from ottava.plan.model_size import ModelSize
from ottava.quant.scheme import Scheme
from ottava.train.config import Config

MASTER_BYTES = {"float32": 4.0, "remainder": 2.0, "none": 0.0}
MOMENT_BYTES = {"float32": 8.0, "bfloat16": 4.0, "float8": 2.0 + 8.0 / 128}
"""Of both moments of a parameter, with their scales."""
PLAIN = 2.0
"""Bytes of a bfloat16, which activations are on a GPU unless the configuration says otherwise."""
CONTEXT_GIB, GROUP_GIB = 1.0, 0.6
"""Of libraries' workspaces, and of a communicator's buffers: outside of what torch counts as allocated."""
SPACE = 8192.0 * 8192.0
"""Bytes of scratch that kernels and products take at a time."""

KINDS = (
    "parameters",
    "masters",
    "moments",
    "FP8 copies",
    "gradients",
    "gathered",
    "activations",
    "loss",
    "workspace",
)


@dataclass(frozen=True)
class ElementBytes:
    """Bytes an element of what a recipe makes, with its scales."""

    kept: float
    """Of a product's input, for the weight's gradient."""
    copy: float
    """Of a weight's FP8 form as a rank keeps it; 0 without a recipe."""
    wire: float
    """Of a weight as it is gathered."""
    unquantized: float = PLAIN
    """Of an activation that is not quantized."""

    @staticmethod
    def of(config: Config) -> ElementBytes:
        """Counted on a small tensor: formats are the business of `quant`."""
        recipe = config.precision.make_recipe()
        plain = float(config.precision.dtype("cuda").itemsize)
        if recipe is None:
            return ElementBytes(plain, 0.0, plain, plain)
        x = torch.zeros(256, 256, dtype=torch.float32)
        made = ottava.quantize(x, recipe, role="input")
        weight = ottava.quantize(x, recipe, role="weight")
        kept = (_size(made.columnwise_data) + _size(made.columnwise_scale_inv)) / x.numel()
        row = (_size(weight.rowwise_data) + _size(weight.rowwise_scale_inv)) / x.numel()
        both = 1 if Scheme.of(recipe, "weight").transposable else 2
        return ElementBytes(kept, row * both, row, plain)


def _size(tensor: torch.Tensor | None) -> int:
    assert tensor is not None  # both copies were asked for
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank, by kind, at the moment when they are most."""

    kinds: dict[str, float]

    @property
    def allocated(self) -> float:
        """What torch counts as allocated."""
        return sum(size for kind, size in self.kinds.items() if kind != "workspace")

    @property
    def total(self) -> float:
        """With libraries' workspaces and communicators."""
        return sum(self.kinds.values())


def footprint(config: Config, size: ModelSize, bytes_: ElementBytes, layout: Layout) -> Footprint:
    """Memory of a rank of `layout`.

    >>> footprint(config, ModelSize.of(config), ElementBytes.of(config), layout).allocated / 2**30
    """
    held = _held(size, bytes_, layout.states, layout.shard, layout.tp, layout.strategy, layout.accumulate > 1)
    tokens = layout.micro_batch * size.length
    quantized = 1 - config.precision.unquantized(size.layers) / size.layers
    kept, one_layer, backward = _activations(
        size, bytes_, tokens, layout.tp, layout.sequence_parallel, layout.recompute, quantized
    )
    loss_peak, loss_kept = _loss(size, bytes_, tokens, layout, config.train.max_logits, config.precision.fp8_head)
    gathered, reducing, at_the_end = _gathered(size, bytes_, layout, config.parallel.prefetch)
    gradients = held["gradients"]
    unreduced = 0.0
    if layout.accumulate > 1 and layout.strategy == "fsdp2" and layout.data_parallel > 1:
        unreduced = 4.0 * size.parameters / layout.tp
    # A CUDA graph keeps the memory of gradients from its first launch on.
    there = layout.accumulate > 1 or config.train.cuda_graph
    earlier = max(gradients, unreduced) if there else 0.0
    moments = {
        "loss": {"activations": kept, "loss": loss_peak, "gathered": gathered, "gradients": earlier},
        "first layer": {
            "activations": kept + backward + (one_layer if layout.recompute == "full" else 0.0),
            "loss": loss_kept,
            "gathered": gathered + reducing,
            "gradients": earlier,
        },
        "end": {
            "activations": (one_layer if layout.recompute == "full" else 0.0) + backward if layout.shard == 1 else 0.0,
            "loss": 0.0,
            "gathered": at_the_end,
            "gradients": gradients,
        },
    }
    highest = max(moments.values(), key=lambda kinds: sum(kinds.values()))
    groups = (layout.replicate > 1) + (layout.shard > 1) + (layout.tp > 1)
    outside = (CONTEXT_GIB + GROUP_GIB * groups) * 2**30
    found = {**held, **highest, "workspace": outside}
    found["loss"] += SPACE  # scratch that torch's allocator does count
    return Footprint({kind: found[kind] for kind in KINDS})


@lru_cache(maxsize=4096)
def _held(
    size: ModelSize, bytes_: ElementBytes, states: States, shard: int, tp: int, strategy: str, accumulates: bool
) -> dict[str, float]:
    """What lies there between steps, and the gradients. Callers leave the dict as it is."""
    matrices = size.layers * size.matrices / (shard * tp)
    rest = (size.tables / tp + size.layers * size.vectors + size.extra) / shard
    nominal = 4.0 if states.weights == "float32" else 2.0
    stored = 1.0 if states.fp8_weights else nominal
    fused = states.optimizer == "fused_adam"
    master = MASTER_BYTES[states.masters] if fused else 0.0
    copies = 0.0
    if strategy == "fsdp2":
        copies = 0.0 if states.fp8_weights else bytes_.copy
    elif bytes_.copy:  # made in forward: the columnwise one waits for backward, both for the next micro-batch
        copies = 2.0 if accumulates else 1.0
    if not bytes_.copy and nominal > bytes_.unquantized and shard == 1:
        copies = bytes_.unquantized  # torch.autocast's
    gradient = 2.0 if states.gradients == "bfloat16" or nominal == 2.0 else 4.0
    return {
        "parameters": matrices * stored + rest * nominal,
        "masters": (matrices * master if stored < 4 else 0.0) + (rest * master if nominal < 4 else 0.0),
        "moments": (matrices + rest) * MOMENT_BYTES[states.moments],
        "FP8 copies": matrices * copies,
        "gradients": (matrices + rest) * gradient,
    }


@lru_cache(maxsize=4096)
def _activations(
    size: ModelSize, bytes_: ElementBytes, tokens: int, tp: int, spread: bool, recompute: str, quantized: float
) -> tuple[float, float, float]:
    """(kept by all layers, kept by one layer without recomputation, what its backward works with)."""
    h, f, between = size.hidden, size.ffn, tp if spread else 1
    kept = quantized * bytes_.kept + (1 - quantized) * bytes_.unquantized  # docs/memory.md counts the same
    high = bytes_.unquantized * (2 * h / between + (size.qkv + h + size.fc1) / tp) + 4.0 * size.heads / tp
    # A product's input for its weight's gradient. proj's is attention's output, which is there already. An activation's output is made
    # again in backward; only its FP8 copy is kept, where it is split over ranks.
    spread_copy = quantized * bytes_.kept if tp > 1 else 0.0
    low = kept * 2 * h / between + spread_copy * f / tp
    backward = tokens * ((2.0 * size.fc1 + bytes_.unquantized * f) / tp + 3 * bytes_.unquantized * h)
    whole = tokens * (high + low)
    each = {"none": whole, "selective": tokens * high, "full": tokens * bytes_.unquantized * h / between}[recompute]
    return size.layers * each, whole, backward


def _loss(
    size: ModelSize, bytes_: ElementBytes, tokens: int, layout: Layout, max_logits: int, quantized: bool
) -> tuple[float, float]:
    """(at the loss, what stays of it until backward): the head's gradients are made in forward (models/head_loss.py).

    quantized: the gradient of a chunk's logits becomes bytes by rows and by columns, and then the weight's gradient of that chunk.
    """
    rows = size.vocabulary / layout.tp
    logits = min(tokens * rows, float(max_logits))
    head = rows * size.hidden
    several = tokens * rows > max_logits
    sharded = layout.shard > 1  # then the head is gathered in bf16, counted there, and its gradient is bf16 too
    exact = layout.states.weights == "float32" and layout.states.gradients == "float32" and not sharded
    gradient = head * (4.0 if several or exact else 2.0)
    weight = bytes_.unquantized * head if layout.states.weights == "float32" and not sharded else 0.0
    working = bytes_.unquantized * logits
    if quantized:
        working, weight = max(2 * working, working + (4.0 * head if several else 0.0)), 2.0 * head
    dx = bytes_.unquantized * tokens * size.hidden
    return working + gradient + weight + dx, gradient + dx


def _gathered(size: ModelSize, bytes_: ElementBytes, layout: Layout, prefetch: int) -> tuple[float, float, float]:
    """(weights that are gathered at a time; a layer's gradients while they are reduced; those of embedding and head, at the end)."""
    if layout.strategy == "ddp":
        buckets = 4.0 * 25 * 2**20 * 2
        return 0.0, buckets, buckets
    if layout.data_parallel == 1:
        return 0.0, 0.0, 0.0
    layer, tables = size.matrices / layout.tp, size.tables / layout.tp
    # The layer that runs and those that are gathered ahead; embedding and head until the end, when they go before their gradients are
    # copied into the float32 buffer that is reduced.
    weights = tables * bytes_.unquantized + (layer * bytes_.wire * (1 + prefetch) if layout.shard > 1 else 0.0)
    return weights, layer * (bytes_.unquantized + 4.0), tables * (bytes_.unquantized + 4.0)
