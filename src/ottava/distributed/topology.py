"""Is a plan sensible on this machine and for this model? Asked before anything runs, answered with errors and warnings.

    >>> findings = check_topology(ParallelPlan(tp=16), config, Machine(gpus_per_node=8, nodes=4))
    >>> enforce(findings)
    Traceback (most recent call last):
    ValueError: The plan cannot run here: ...

[Note: island]
The GPUs that reach each other over the fast links (NVLink, xGMI): mostly one node, and several nodes in a rack-scale machine.
Ranks are placed in order, so ranks 0 .. island-1 are the first island. A group of neighbouring ranks stays inside one island
if its size divides the island's. tp groups work in every layer and must; weight groups (dp_shard x tp) should.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ottava.distributed.plan import ParallelPlan
from ottava.notices import leads, warn_once

# What tp divides, and the names under which model configurations have it. The first is TransformerEngine's, which ours is too.
_DIVIDED_BY_TP = {
    "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads"),
    "kv heads": ("num_gqa_groups", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"),
    "ffn": ("ffn_hidden_size", "intermediate_size", "ffn_dim"),
    "vocabulary": ("padded_vocab_size", "vocab_size", "vocabulary_size"),
}


@dataclass(frozen=True)
class Finding:
    """One thing to say about a plan.

    >>> Finding("warning", "gradients are reduced in bfloat16")
    Finding(level='warning', message='gradients are reduced in bfloat16')
    """

    level: Literal["error", "warning"]
    """ "error": it cannot run, or not as meant. "warning": it runs, and something else is mostly better."""

    message: str
    """What was found, with its numbers, and what to do."""


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
    return [*places, *_gradients(plan), *_overlap(plan), *_sizes(plan, config)]


def check_model(model: nn.Module) -> list[Finding]:
    """What is wrong in how `model` is wrapped and split, whoever wrapped it.

    >>> check_model(fully_shard(model))
    [Finding(level='warning', message='only the root ...')]
    """
    return [*_wrapping(model), *_uneven_rows(model)]


def enforce(findings: Iterable[Finding]) -> None:
    """Raises one ValueError with all errors; logs each warning once, in rank 0.

    >>> enforce(check_topology(plan, config) + check_model(model))
    """
    findings = list(findings)
    if leads():
        for finding in findings:
            if finding.level == "warning":
                warn_once(finding.message)
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        raise ValueError("The plan cannot run here: " + "\n  ".join(errors if len(errors) == 1 else ["", *errors]))


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"{name} must be a number of ranks, 1 or more, got {text!r}: the launcher sets it, do not set it by hand."
        )
    return int(text)


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
    if span > island and plan.dp_replicate == 1:
        text = f"1-D FSDP over {group} gathers every weight between islands of {island} GPUs."
    elif span > island:
        text = f"{group} is larger than the fast-link island of {island} GPUs, so weights are gathered over the slow links."
    else:
        text = f"{group} does not divide the fast-link island of {island} GPUs, so some weights are gathered over the slow links."
    return [Finding("warning", text + advice)]


def _gradients(plan: ParallelPlan) -> list[Finding]:
    ranks = plan.dp_replicate * plan.dp_shard
    findings = []
    if plan.reduce_dtype != torch.float32 and ranks > 1 and plan.strategy != "none":
        findings.append(
            Finding(
                "warning",
                f"gradients of {ranks} data-parallel ranks are summed in {str(plan.reduce_dtype).removeprefix('torch.')}, which "
                "loses small ones: leave reduce_dtype=torch.float32 unless the loss is shown to stay the same.",
            )
        )
    if plan.strategy == "none" and ranks > 1:
        findings.append(
            Finding(
                "warning",
                f'strategy "none" with {ranks} data-parallel ranks (dp_replicate x dp_shard): nobody sums the gradients unless '
                'you wrap the model yourself. Otherwise take strategy="fsdp2".',
            )
        )
    return findings


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
            f"tp={plan.tp} does not divide {name}={size} ({what}; {size % plan.tp} left over): {_nearest(what, size, plan.tp)}",
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


def _nearest(what: str, size: int, tp: int) -> str:
    divisor = max(n for n in range(1, min(tp, size) + 1) if size % n == 0)
    if what in ("heads", "kv heads"):
        return f"take tp={divisor}, or a model whose {what} divide by {tp}."
    return f"pad it to {-(-size // tp) * tp}, or take tp={divisor}."


def _wrapping(model: nn.Module) -> list[Finding]:
    from torch.distributed.fsdp import (  # here: it would double the time of `import ottava`
        FSDPModule,
        FullyShardedDataParallel,
    )

    first = [name for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
    second = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if first and second:
        return [
            Finding(
                "error",
                f"FSDP1 and FSDP2 in one model: {_shown(first)} by FullyShardedDataParallel, {_shown(second)} by fully_shard. "
                "Each would gather and reduce what the other manages: use one of them.",
            )
        ]
    wrapped = first or second
    if wrapped == [""] and (blocks := _blocks(model)):
        return [
            Finding(
                "warning",
                f"only the root is wrapped, so all weights are gathered at once and stay for the whole forward: "
                f"wrap each of the {len(blocks)} blocks ({_shown(blocks)}) first, then the root.",
            )
        ]
    if wrapped and "" not in wrapped:
        return _outside(model, wrapped)
    return []


def _outside(model: nn.Module, wrapped: list[str]) -> list[Finding]:
    """Trainable parameters that no wrapped module manages, while others are managed."""
    if any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        return []
    inside = tuple(name + "." for name in wrapped)
    left = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(inside)]
    if not left:
        return []
    return [
        Finding(
            "error",
            f"blocks are wrapped and the root is not, so nobody reduces the gradients of {_shown(left)}: wrap the root last.",
        )
    ]


def _blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks: the longest list of modules with weights."""
    lists = [
        [f"{name}.{child}".lstrip(".") for child, block in m.named_children() if _has_weights(block)]
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    ]
    longest = max(lists, key=len, default=[])
    return longest if len(longest) > 1 else []


def _has_weights(block: nn.Module) -> bool:
    """FSDP1 takes a module's parameters away and leaves views of the same name, so a `weight` counts too."""
    return next(block.parameters(), None) is not None or any(hasattr(m, "weight") for m in block.modules())


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


def _shown(names: list[str], most: int = 3) -> str:
    names = [name.replace("_fsdp_wrapped_module.", "") or "the root" for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
