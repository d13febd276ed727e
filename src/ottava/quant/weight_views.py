"""Ops that make another `Weight` of one: a view of it, rows that FSDP cuts from it, the same in other memory.

Each takes the op and its arguments, as `Weight.__torch_dispatch__` gets them, and may say `NotImplemented`: then the op sees the
dequantized values. All lie below `Weight`, which is the type of what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ottava.quant.tensor import QUANTIZED_HANDLERS, values_for
from ottava.quant.weight_memory import WeightMemory
from ottava.quant.weight_state import Cell, State, fresh, note_same

if TYPE_CHECKING:
    from ottava.quant.weight import Weight

aten = torch.ops.aten


def alias(func: Any, weight: Weight) -> Weight:
    """`detach` and `alias`."""
    return weight._like(weight.shape, None if weight.master is None else func(weight.master))


def view(func: Any, weight: Weight, size: Any, *rest: Any) -> Any:
    """`view` and `as_strided`: FSDP takes its rows for a flat tensor, and back."""
    if weight.state is State.GATHERED:  # FSDP views it once, to its own shape
        same = torch.Size(size) == weight.shape
        return weight._like(weight.shape, weight.master) if same else NotImplemented
    if weight.master is not None:
        master = func(weight.master, size, *rest)
        return weight._like(master.shape, master)
    shape = torch.Size([weight.numel() if n == -1 and len(size) == 1 else n for n in size])
    if weight.state is State.SHARD:
        return weight._like(shape) if shape.numel() == weight.numel() else NotImplemented
    if shape == weight.shape:
        return weight._like(shape)
    return NotImplemented if func is aten.as_strided.default else QUANTIZED_HANDLERS[func](func, weight, size)


def slice_rows(
    func: Any, weight: Weight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """`slice`: of a shard the first rows, which FSDP takes from padded memory."""
    if weight.master is not None:
        master = func(weight.master, dim, start, end, step)
        return weight._like(master.shape, master)
    if weight.state is not State.SHARD:
        return QUANTIZED_HANDLERS[func](func, weight, dim, start, end, step)
    if dim != 0 or start or step != 1 or weight.dim() != 2:
        return NotImplemented
    return weight._like((len(range(*slice(start, end).indices(weight.shape[0]))), weight.shape[1]))


def master_views(func: Any, weight: Weight, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Views of a master (a row, the transpose) know whose they are. Below autograd a view has a version of its own, so a write through
    a plain one would leave bytes that nobody knows to be old."""
    made = func(weight.master, *args, **kwargs)
    seen = [weight._like(each.shape, each) for each in (made if isinstance(made, list | tuple) else [made])]
    return seen if isinstance(made, list | tuple) else seen[0]


def split(func: Any, weight: Weight, size: int, dim: int = 0) -> Any:
    """How FSDP2 cuts a parameter into rows."""
    if weight.state is not State.WHOLE or dim != 0 or weight.dim() != 2 or not _can_be_cut(weight):
        return NotImplemented
    rows = weight.shape[0]
    starts = range(0, rows, size) if size else range(1)
    _refuse_other_shards(weight, size)

    def shard(start: int) -> Weight:
        stop = min(start + size, rows)
        cell = Cell(lambda: _shard_memory(weight, start, stop, size))
        master = None if weight.master is None else weight.master[start:stop]
        shape = (stop - start, weight.shape[1])
        return type(weight)(cell, State.SHARD, shape, weight.dtype, weight.device, master)

    return [shard(start) for start in starts]


def _refuse_other_shards(weight: Weight, size: int) -> None:
    """torch cuts a parameter a second time where ranks are to keep other rows after forward. (Who else cuts a weight binds no shard.)"""
    for shard in weight.memory.shards:
        if shard.shard_groups and shard.place.padded != size:
            raise ValueError(
                f"{shard.name} is stored in FP8 and FSDP has cut it into {shard.place.world} shards: torch cannot cut gathered bytes into "
                f"other shards, of {size} rows, after forward. Give fully_shard reshard_after_forward=True or False, not a number of ranks."
            )


