"""Ops that write into a `Weight`: into its master, or into its bytes by dequantize, compute, quantize.

Every rank that holds a part of the matrix has to run an op that writes bytes: scales follow from an amax of all. All functions lie below
`Weight`, which is the type of what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.notices import warn_once
from ottava.quant.tensor import QuantizedTensor, refuse_writes, written_arguments
from ottava.quant.weight_memory import WeightMemory
from ottava.quant.weight_operands import take_buffers
from ottava.quant.weight_place import Extent
from ottava.quant.weight_state import State, fresh, note_same

if TYPE_CHECKING:
    from ottava.quant.weight import Weight


def write(kind: type[Weight], func: Any, args: tuple, kwargs: dict) -> Any:
    """Any op that writes, with what it returns; kind: `Weight`."""
    written = written_arguments(func, args, kwargs)
    targets = [w for w in written if isinstance(w, kind)]
    if not targets:
        return _write_elsewhere(kind, func, args, kwargs)
    refuse_writes(func, [t for t in written if not isinstance(t, kind)])
    if func.namespace == "c10d" and func.__name__.startswith("scatter"):
        _refuse_scattered(targets)
    values = {id(w): w._values() for w in targets}

    def plain(q: Any) -> Tensor:
        return values[id(q)] if id(q) in values else q._values()

    plain_args, plain_kwargs = torch_private.map_instances(QuantizedTensor, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    received = func.namespace == "c10d"
    if received:  # `dist.broadcast(weight, async_op=True)` and the like: what is quantized next has to be there
        torch_private.wait_for_work(result)
    bytes_only = [w for w in targets if w.master is None]
    if bytes_only and torch_private.makes_optimizer_state():
        # A step that changes nothing: bytes of columns, which are not those of rows, would be rounded once more. All ranks do it.
        targets = [w for w in targets if w.master is not None]
    elif bytes_only:
        requantize = _requantize_given if received else kind.requantize_together_
        requantize(bytes_only, [values[id(w)] for w in bytes_only])
        mark_written(bytes_only)
    for weight in targets:
        weight.memory.made_from = {}
    back = {id(value): w for w in written if (value := values.get(id(w))) is not None}
    return torch_private.map_instances(Tensor, lambda t: back.get(id(t), t), result)


def _refuse_scattered(targets: Sequence[Weight]) -> None:
    """Rows of a whole weight that a rank hands out, as torch's `distribute_tensor` does, are nobody's shards: no ranks are theirs."""
    for weight in targets:
        if weight.master is None and weight.state is State.SHARD and not weight.memory.shard_groups:
            raise ValueError(
                f"{weight.memory.name} is stored in FP8, and its rows share scales with ranks that distribute_tensor does not name: call "
                "set_device_mesh(mesh) of its module, which cuts bytes and scales; or give it weight.detach().dequantize()."
            )


def _write_elsewhere(kind: type[Weight], func: Any, args: tuple, kwargs: dict) -> Any:
    """An op that only reads weights."""
    args, kwargs = torch_private.map_instances(kind, lambda w: w if w.master is None else w.master, (args, kwargs))
    if any(isinstance(t, QuantizedTensor) for t in torch_private.tree_flatten((args, kwargs))[0]):
        return QuantizedTensor.dispatch(func, args, kwargs)
    return func(*args, **kwargs)


def mark_written(weights: Sequence[Weight]) -> None:
    """Below autograd, where ops on a weight arrive, writing changes no tensor's version. But versions are how `operands` knows that scales
    have changed, and how autograd refuses a backward that holds bytes of before."""
    for group in {id(w.memory.group): w.memory.group for w in weights}.values():
        made = [] if group.operands is None else list(group.operands[1].values())
        torch.autograd.graph.increment_version([*made, *(t for part in group.parts for t in part.tensors())])
        for part in group.parts:
            part.bytes_follow_given()


def copy(func: Any, target: Weight, source: Tensor, *unused: Any) -> Any:
    """`copy_`. Bytes are taken as they are where they mean the same here, else values are quantized."""
    written = _copy_into(func, target, source)
    if target.master is None and target.state is not State.GATHERED:
        mark_written([target])
    return written


def _copy_into(func: Any, target: Weight, source: Tensor) -> Any:
    kind = type(target)
    if source.dtype == torch.uint8 and target.master is None and target.state is not State.GATHERED:
        # No weight has values of this type: torch's `broadcast_from_rank0` writes an entry of a state dict where the parameter is.
        target.memory.take_bytes(source)
        return target
    if target.shape != source.shape:
        raise ValueError(f"copy_ needs equal shapes: target {tuple(target.shape)}, source {tuple(source.shape)}.")
    if isinstance(source, kind) and target._cell.new:
        target._cell.move_in(source.memory)
    if target.master is not None:
        same = isinstance(source, kind) and source.memory is target.memory and fresh(source)
        func(target.master, source._values() if isinstance(source, QuantizedTensor) else source)
        if same:
            note_same(target)
        else:
            target.memory.made_from = {}
        return target
    if isinstance(source, kind) and source.master is None and source.scheme == target.scheme:
        if source.memory is target.memory:
            return target
        if not target.memory.shares_scales or target.memory.group.same_scales(source.memory.group):
            target.memory.copy_from(source.memory)
            return target
    whole = target.state is State.WHOLE and not target.memory.shares_scales
    if type(source) is QuantizedTensor and source.scheme == target.scheme and whole:
        take_buffers(target.memory, {n: t.to(target.device, copy=True) for n, t in source._parts.items()})
        return target
    _requantize_given([target], [source._values() if isinstance(source, QuantizedTensor) else source])
    return target


def _requantize_given(targets: Sequence[Weight], values: Sequence[Tensor]) -> None:
    """Values that come one parameter at a time, as from a file or another rank, into weights that share a scale with others: they are kept
    until all parts of the matrix have theirs, so that what comes last does not round those before it a second time. So it is the same
    whether they come one by one or at once, and ranks that get the same values have the same bytes."""
    targets[0].requantize_together_(targets, values)
    for target, value in zip(targets, values, strict=True):
        memory = target.memory
        if memory.shares_scales and not torch_private.is_fake(value):
            memory.keep_given(value.detach().reshape(memory.place.rows, memory.place.unit[1]))


def partners(memories: Sequence[WeightMemory]) -> list[tuple[Tensor, WeightMemory]]:
    """(values, memory) of the parts that share scales with some of `memories` and are not among them."""
    given = {id(memory) for memory in memories}
    groups = {id(m.group): m.group for m in memories if m.shares_scales}
    others = [part for group in groups.values() for part in group.parts if id(part) not in given]
    return [(part.given_values(), part) for part in others]


def quantizes_alone(weight: Weight) -> bool:
    """Whether one kernel gives the bytes of both directions at once: of a whole unit that shares scales with nobody."""
    memory = weight.memory
    if weight.state is not State.WHOLE or len(memory.group.parts) > 1 or memory.weight_groups or not memory.two_copies:
        return False
    return all(memory.extent(d) is not Extent.MATRIX for d in memory.directions)


def warn_of_buckets(weight: Weight, value: Tensor) -> None:
    """Who puts a parameter's own values into a larger buffer and gives it a view of that means the buffer to be the parameter."""
    if isinstance(value, QuantizedTensor) or weight.master is not None or torch_private.is_fake(value) or value.is_meta:
        return
    if value.untyped_storage().nbytes() > value.numel() * value.element_size() and torch.equal(value, weight._values()):
        warn_once(
            f"ottava: {weight.memory.name} is stored in FP8, and its `data` was set to a view of a larger buffer with the same values. It "
            "does not follow that buffer: ZeroRedundancyOptimizer(parameters_as_bucket_view=True) and the like would not train it."
        )
