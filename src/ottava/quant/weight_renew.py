"""`renew`: values -> bytes and scales, for all weights of a model in a few launches and at most two reductions over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava import torch_private
from ottava.quant.scale_group import ScaleGroup
from ottava.quant.scaling import scale_from_amax
from ottava.quant.scheme import Scheme
from ottava.quant.weight_memory import Groups, WeightMemory, written_over
from ottava.quant.weight_place import Extent, blocks_of, count_blocks, within

Weights = list[tuple[Tensor, WeightMemory]]
Known = dict[Any, Tensor]
"""By ("tensor" or direction, whose): an amax [1], or [layers, blocks down, across]."""


@torch.no_grad()
def renew(weights: Iterable[tuple[Tensor, WeightMemory]]) -> None:
    """Makes bytes and scales from values [rows, columns]. All ranks have to call it with the same weights in the same order.

    Two MAX all-reduces a set of groups, at most: one number a matrix, and the amax of blocks. All parts of a matrix have to be given
    where they share scales. Bytes and scales are written over the old ones: autograd refuses a backward that still holds those, and a
    CUDA graph that reads them finds the new ones.
    """
    weights = [(values.detach(), memory) for values, memory in weights if memory.quantized]
    for _, memory in weights:
        memory.check_bound()
    known, own, groups = _tensor_amax(weights), Known(), dict[Any, tuple[Groups, str | None]]()
    for _, memory in weights:
        if memory.scheme.needs_tensor_amax:
            groups["tensor", id(memory.group)] = memory.weight_groups, memory.device_type
    for key, memory, grid in _block_amax(weights):
        if memory.extent(key[0]) is Extent.OWN:
            own[key] = grid
            continue
        known[key] = grid if key not in known else torch.maximum(known[key], grid)
        matrix = memory.extent(key[0]) is Extent.MATRIX
        groups[key] = memory.weight_groups if matrix else memory.shard_groups, memory.device_type
    _reduce(known, groups)
    _set_tensor_scales({id(memory.group): memory.group for _, memory in weights}, known)
    _write(weights, known | own)


class _Parts(NamedTuple):
    """Values that one launch takes together."""

    values: list[Tensor]
    memories: list[WeightMemory]

    @property
    def offsets(self) -> list[int]:
        """Where each begins in its matrix: top, left, top, left ..."""
        return [n for memory in self.memories for n in (memory.place.top, memory.place.left)]


def _together(weights: Weights, key: Callable[[WeightMemory], Any] = lambda memory: None) -> Iterator[_Parts]:
    """Weights of the same dtype and device and of the same `key`."""
    found: dict[Any, _Parts] = {}
    for values, memory in weights:
        parts = found.setdefault((values.dtype, values.device, key(memory)), _Parts([], []))
        parts.values.append(values)
        parts.memories.append(memory)
    yield from found.values()


# ------------------------------------------------------------------------------------------------------------------- amax


def _tensor_amax(weights: Weights) -> Known:
    """That of each matrix which has a scale of the tensor, as this rank knows it: [1]."""
    known = Known()
    for parts in _together([(values, memory) for values, memory in weights if memory.scheme.needs_tensor_amax]):
        amax = torch.ops.ottava.amax_many(parts.values, [], [0, 0] * len(parts.values))
        keys = [("tensor", id(memory.group)) for memory in parts.memories]
        different = list(dict.fromkeys(keys))
        if len(different) < len(keys):  # several parts of a matrix
            places = {key: number for number, key in enumerate(different)}
            make = _index.__wrapped__ if torch_private.is_fake(amax) else _index
            index = make(tuple(places[key] for key in keys), amax.device)
            amax = amax.new_zeros(len(different)).scatter_reduce_(0, index, amax, "amax")
        for key, one in zip(different, amax.split(1), strict=True):
            known[key] = one if key not in known else torch.maximum(known[key], one)
    return known


@functools.lru_cache(maxsize=32)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64, made once: a copy from memory that is not pinned waits for all that the GPU has to do."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def _block_amax(weights: Weights) -> Iterator[tuple[Any, WeightMemory, Tensor]]:
    """(key, memory, [layers, blocks down, across] of the blocks of the scales' extent that this rank knows; others are zero)."""
    for parts in _together(weights, lambda memory: (memory.scheme, memory.directions)):
        first = parts.memories[0]
        for direction in filter(first.has_blocks, first.directions):
            block = list(first.block(direction))
            own_boxes = [memory.place.box(Extent.OWN) for memory in parts.memories]
            shapes = [count_blocks(blocks_of(box, (block[0], block[1]))) for box in own_boxes]
            layers = [parts.values]
            if first.along(direction).element.dtype is None:  # E2M1 has a second grid: flags of blocks that have a NaN
                layers.append([values.isnan().float() for values in parts.values])
            found = torch.stack([torch.ops.ottava.amax_many(layer, block, parts.offsets) for layer in layers])
            for memory, own, shape in zip(parts.memories, found.split([math.prod(s) for s in shapes], dim=1), shapes):
                matrix = memory.extent(direction) is Extent.MATRIX
                key = direction, id(memory.group if matrix else memory)
                yield key, memory, _in_extent(memory, direction, own.view(len(layers), *shape))


def _in_extent(memory: WeightMemory, direction: str, own: Tensor) -> Tensor:
    """The grid of the scales' extent, of which this rank's rows know `own`."""
    block = memory.block(direction)
    blocks, mine = (blocks_of(box, block) for box in (memory.box_of_scales(direction), memory.place.box(Extent.OWN)))
    if blocks == mine:
        return own
    grid = own.new_zeros(own.shape[0], *count_blocks(blocks))
    grid[:, *within(mine, blocks)] = own
    return grid


def _reduce(known: Known, groups: dict[Any, tuple[Groups, str | None]]) -> None:
    """MAX over ranks, in place in the dictionary: one message for all that has the same groups."""
    together: dict[Any, list[Any]] = {}
    for key, (over, device_type) in groups.items():
        if any(torch.distributed.get_world_size(group) > 1 for group in over):
            together.setdefault((over, device_type), []).append(key)
    for (over, device_type), keys in together.items():
        flat = torch.cat([known[key].flatten() for key in keys])
        moved = flat.to(device_type or flat.device)
        for group in over:  # a MAX over rows and then over columns of a mesh is the MAX over the mesh
            torch.distributed.all_reduce(moved, op=torch.distributed.ReduceOp.MAX, group=group)
        flat = moved.to(flat.device)
        for key, reduced in zip(keys, flat.split([known[key].numel() for key in keys]), strict=True):
            known[key] = reduced.view_as(known[key])


# ------------------------------------------------------------------------------------------------------- scales and bytes


def _set_tensor_scales(groups: dict[int, ScaleGroup], known: Known) -> None:
    """Gives every matrix its amax and, where it has one, its scale."""
    chosen: dict[Any, list[ScaleGroup]] = {}
    for number, group in groups.items():
        if ("tensor", number) in known:
            scheme = None if group.scheme is None else group.scheme.of_tensor
            chosen.setdefault((scheme, group.delayed is not None, known["tensor", number].device), []).append(group)
    for (scheme, delayed, _), same in chosen.items():
        amax = torch.cat([known["tensor", id(group)].flatten() for group in same])
        for group, one in zip(same, _each_in_its_own([group.amax for group in same], amax.split(1)), strict=True):
            group.amax = one
        if scheme is None:
            continue
        if delayed:
            states = [(group.delayed, group.column) for group in same]
            scale = torch.cat([state.fwd_scale[at : at + 1] for state, at in states])  # type: ignore[union-attr]
            newest = [state.fwd_amax_history[0, at : at + 1] for state, at in states]  # type: ignore[union-attr]
            torch_private.copy_all(newest, list(amax.split(1)))  # this step's entry, once a step
        else:
            scale = scale_from_amax(amax, scheme.element.max, scheme.epsilon, scheme.power_of_two)
        scales = _each_in_its_own([group.scale for group in same], scale.split(1))
        # cuBLAS reads a scale from an address that 16 divides: a tensor of its own has one.
        inverted = _each_in_its_own([group.scale_inv for group in same], (torch.ones_like(scale) / scale).split(1))
        for group, one, other in zip(same, scales, inverted, strict=True):
            group.scale, group.scale_inv = one, other


def _each_in_its_own(old: list[Tensor | None] | list[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    """`written_over`; what has no memory yet gets some of its own, whose version no other weight's changes."""
    found = written_over(old, new)
    return [t.clone() if t is value else t for t, value in zip(found, new, strict=True)]


def _block_factors(weights: Weights, known: Known) -> Known:
    """What values are multiplied by, [blocks down, across] of the scales' extent; the scales themselves are set."""
    factors = Known()
    for parts in _together(weights, lambda memory: memory.scheme):
        first, dtype = parts.memories[0], parts.values[0].dtype
        for direction in filter(first.has_blocks, first.directions):
            owners = {
                id(memory.group if memory.extent(direction) is Extent.MATRIX else memory): memory
                for memory in parts.memories
            }
            grids = [known[direction, owner] for owner in owners]
            made = _factors_and_scales(grids, list(owners.values()), first.along(direction), dtype)
            old = [memory.held_scales(direction) for memory in owners.values()]
            scales = _each_in_its_own(old, [scale for _, scale in made])
            for (owner, memory), (factor, _), scale in zip(owners.items(), made, scales, strict=True):
                memory.set_scales(direction, scale)
                factors[direction, owner] = factor
    return factors


def _factors_and_scales(
    grids: list[Tensor], memories: list[WeightMemory], scheme: Scheme, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    scales_of, rule = torch.ops.ottava.block_scales, str(scheme)
    if scheme.needs_tensor_amax:  # they depend on the matrix
        return [scales_of(grid[0], grid[-1], m.group.amax, rule, dtype) for grid, m in zip(grids, memories)]
    whole = torch.cat([grid[0].flatten() for grid in grids])
    sizes = [grid[0].numel() for grid in grids]
    split = [t.split(sizes) for t in scales_of(whole, whole, whole.new_empty(0), rule, dtype)]
    return [(f.view_as(grid[0]), s.view_as(grid[0])) for f, s, grid in zip(*split, grids)]


def _write(weights: Weights, known: Known) -> None:
    """Bytes of all weights, and scales of their blocks."""
    factors = _block_factors(weights, known)
    for parts in _together(weights, lambda memory: (memory.scheme, memory.directions)):
        first = parts.memories[0]
        for direction in first.directions:
            out = [memory.room_for(direction, values.device) for values, memory in zip(*parts)]
            block: list[int] = []
            chosen = [memory.group.scale for memory in parts.memories]
            if first.has_blocks(direction):
                block = list(first.block(direction))
                chosen = [_own_factors(memory, direction, factors) for memory in parts.memories]
            rule = str(first.along(direction))
            torch.ops.ottava.encode_many_(out, parts.values, chosen, rule, block, parts.offsets)
    for _, memory in weights:
        memory.without_scales = False


def _own_factors(memory: WeightMemory, direction: str, factors: Known) -> Tensor:
    """Of the blocks that this rank's rows touch."""
    extent, block = memory.extent(direction), memory.block(direction)
    owner = memory.group if extent is Extent.MATRIX else memory
    own = within(blocks_of(memory.place.box(Extent.OWN), block), blocks_of(memory.place.box(extent), block))
    return factors[direction, id(owner)][own]
