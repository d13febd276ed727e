"""`ottava train CONFIG --dry-run`: what would run, without running it. Nothing is allocated and no rank is started."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ottava.distributed import ParallelPlan
from ottava.plan.footprint import ElementBytes, footprint
from ottava.plan.layouts import layout_of
from ottava.plan.model_size import ModelSize
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.config_checks import check_data_parallel
from ottava.train.model import construct
from ottava.train.summary import table
from ottava.train.tokenize import ByteTokenizer
from ottava.train.world import Place, local_ranks

MIB, GIB = 2.0**20, 2.0**30


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
        (
            "tokens a step",
            f"{train.global_batch * config.data.length:,} in {micro} microbatch{'es' if micro > 1 else ''} a rank",
        ),
        ("tokens in all", f"{train.global_batch * config.data.length * train.steps:,}"),
        ("products", _products(config, plan)),
        ("run", str(config.run_folder)),
        *_missing_files(config),
    ]
    return f"{to_toml(config)}\n{table(rows)}\n\n{_memory(config, ranks)}"


def _memory(config: Config, ranks: int) -> str:
    """Memory of a rank by kind, as `ottava plan` counts it: on a GPU, also where there is none."""
    try:
        layout = layout_of(config, ranks)
    except ValueError as error:
        return f"Memory of a rank is not estimated: {error}"
    found = footprint(config, ModelSize.of(config), ElementBytes.of(config), layout)
    unit, name = (GIB, "GiB") if found.allocated >= GIB else (MIB, "MiB")
    sizes = [*((kind, size) for kind, size in found.kinds.items() if size), ("in all, about", found.total)]
    return (
        f"Memory of a rank on a GPU, estimated\n{table([(kind, f'{size / unit:8.2f} {name}') for kind, size in sizes])}"
    )


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
