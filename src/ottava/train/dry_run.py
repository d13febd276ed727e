"""`ottava train CONFIG --dry-run`: what would run, without running it. Nothing is allocated and no rank is started."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ottava.distributed import ParallelPlan
from ottava.models import CausalLM
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.config_checks import check_data_parallel
from ottava.train.model import construct
from ottava.train.summary import table
from ottava.train.tokenize import ByteTokenizer
from ottava.train.world import Place, local_ranks

GIB = 2.0**30
SAVED_BYTES = 34
"""Of activations that a layer keeps for backward, a token and channel, in units of the activation type's half: measured rule of thumb
for a transformer layer with flash attention (Korthikanti et al., 2022), without what FP8 saves."""


def describe(config: Config) -> str:
    """The resolved configuration, the mesh, the size of the model, memory of a rank, and what would run. ValueError for what cannot.

    >>> print(describe(preset("llama3-8b")))
    """
    place = Place.from_torchrun()
    asked = config.parallel.ranks
    mesh = config.plan("cpu")
    # A mesh without an open dimension says how many ranks it is for: a plan for a cluster can be looked at anywhere.
    everywhere = place is None and asked is None and mesh.is_resolved
    ranks = place.size if place is not None else math.prod(mesh.shape) if everywhere else local_ranks(asked)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = config.plan(device).resolve(ranks)
    model = construct(config, config.model.vocab_size or ByteTokenizer.vocab_size)
    dp = plan.dp_replicate * plan.dp_shard
    config = config.on_ranks(dp)
    check_data_parallel(config, dp)
    train = config.train
    micro = train.global_batch // (dp * train.micro_batch)
    rows: list[tuple[str, ...]] = [
        (
            "ranks",
            f"{ranks} x {device}" + (" (torchrun)" if place is not None else " (of the mesh)" if everywhere else ""),
        ),
        ("mesh", f"dp_replicate {plan.dp_replicate} x dp_shard {plan.dp_shard} x tp {plan.tp}, {plan.strategy}"),
        ("parameters", f"{model.num_parameters():,} ({model.num_parameters(tables=False):,} without embedding tables)"),
        ("tokens a step", f"{train.global_batch * config.data.length:,} in {micro} microbatches a rank"),
        ("tokens in all", f"{train.global_batch * config.data.length * train.steps:,}"),
        ("products", _products(config, plan)),
        ("run", str(config.run_folder)),
        *_missing_files(config),
    ]
    parts = memory(config, model, plan, device)
    estimate = [(name, f"{size / GIB:8.2f} GiB") for name, size in parts.items()]
    total = ("in all, about", f"{sum(parts.values()) / GIB:8.2f} GiB")
    return f"{to_toml(config)}\n{table(rows)}\n\nMemory of a rank, estimated\n{table([*estimate, total])}"


def _missing_files(config: Config) -> list[tuple[str, str]]:
    """Files that the run needs and that are not on this machine: the ranks may be on others."""
    data = config.data
    named = [*data.files, *([data.tokenizer] if data.tokenizer != "byte" else [])]
    return [("not here", name) for name in named if not Path(name).expanduser().exists()]


def _products(config: Config, plan: ParallelPlan) -> str:
    precision, layers = config.precision, config.model.layers
    if precision.recipe == "none":
        return str(plan.param_dtype)
    plain = precision.unquantized(layers)
    where = f" in all but the last {plain} of {layers} layers" if plain else ""
    more = (", head too" if precision.fp8_head else "") + (
        ", attention's forward too" if precision.fp8_attention else ""
    )
    return precision.recipe + where + more


MASTER_BYTES = {"float32": 4.0, "remainder": 2.0, "none": 0.0}
MOMENT_BYTES = {"float32": 8.0, "bfloat16": 4.0, "float8": 2.0 + 8.0 / 128}
"""Of both moments of a parameter, with their scales."""


def memory(config: Config, model: CausalLM, plan: ParallelPlan, device: str) -> dict[str, float]:
    """Bytes of a rank by what they are for: an estimate from sizes alone.

    >>> sum(memory(config, construct(config, 257), plan.resolve(8), "cuda").values()) / 2**30
    """
    count, shape, train = model.num_parameters(), config.model, config.train
    sharded = plan.dp_shard if plan.strategy in ("fsdp2", "fsdp1") else 1
    held = count / (sharded * plan.tp)
    weight = torch.finfo(getattr(torch, config.precision.weights)).bits / 8
    if config.precision.fp8_weights:
        weight = 1.0
    masters = MASTER_BYTES[config.optimizer.masters] if weight < 4 and config.optimizer.name == "fused_adam" else 0.0
    wire = 1.0 if config.precision.recipe != "none" else torch.finfo(plan.param_dtype).bits / 8
    layer = count / plan.tp / shape.layers  # embeddings count as a part of each, so this is on the safe side
    activation = torch.finfo(plan.param_dtype).bits / 16  # of the 16 bits that the rule of thumb is for
    tokens = train.micro_batch * config.data.length
    kept = {"none": SAVED_BYTES, "selective": SAVED_BYTES * 0.6, "full": 2.0}[plan.recompute]
    all_logits = tokens * (shape.vocab_size or 257) / plan.tp
    logits = min(all_logits, train.max_logits)
    head = (shape.vocab_size or 257) * shape.hidden_size / plan.tp
    # On a GPU gradients take the place of the logits, and that of the head's weight is added up in float32 over the pieces.
    loss = logits * 2 * activation + (head * 4.0 if all_logits > logits else 0.0)
    accumulates = train.global_batch > plan.dp_replicate * plan.dp_shard * train.micro_batch
    return {
        "weights": held * weight,
        "FP8 copies": held if plan.strategy == "fsdp2" and config.precision.recipe != "none" and weight > 1 else 0.0,
        "gradients": held * torch.finfo(getattr(torch, config.precision.gradients)).bits / 8,
        "optimizer": held * (MOMENT_BYTES[config.optimizer.moments] + masters),
        "gathered layers": layer * wire * (1 + plan.prefetch) * (2 if sharded > 1 else 0),
        "unreduced gradients": count / plan.tp * 4.0 if accumulates and sharded > 1 else 0.0,
        "activations": shape.layers * tokens * shape.hidden_size * kept * activation / plan.tp,
        "logits": loss if device == "cuda" else logits * (4.0 + 2 * activation),
    }
