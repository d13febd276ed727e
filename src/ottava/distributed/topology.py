"""Is a plan sensible on this machine and for this model? Asked before anything runs, answered with errors and warnings.

    >>> findings = check_topology(ParallelPlan(tp=16), config, Machine(gpus_per_node=8, nodes=4))
    >>> enforce(findings)
    Traceback (most recent call last):
    ValueError: The plan cannot run here: ...

The detectors of `ottava.detect` judge; here they are asked about a plan. `detect/machine.py` has the [Note: island].
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ottava.detect.finding import Finding, enforce
from ottava.detect.machine import Launch, Machine
from ottava.detect.reduction import reduced_in
from ottava.detect.shards import beyond_island
from ottava.detect.wrapping import check_wrapping
from ottava.distributed.plan import ParallelPlan
from ottava.overlap.connections import connections_advice

__all__ = ["Finding", "Launch", "Machine", "check_model", "check_topology", "enforce"]

# What tp divides, and the names under which model configurations have it. The first is TransformerEngine's, which ours is too.
_DIVIDED_BY_TP = {
    "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads"),
    "kv heads": ("num_gqa_groups", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"),
    "ffn": ("ffn_hidden_size", "intermediate_size", "ffn_dim"),
    "vocabulary": ("padded_vocab_size", "vocab_size", "vocabulary_size"),
    "learned positions": ("learned_positions",),
}
# Of our own models: sizes that follow from a field, and what to make of that.
_FIELDS = {
    "padded_vocab_size": "set pad_vocab_to to a multiple of {tp}",
    "learned_positions": "set max_length to {padded}",
}


def check_topology(plan: ParallelPlan, config: Any = None, machine: Machine | None = None) -> list[Finding]:
    """What is wrong (errors) or slow and risky (warnings) in `plan` for a model like `config` on `machine`.

    config: a mapping or an object with `num_attention_heads`, `num_gqa_groups`, `ffn_hidden_size`, `vocab_size` (the names of
    Hugging Face configurations serve too); None leaves these checks out. machine: `Machine.detect()` if not given.

        >>> check_topology(ParallelPlan(tp=3), {"num_attention_heads": 8}, Machine(gpus_per_node=6))
        [Finding(level='error', message='tp=3 does not divide num_attention_heads=8 ...')]
    """
    machine = machine or Machine.detect()
    try:
        plan = plan.resolve(machine.world_size)
    except ValueError as error:
        return [Finding("error", str(error)), *_sizes(plan, config)]
    places = _tp_island(plan, machine) or _weight_island(plan, machine)  # the second's advice needs a tp that fits
    return [*places, *_gradients(plan), *_overlap(plan), *_connections(plan), *_sizes(plan, config)]


def check_model(model: nn.Module) -> list[Finding]:
    """What is wrong in how `model` is wrapped and split, whoever wrapped it.

    >>> check_model(fully_shard(model))
    [Finding(level='warning', message='only the root ...')]
    """
    return [*check_wrapping(model), *_uneven_rows(model)]


def _tp_island(plan: ParallelPlan, machine: Machine) -> list[Finding]:
    """tp communicates inside every layer, so a tp group that leaves its island makes every layer slow."""
    island, tp = machine.island, plan.tp
    if machine.islands == 1 or island % tp == 0:
        return []
    fault = "is larger than" if tp > island else "does not divide"
    best = max(size for size in range(1, min(tp, island) + 1) if island % size == 0)
    return [
        Finding(
            "error",
            f"tp={tp} {fault} the fast-link island of {island} GPUs, so layers would communicate between nodes: "
            f"take tp={best} (or another divisor of {island}), or give the real island with Machine(island=...).",
        )
    ]


def _weight_island(plan: ParallelPlan, machine: Machine) -> list[Finding]:
    """Weights are gathered for every layer: over the slow links too, if a weight's ranks do not lie in one island."""
    island, span = machine.island, plan.dp_shard * plan.tp  # span: ranks that one weight lies on
    if plan.strategy not in ("fsdp2", "fsdp1") or plan.dp_shard == 1 or machine.islands == 1 or island % span == 0:
        return []
    group = f"dp_shard={plan.dp_shard} x tp={plan.tp} = {span} ranks"
    advice = ""
    if island % plan.tp == 0 and machine.world_size % island == 0:
        sizes = f"dp_replicate={machine.world_size // island}, dp_shard={island // plan.tp}, tp={plan.tp}"
        hybrid = f"ParallelPlan({sizes}, strategy={plan.strategy!r})"
        advice = f" If one island's memory holds the model, use HSDP: {hybrid} gathers inside islands only."
    return [beyond_island(group, span, plan.dp_replicate, island, advice)]


