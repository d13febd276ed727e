"""Who writes what: ranks offer the boxes they hold, rank 0 gives each box to one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ottava.checkpoint.boxes import Box, Index, part_of, tiling_problem
from ottava.checkpoint.errors import listed
from ottava.checkpoint.flat import Flat, Path
from ottava.exchange import travels


@travels
@dataclass(frozen=True)
class Held:
    """What a rank holds of a tensor."""

    dtype: torch.dtype
    shape: Index
    """Of the whole tensor."""
    boxes: tuple[Box, ...]


@travels
@dataclass(frozen=True)
class Offer:
    """What a rank could write."""

    tensors: dict[str, Held]
    values: dict[str, Any]
    paths: dict[str, Path]
    meshes: list[dict[str, int]]


Item = tuple[str, Box]
"""(tensor, box) to be written."""


@dataclass(frozen=True)
class SavePlan:
    """What all ranks together write. Rank 0 has it."""

    tensors: dict[str, Held]
    """With the boxes of all ranks, each once."""
    values: dict[str, Any]
    paths: dict[str, Path]
    meshes: list[dict[str, int]]
    items: list[list[Item]]
    """By rank, in the order of writing."""


def offer(flat: Flat) -> Offer:
    """This rank's offer."""
    tensors, meshes = {}, []
    for name, tensor in flat.tensors.items():
        part = part_of(name, tensor)
        if part.writes:
            boxes = tuple((offset, tuple(view.shape)) for offset, view in part.views)
            tensors[name] = Held(part.dtype, part.shape, boxes)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(str(i) for i in range(mesh.ndim))
            sizes = {n: mesh.size(i) for i, n in enumerate(names)}
            if sizes not in meshes:
                meshes.append(sizes)
    return Offer(tensors, flat.values, flat.paths, meshes)


def make_plan(offers: Sequence[Offer]) -> SavePlan:
    """ValueError where ranks contradict each other or do not hold a whole tensor together."""
    held: dict[str, Held] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    meshes: list[dict[str, int]] = []
    for rank, given in enumerate(offers):
        for name, mine in given.tensors.items():
            first = held.setdefault(name, mine)
            if (first.dtype, first.shape) != (mine.dtype, mine.shape):
                first_rank = next(r for r, o in enumerate(offers) if name in o.tensors)
                raise ValueError(
                    f"{name} is {first.dtype} {first.shape} in rank {first_rank} and {mine.dtype} {mine.shape} in rank {rank}. What "
                    f"belongs to one rank needs the rank in its name."
                )
            for box in mine.boxes:
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
        for name, value in given.values.items():
            if name in values and values[name] != value:
                raise ValueError(
                    f"{name} is {values[name]!r:.60} in one rank and {value!r:.60} in rank {rank}. Put the rank in its name."
                )
            values[name] = value
        paths.update(given.paths)
        meshes += [m for m in given.meshes if m not in meshes]
    if both := sorted(set(held) & set(values)):
        raise ValueError(f"A tensor in one rank and a value in another: {listed(both)}.")
    tensors = {}
    for name, first in held.items():
        boxes = sorted(holders.get(name, {}))
        if problem := tiling_problem(first.shape, boxes):
            raise ValueError(f"{name}: what the ranks hold is not the whole tensor: {problem}.")
        tensors[name] = Held(first.dtype, first.shape, tuple(boxes))
    return SavePlan(tensors, values, paths, meshes, _shared_out(tensors, holders, len(offers)))


def _shared_out(tensors: dict[str, Held], holders: dict[str, dict[Box, list[int]]], ranks: int) -> list[list[Item]]:
    """Each box to one rank that holds it: large boxes first, to the rank with the least to write."""
    sized = [(-math.prod(b[1]) * t.dtype.itemsize, name, b) for name, t in tensors.items() for b in t.boxes]
    load, items = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[Item]]]
    for size, name, box in sorted(sized):
        rank = min(holders[name][box], key=lambda r: (load[r], r))
        load[rank] -= size
        items[rank].append((name, box))
    return items