def new_zeros(func: Any, weight: Weight, size: Any, *, dtype: Any = None, device: Any = None, **unused: Any) -> Any:
    """Memory for rows that are copied in next; without such a copy, for a rank that has none."""
    other_kind = dtype not in (None, weight.dtype) or device not in (None, weight.device)
    if other_kind or len(size) != 2 or size[1] != weight.memory.place.unit[1] or not _can_be_cut(weight):
        return NotImplemented
    if weight.state is State.GATHERED:
        return NotImplemented
    rows = weight.memory.place.unit[0]
    if weight.state is State.WHOLE:
        cell = Cell(lambda: _shard_memory(weight, rows, rows, size[0]), new=True)
    else:
        cell = Cell(lambda: weight.memory, new=True)
    master = None if weight.master is None else func(weight.master, size, **unused)
    return type(weight)(cell, State.SHARD, tuple(size), weight.dtype, weight.device, master)


def new_empty(func: Any, weight: Weight, size: Any, **options: Any) -> Tensor:
    """A plain tensor. (FSDP asks the first shard for it where ranks have no rows, and it is to make no bytes for that.)"""
    return torch.empty(size, **{"dtype": weight.dtype, "device": weight.device, **options})


def _can_be_cut(weight: Weight) -> bool:
    """Whether the bytes of rows can be made from these rows alone."""
    scheme = weight.memory.group.scheme
    return scheme is None or not (scheme.hadamard or scheme.stochastic)


def _shard_memory(weight: Weight, start: int, stop: int, padded: int) -> WeightMemory:
    """That of rows [start, stop), with room for `padded`.

    Rows may be cut more than once. Of those who hold the same ones the shard that FSDP keeps, else the newest, is a part of the matrix.
    """
    place = weight.memory.place.shard(start, stop, padded)
    made = weight.memory.part(place, ("shard", place.world, start // max(padded, 1) if stop > start else "empty"))
    same = [part for part in made.group.parts if part.place == place]
    kept = next((part for part in same if part.shard_groups), made)
    made.group.parts = [part for part in made.group.parts if part is kept or part not in same]
    weight.memory.shards.add(made)
    return made


def to_copy(func: Any, weight: Weight, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """`to(device)`. To another dtype go the values."""
    if dtype not in (None, weight.dtype):
        return func(values_for(weight, dtype), dtype=dtype, device=device, **options)
    blocking = options.get("non_blocking", False)
    return _moved(weight, lambda t: t.to(device, non_blocking=blocking, copy=True))


def empty_like(func: Any, weight: Weight, **options: Any) -> Any:
    """A weight of the same kind whose values are still to come (`to_empty`)."""
    if options.get("dtype") not in (None, weight.dtype):
        return NotImplemented
    device = options.get("device")
    return _moved(weight, lambda t: torch.empty_like(t, device=device), same_values=False)


def clone(func: Any, weight: Weight, memory_format: Any = None) -> Any:
    """Of bytes; that of a weight with a master is a plain tensor."""
    return _moved(weight, torch.clone) if weight.master is None else NotImplemented


def pin_memory(func: Any, weight: Weight, device: Any = None) -> Any:
    """What CPU offload asks for."""
    return _moved(weight, lambda t: t.pin_memory())


def _moved(weight: Weight, function: Callable[[Tensor], Tensor], same_values: bool = True) -> Any:
    """The weight in other memory: `function` is applied to each of its tensors."""
    if weight.state is State.GATHERED:
        return NotImplemented
    if weight.master is None:
        memory = weight.memory.map(function)
        device = next(iter(memory.data.values())).device
        return type(weight)(memory, weight.state, weight.shape, weight.dtype, device)
    was_fresh = weight.memory.quantized and fresh(weight)
    moved = weight._like(weight.shape, function(weight.master))
    if was_fresh and same_values:
        note_same(moved)
    return moved