def _gradients(plan: ParallelPlan) -> list[Finding]:
    ranks = plan.dp_replicate * plan.dp_shard
    if plan.strategy == "none" and ranks > 1:
        return [
            Finding(
                "warning",
                f'strategy "none" with {ranks} data-parallel ranks (dp_replicate x dp_shard): nobody sums the gradients unless '
                'you wrap the model yourself. Otherwise take strategy="fsdp2".',
            )
        ]
    return reduced_in(plan.reduce_dtype, ranks)


def _connections(plan: ParallelPlan) -> list[Finding]:
    """Streams that share a hardware queue wait for each other."""
    if plan.overlap == "none" or plan.tp == 1 or not torch.cuda.is_available():
        return []
    advice = connections_advice(os.environ, sharded=plan.strategy == "fsdp2" and plan.dp_shard > 1)
    return [] if advice is None else [Finding("warning", advice)]


def _overlap(plan: ParallelPlan) -> list[Finding]:
    if plan.overlap != "none" and plan.tp > 1 and not plan.sequence_parallel:
        return [
            Finding(
                "warning",
                f'overlap="{plan.overlap}" hides the gathers and sums of spread tokens: without sequence_parallel=True there are none.',
            )
        ]
    return []


def _sizes(plan: ParallelPlan, config: Any) -> list[Finding]:
    """Every tp rank holds whole heads, and an equal part of the ffn and of the vocabulary.

    Equal parts are also what keeps a column-parallel weight right under FSDP: torch computes the offsets of such a shard
    (`_StridedShard`) wrongly when its rows do not divide by tp.
    """
    if config is None or plan.tp in (1, -1):
        return []
    found = {what: named for what, names in _DIVIDED_BY_TP.items() if (named := _lookup(config, names)) is not None}
    if not found:
        known = ", ".join(names[0] for names in _DIVIDED_BY_TP.values())
        return [
            Finding(
                "warning",
                f"the model's sizes cannot be checked against tp={plan.tp}: {type(config).__name__} has none of {known}.",
            )
        ]
    return [
        Finding(
            "error",
            f"tp={plan.tp} does not divide {name}={size} ({what}; {size % plan.tp} left over): {_nearest(what, name, size, plan.tp)}",
        )
        for what, (name, size) in found.items()
        if size % plan.tp
    ]


def _lookup(config: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return None


def _nearest(what: str, name: str, size: int, tp: int) -> str:
    divisor = max(n for n in range(1, min(tp, size) + 1) if size % n == 0)
    if what in ("heads", "kv heads"):
        return f"take tp={divisor}, or a model whose {what} divide by {tp}."
    padded = -(-size // tp) * tp
    return f"{_FIELDS.get(name, 'pad it to {padded}').format(tp=tp, padded=padded)}, or take tp={divisor}."


def _uneven_rows(model: nn.Module) -> list[Finding]:
    """Parameters that the mesh dimension "tp" does not split into equal parts. Right over dp, where uneven shards are fine."""
    from torch.distributed.tensor import DTensor  # here, as FSDP above

    findings = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
            continue
        mesh = parameter.device_mesh
        index = (mesh.mesh_dim_names or ()).index("tp")
        placement, tp = parameter.placements[index], mesh.size(index)
        if not placement.is_shard():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        size = parameter.shape[dim]
        if size % tp:
            side = "rows" if dim == 0 else "columns"
            findings.append(
                Finding(
                    "error",
                    f"tp={tp} does not divide the {size} {side} of {name} {tuple(parameter.shape)}, and torch then places FSDP "
                    f"shards at wrong offsets: pad them to {-(-size // tp) * tp}, or take a tp that divides {size}.",
                )
            )
    return findings
