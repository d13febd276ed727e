"""`Weight`: a parameter that has an FP8 form.

[Note: states of a weight] What a `Weight` holds (n: elements of the parameter, or of a tensor-parallel rank's box of it, its *unit*):

    state      who has it                                   high precision      FP8 bytes
    WHOLE      a parameter of `quantized_model_init`        -                   2n: rowwise, and columnwise for backward
      once somebody has asked for its state dict:           -                   1-D blocks: 3n (`WeightMemory.lay_rows_first`)
    SHARD      FSDP2's rows of it, on w ranks               -                   n/w (1-D blocks, which have two sets of bytes: 2n/w)
      with a master (`shard_model`):                        the rows            the same, once a recipe is known
    GATHERED   FSDP2's all-gather, for one forward          -                   2n, freed after use
      before a recipe is known, or without one:             n                   -

With a master the parameter IS the master: an optimizer sees an ordinary high-precision tensor, and a state dict holds it. The bytes
beside it are made once a step (`weight_renew.renew`) and travel in its place. Without one the bytes are all there is: reading ops see the
dequantized values; ops that write dequantize, compute and quantize again, with the scales that one process would have, so every
rank has to run them. `optimizers.FusedAdam` keeps float32 masters of such weights and is what trains them well.

FSDP replaces and views a parameter's tensor object as it likes, on some ranks only where shards are uneven. So everything but the
master's values lives in the `WeightMemory`, which all those objects share.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.notices import warn_once
from ottava.quant.scale_group import ScaleGroup
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QUANTIZED_HANDLERS, QuantizedTensor
from ottava.quant.weight_gather import UNQUANTIZED, GatherState, fill, fill_rows, messages
from ottava.quant.weight_memory import (
    COLUMNWISE,
    ROWWISE,
    TENSOR_NAMES,
    WeightMemory,
    in_gemm_layout,
    joined_scale_inv,
    written_over,
)
from ottava.quant.weight_place import Extent, Place
from ottava.quant.weight_renew import renew

__all__ = [
    "State",
    "Weight",
    "as_one_matrix",
    "join_parts",
    "link_copies",
    "link_parts",
    "mark_written",
    "one_matrix",
    "tensors_of",
    "upright",
]

aten = torch.ops.aten


class State(enum.Enum):
    """[Note: states of a weight]"""

    WHOLE = enum.auto()
    SHARD = enum.auto()
    GATHERED = enum.auto()


class Cell:
    """Holds the memory of a weight for all its views. FSDP moves a shard by making a new one and copying into it."""

    def __init__(self, make: Callable[[], WeightMemory], new: bool = False) -> None:
        self._make = make
        self._memory: WeightMemory | None = None
        self.new = new
        """Just made by `new_zeros`: what is copied in moves in."""

    @property
    def memory(self) -> WeightMemory:
        """Made when first asked for: of the shards of a weight a rank keeps one."""
        if self._memory is None:
            self._memory = self._make()
        return self._memory

    def move_in(self, memory: WeightMemory) -> None:
        """Takes the place of the memory that was here."""
        self._memory, self.new = memory, False


class Weight(QuantizedTensor):
    """See above."""

    _cell: Cell
    state: State
    master: Tensor | None
    """The values in high precision, of this object's shape; None: there are bytes only."""
    _gather: GatherState | None

    @staticmethod
    def __new__(
        cls,
        cell: Cell | WeightMemory,
        state: State,
        shape: Any,
        dtype: torch.dtype,
        device: Any = None,
        master: Tensor | None = None,
        gather: GatherState | None = None,
    ) -> Weight:  # type: ignore[override]
        options: dict[str, Any] = {"device": device}
        if master is not None:
            options = {"strides": master.stride(), "storage_offset": master.storage_offset(), "device": master.device}
        self: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, **options)
        self._cell = cell if isinstance(cell, Cell) else Cell(lambda: cell)
        self.state, self.master, self._gather = state, master, gather
        return self

    __torch_function__ = torch_private.DISABLED_TORCH_FUNCTION  # type: ignore[assignment]

    # -------------------------------------------------------------------------------------------------------- making one

    @classmethod
    def stored(cls, name: str, shape: Sequence[int], scheme: Scheme, dtype: torch.dtype, device: Any) -> Weight:
        """A whole weight of bytes only, without values yet. It stands for a tensor of `dtype`."""
        memory = WeightMemory(name, Place.whole(shape), ScaleGroup(scheme))
        memory.allocate(device)
        # Who calls `fully_shard` does not say whether weights are freed between forward and backward.
        memory.gathers_both = True
        return cls(memory, State.WHOLE, tuple(shape), dtype, memory.data[ROWWISE].device)

    @classmethod
    def mastered(cls, name: str, master: Tensor) -> Weight:
        """A weight whose values stay as they are and that gets bytes once a recipe is known."""
        memory = WeightMemory(name, Place.whole(master.shape), ScaleGroup(None))
        return cls(memory, State.WHOLE, master.shape, master.dtype, master=master)

    def split_parts(self, rows: Sequence[int]) -> list[Weight]:
        """A whole stored weight as several that hold `rows` of it each, and its bytes and scales."""
        memory, place = self.memory, self.memory.place
        firsts = [sum(rows[:i]) for i in range(len(rows))]
        places = [
            replace(place, part=(f, n), origin=(f, 0), unit=(n, place.unit[1]), rows=n, padded=n)
            for f, n in zip(firsts, rows)
        ]
        parts = [memory.part(each, "parts", places) for each in places]
        return [Weight(part, State.WHOLE, part.place.unit, self.dtype, self.device) for part in parts]

    def split_tensor_parallel(self, dim: int, rank: int, size: int) -> Weight:
        """The box of tensor-parallel rank `rank` of `size` of a whole stored weight, with its bytes and scales."""
        place = self.memory.place.split(dim, rank, size)
        part = self.memory.part(place, ("split", dim, rank, size))
        return Weight(part, State.WHOLE, place.unit, self.dtype, self.device)

    def _like(self, shape: Any, master: Tensor | None = None) -> Weight:
        """Another view of the same weight."""
        return Weight(self._cell, self.state, shape, self.dtype, self.device, master, self._gather)

    # ----------------------------------------------------------------------------------------------------------- asking it

    @property
    def memory(self) -> WeightMemory:
        """Its bytes and scales, and where they lie."""
        return self._cell.memory

    @property
    def stored_quantized(self) -> bool:
        """Whether bytes are all there is."""
        return self.master is None

    @property
    def has_columnwise(self) -> bool:
        """Whether a columnwise copy is kept beside the rowwise one."""
        return self.memory.group.keeps_columnwise

    @property
    def scheme(self) -> Scheme:  # type: ignore[override]
        """How the bytes are made."""
        return self.memory.scheme

    @property
    def _parts(self) -> dict[str, Tensor]:  # type: ignore[override]
        if self._gather is not None:
            return self._gather.parts
        self.memory.check_scales()
        if self.state is State.WHOLE:
            return _whole_parts(self.memory)
        return self.memory.held_parts(self.numel() // self.memory.place.unit[1])

    def _get(self, name: str) -> Tensor | None:
        if self._gather is not None and name.startswith(ROWWISE) and self._gather.direction == COLUMNWISE:
            raise ValueError(
                f"{self.memory.name} ({self.scheme}) is needed rowwise, but its columnwise bytes are gathered: they were, for backward. "
                "If its forward runs again in backward (activation checkpointing), name its module in shard_model(recomputed=...). "
                "Otherwise let FSDP reshard after backward: set_reshard_after_backward(True)."
            )
        transposed = name.startswith(COLUMNWISE) and not self.scheme.two_copies and self.memory.group.needs_columnwise
        return _transposed_part(self, name) if transposed else self._parts.get(name)

    def operand(self, direction: str) -> tuple[Tensor, Tensor, Tensor]:
        """(data, scale_inv, amax) of one direction. Asked in every forward: where the rowwise copy is there, it is asked for once."""
        if direction != ROWWISE or self._gather is not None:
            return super().operand(direction)
        parts = self._parts
        data, amax = parts["rowwise_data"], parts.get("rowwise_amax")
        return data, parts["rowwise_scale_inv"], data.new_empty(0, dtype=torch.float32) if amax is None else amax

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        if self.master is not None:
            return self.master if dtype is None else self.master.to(dtype)
        direction = ROWWISE if self._gather is None or self._gather.direction != COLUMNWISE else COLUMNWISE
        operand = QuantizedTensor.operand(self, direction)
        values = torch.ops.ottava.dequantize(*operand, str(self.scheme), dtype or self.dtype)
        return (values if direction == ROWWISE else values.t()).reshape(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place = self.memory.place
        how = f"as {self.scheme}" if self.memory.quantized else "unquantized"
        box = f"rows {place.top} to {place.top + place.rows}, columns {place.left} to {place.left + place.unit[1]} of {place.matrix}"
        where = "" if self.state is State.WHOLE and place.unit == place.matrix else f", {box}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        kind = "with a master" if self.master is not None else "stored"
        return (
            f"Weight({self.memory.name!r}, {tuple(self.shape)}, {self.state.name}{where}, {kind}, {how}, dtype={self.dtype}, "
            f"device={self.device}{grad})"
        )

    # -------------------------------------------------------------------------------------------------------------- writing

    @classmethod
    @torch.no_grad()
    def requantize_together_(cls, tensors: Sequence[Any], sources: Sequence[Tensor]) -> None:
        """Quantizes values into bytes, all of them with at most two MAX all-reduces. Every rank has to call it with the same weights.

        Weights that share scales with these, as parts of one matrix, are quantized again with them: their values stay.
        """
        slow = _partners([tensor.memory for tensor in tensors])
        for tensor, source in zip(tensors, sources, strict=True):
            memory, values = tensor.memory, source.detach().to(tensor.device)
            memory.preserved = memory.given = None
            if tensor.state is State.GATHERED:
                raise ValueError(
                    f"{memory.name} is gathered: write to the sharded parameter, outside of forward and backward."
                )
            if _quantizes_alone(tensor):
                _quantize_whole(memory, values)
            else:
                slow.append((values.reshape(memory.place.rows, memory.place.unit[1]), memory))
        renew(slow)

    def requantize_(self, source: Tensor) -> Weight:
        """See `requantize_together_`."""
        self.requantize_together_([self], [source])
        return self

    @property
    def data(self) -> Any:
        """The weight without its history, as torch has it."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch would exchange a memory that a weight does not have, and leave the values as they are.
        if isinstance(value, Weight) and value._cell is self._cell and value.dtype == self.dtype:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            return
        if value.dim() == 1 and self.dim() == 2:
            raise ValueError(
                f"{self.memory.name} of {tuple(self.shape)} is stored in FP8 and cannot be a stretch of a flat parameter, as FSDP1 wants it"
                ": use FSDP2 (torch's fully_shard, ottava.distributed.shard_model), or do without quantized_model_init."
            )
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"{self.memory.name} of {tuple(self.shape)} on {self.device} takes values of its own shape and device, got "
                f"{tuple(value.shape)} on {value.device}. To move it, move its module: module.to(device)."
            )
        if value.dtype != self.dtype:
            _change_dtype(self, value)
            return
        _warn_of_buckets(self, value)
        with torch.no_grad():
            self.copy_(value)

    def share_memory_(self) -> Weight:
        """Moves what it holds into memory that processes share."""
        for tensor in (*tensors_of(self), *self.memory.tensors()):
            tensor.share_memory_()
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.master is None:
            super().__setitem__(index, value)
        torch.Tensor.__setitem__(self, index, value)

    def tolist(self) -> Any:
        """The values. (torch has none of a subclass, and a row of a weight with a master is one.)"""
        return self.dequantize().tolist()

    def __getattr__(self, name: str) -> Any:
        memory = self.__dict__["_cell"].memory if "_cell" in self.__dict__ else None
        if memory is not None and name in _OF_MEMORY and self.master is None:
            return _OF_MEMORY[name](memory)
        # TransformerEngine's names, which a parameter has if its first values were preserved.
        if memory is not None and memory.preserves and name == "get_high_precision_init_val":
            return lambda: memory.preserved
        if memory is not None and memory.preserves and name == "clear_high_precision_init_val":
            return memory.forget_first_values
        return super().__getattr__(name)

    def _drop(self, names: tuple[str, ...], needed: str) -> QuantizedTensor:
        if self.state is not State.WHOLE or needed != "rowwise_data":
            raise ValueError(
                "A parameter keeps the copies that forward and backward multiply by; only the columnwise copy of a whole weight can be "
                "dropped, where there will be no backward."
            )
        self.memory.drop_columnwise()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"{self.memory.name} is a parameter with an FP8 form, which is not saved as an object: save the module's state_dict(), whose "
            "entries are plain tensors, or dequantize()d values."
        )

    def __deepcopy__(self, memo: dict) -> Weight:
        copied: Any = self.detach().clone()
        copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad) if hasattr(self, "_is_param") else copied
        memo[id(self)] = copied
        return copied

    # ------------------------------------------------------------------------------------------------- FSDP2's hooks, dispatch

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], str]:
        """What this rank gives. (One argument besides self: torch then allows shards of different sizes.)"""
        memory = self.memory
        if (
            not memory.shard_groups and mesh.size() > 1
        ):  # `fully_shard` alone: here the ranks are known for the first time
            memory.bind((mesh.get_group(),), mesh.device_type)
        if memory.quantized and self.master is not None and not fresh(self):
            what = "has changed since its FP8 copy was made" if memory.data else "has no FP8 copy yet"
            raise ValueError(
                f"{memory.name} {what}: call ottava.distributed.refresh(model) after loading, initializing or changing weights by "
                "hand. If the model is not called through its own forward, attach(optimizer, model) renews them after each step."
            )
        return messages(memory, self.master, self.device)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], direction: str, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The whole unit and its inner tensors, or nothing where `out` is that of an earlier all-gather, to be filled again.

        It stands for a tensor of `param_dtype`, so that its gradient has that dtype as its neighbours' have.
        """
        memory = self.memory
        before: Any = torch_private.local_tensor(out) if hasattr(out, "device_mesh") else out
        if direction == UNQUANTIZED:
            values, inner = fill_rows(memory, outputs, None if not isinstance(before, Weight) else before.master)
            if before is not None:
                return None
            alone = len(memory.group.parts) == 1
            gathered = values if alone else Weight(memory, State.GATHERED, values.shape, values.dtype, master=values)
            return gathered, inner
        state, inner = fill(memory, outputs, direction, None if before is None else before._gather)
        if before is not None:
            return None
        device = outputs[0].device
        return Weight(memory, State.GATHERED, memory.place.unit, param_dtype, device, gather=state), inner

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        if self.master is not None:
            return ["master"], (self._cell, self.state)
        memory = self.memory
        names = [name for name, get in _OF_MEMORY.items() if get(memory) is not None]
        group = memory.group
        return names, (memory.name, memory.place, str(self.scheme), group.needs_columnwise, self.state, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: tuple, outer_size: Any, outer_stride: Any) -> Tensor:  # type: ignore[override]
        if "master" in inner:
            cell, state = meta
            return Weight(cell, state, outer_size, inner["master"].dtype, master=inner["master"])
        name, place, scheme, needs_columnwise, state, dtype = meta
        memory = WeightMemory(name, place, ScaleGroup(Scheme.parse(scheme), needs_columnwise))
        memory.set_tensors(inner)
        return Weight(memory, state, outer_size, dtype, inner["rowwise_bytes"].device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], cls):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable or func.namespace == "c10d":
            return _write(func, args, kwargs)
        first = args[0] if args else None
        if (
            isinstance(first, cls)
            and first.master is not None
            and first.state is not State.GATHERED
            and _makes_views(func)
        ):
            return _master_views(func, first, args[1:], kwargs)
        args, kwargs = torch_private.map_instances(QuantizedTensor, lambda q: q._values(), (args, kwargs))
        return func(*args, **kwargs)


def _named_tensor(name: str) -> Callable[[WeightMemory], Tensor | None]:
    return lambda memory: memory.named_tensors().get(name)


_OF_MEMORY = {name: _named_tensor(name) for name in TENSOR_NAMES}
"""What a stored weight is made of, for torch.compile: attribute -> how to get it."""


def join_parts(weights: Sequence[Weight]) -> None:
    """Makes weights the parts of one matrix, in this order: they get one scale, and lie behind one another when gathered."""
    memories = [weight.memory for weight in weights]
    group = memories[0].group.map(lambda t: t)
    total, before = sum(m.place.part[1] for m in memories), 0
    for memory in memories:
        memory.join(group)
        memory.place = memory.place.among(before, total)
        before += memory.place.part[1]


def link_parts(weights: Sequence[Weight]) -> None:
    """Makes parts of one matrix, of which something has made copies one by one, share its scales again."""
    memories = [weight.memory for weight in weights]
    if [id(m) for m in memories[0].group.parts] == [id(m) for m in memories]:
        return
    group = memories[0].group.map(lambda t: t)
    group.delayed, group.column = memories[0].group.delayed, memories[0].group.column
    for memory in memories:
        memory.join(group)


def link_copies(weights: Sequence[Any]) -> bool:
    """Whether weights are copies, made one by one, of all parts of one matrix (`torch.func.functional_call` of cloned parameters): they
    share its scales again then."""
    if not all(isinstance(w, Weight) and w.stored_quantized and w.state is State.WHOLE for w in weights):
        return False
    memories = [weight.memory for weight in weights]
    first, row = memories[0], 0
    for memory in memories:
        place = memory.place
        if place.part[0] != row or place.matrix != first.place.matrix or memory.scheme != first.scheme:
            return False
        if len(memory.group.parts) > 1 or not first.group.same_scales(memory.group):
            return False
        row += place.part[1]
    if row != first.place.matrix[0]:
        return False
    link_parts(weights)
    return True


# ----------------------------------------------------------------------------------------------------- bytes of a whole unit


def _partners(memories: Sequence[WeightMemory]) -> list[tuple[Tensor, WeightMemory]]:
    """(values, memory) of the parts that share scales with some of `memories` and are not among them."""
    given = {id(memory) for memory in memories}
    groups = {id(m.group): m.group for m in memories if m.shares_scales}
    others = [part for group in groups.values() for part in group.parts if id(part) not in given]
    return [(part.given_values(), part) for part in others]


def _quantizes_alone(weight: Weight) -> bool:
    """Whether one kernel gives the bytes of both directions at once: of a whole unit that shares scales with nobody."""
    memory = weight.memory
    if weight.state is not State.WHOLE or len(memory.group.parts) > 1 or memory.weight_groups or not memory.two_copies:
        return False
    return all(memory.extent(d) is not Extent.MATRIX for d in memory.directions)


def _quantize_whole(memory: WeightMemory, values: Tensor) -> None:
    columnwise = memory.group.keeps_columnwise
    buffers = torch.ops.ottava.quantize(values, str(memory.scheme), None, None, True, columnwise)
    q = QuantizedTensor.from_buffers(buffers, memory.scheme, values.shape, values.dtype, True, columnwise)
    parts = {name: tensor for name, tensor in q._parts.items() if tensor.numel() or name.endswith("_data")}
    if memory.group.operands is not None:
        parts = _in_place_of(memory.group.operands[1], parts)
    _take_buffers(memory, parts)
    memory.group.operands = (_versions(memory.group), parts)


def _take_buffers(memory: WeightMemory, parts: dict[str, Tensor]) -> None:
    """The bytes and scales of a whole matrix in the same scheme, as they are."""
    group, scheme = memory.group, memory.scheme
    memory.data[ROWWISE] = parts["rowwise_data"]
    if scheme.needs_tensor_amax:
        group.amax = parts["rowwise_amax"]
    if scheme.per_tensor:
        group.scale_inv = parts["rowwise_scale_inv"]
        group.scale = torch.ones_like(group.scale_inv) / group.scale_inv
    else:
        memory.set_scales(ROWWISE, parts["rowwise_scale_inv"])
    if memory.two_copies:
        _take_columnwise(memory, upright(parts["columnwise_data"], scheme), parts["columnwise_scale_inv"].t())
    memory.preserved, memory.without_scales = None, False


def _take_columnwise(memory: WeightMemory, data: Tensor, scales: Tensor) -> None:
    """Upright views of what a GEMM takes, or, where somebody reads them as rows, these rows."""
    if memory.rows_first:
        old = [memory.data.get(COLUMNWISE), memory.held_scales(COLUMNWISE)]
        data, scales = written_over(old, [data.contiguous(), scales.contiguous()])
    memory.data[COLUMNWISE] = data
    memory.set_scales(COLUMNWISE, scales)


def _transposed_part(weight: Weight, name: str) -> Tensor | None:
    """A part of the columnwise copy, of which only the rowwise one is kept."""
    part = weight._parts.get(name.replace(COLUMNWISE, ROWWISE))
    if part is None or name.endswith("_amax"):
        return part if weight.scheme.kind == "nvfp4" else None
    if name.endswith("_data"):
        return torch.ops.ottava.transpose(part, str(weight.scheme))
    return part if part.dim() == 1 else part.t().contiguous()


def upright(columnwise: Tensor, scheme: Scheme) -> Tensor:
    """Columnwise bytes [K, M] as rows of the matrix: a view, where bytes are not packed."""
    return columnwise.t() if scheme.elements_per_byte == 1 else torch.ops.ottava.transpose(columnwise, str(scheme))


def _versions(group: ScaleGroup) -> list[int]:
    """Changes when bytes or scales do, also where somebody (DCP) writes into them. Asked in every forward."""
    found: list[int] = []
    for part in group.parts:
        for tensors in (part.data, part._scales, group.grids):
            for t in tensors.values():
                found += (id(t), 0 if t.is_inference() else t._version)
    for t in (group.amax, group.scale_inv):
        found += (id(t), 0 if t.is_inference() else t._version)
    return found


def _whole_parts(memory: WeightMemory) -> dict[str, Tensor]:
    """Both directions of a whole unit."""
    group = memory.group
    joined = operands(group)
    if len(group.parts) == 1:
        return joined
    index, scheme = group.parts.index(memory), memory.scheme
    first = sum(part.place.unit[0] for part in group.parts[:index])
    rows, packed, box = memory.place.unit[0], scheme.elements_per_byte, memory.place.box(Extent.UNIT)
    parts = dict(joined)
    parts["rowwise_data"] = joined["rowwise_data"].narrow(0, first, rows)
    parts["rowwise_scale_inv"] = memory.scale_inv(ROWWISE, box)
    if group.keeps_columnwise:
        parts["columnwise_data"] = joined["columnwise_data"].narrow(1, first // packed, rows // packed)
        parts["columnwise_scale_inv"] = memory.scale_inv(COLUMNWISE, box).t()
    return parts


def operands(group: ScaleGroup) -> dict[str, Tensor]:
    """Both directions of the units of all parts as one matrix, as a GEMM takes them; made again, in the same memory, when bytes or
    scales change."""
    if group.operands is None or group.operands[0] != _versions(group):
        # They stay: an evaluation in inference mode must not leave what a later backward cannot save.
        with torch.inference_mode(False):
            group.operands = _renewed_operands(group)
    return group.operands[1]


def _renewed_operands(group: ScaleGroup) -> tuple[list[int], dict[str, Tensor]]:
    """(versions of what they are made from, operands)"""
    made = _make_operands(group)
    if group.operands is not None:
        made = _in_place_of(group.operands[1], made)
    first = 0
    for part in group.parts:  # one memory for the parts and the whole
        rows = part.place.unit[0]
        part.check_given()
        part.data[ROWWISE] = made["rowwise_data"].narrow(0, first, rows)
        part.bytes_follow_given()
        if part.two_copies and part.scheme.elements_per_byte == 1 and not part.rows_first:
            part.data[COLUMNWISE] = made["columnwise_data"].narrow(1, first, rows).t()
        first += rows
    return _versions(group), made


def _make_operands(group: ScaleGroup) -> dict[str, Tensor]:
    parts, scheme = group.parts, group.scheme
    assert scheme is not None

    def joined(direction: str) -> Tensor:
        data = [part.data[direction] for part in parts]
        if (
            direction == ROWWISE
            and group.operands is not None
            and _are_rows_of(group.operands[1]["rowwise_data"], data)
        ):
            return group.operands[1]["rowwise_data"]
        return data[0] if len(data) == 1 else torch.cat(data)

    made = {"rowwise_data": joined(ROWWISE).contiguous()}
    made |= _joined_scales(group, [ROWWISE, COLUMNWISE] if group.keeps_columnwise else [ROWWISE])
    if group.keeps_columnwise:
        made["columnwise_data"] = torch.ops.ottava.transpose(joined(COLUMNWISE), str(scheme))
    return made


def _are_rows_of(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether parts are all the rows of `whole`, in order and in its memory."""
    if torch_private.is_fake(whole) or whole.is_meta or sum(part.shape[0] for part in parts) != whole.shape[0]:
        return False
    address = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.stride() != whole.stride() or part.device != whole.device:
            return False
        address += part.shape[0] * whole.stride(0) * whole.element_size()
    return True


def _in_place_of(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """`new` in the memory of `old`, where a CUDA graph may read it."""
    return dict(zip(new, written_over([old.get(name) for name in new], list(new.values())), strict=True))


def tensors_of(weight: Weight) -> list[Tensor]:
    """What a forward of this weight reads: the values that it has in high precision, and what a GEMM takes, made if it is not there."""
    held = [] if weight.master is None else [weight.master]
    whole = weight.state is State.WHOLE and weight.memory.quantized and bool(weight.memory.data)
    made = operands(weight.memory.group) if whole else {}
    return held + [made[name] for name in sorted(made)]  # in one order, whoever has made them


def _joined_scales(group: ScaleGroup, directions: Sequence[str]) -> dict[str, Tensor]:
    """Scales and amax of the matrix that all parts are rows of, by the names that `QuantizedTensor` has for them."""
    found, scheme = {}, group.scheme
    assert scheme is not None
    for direction in directions:
        scale = joined_scale_inv(group.parts, direction)
        scale = scale if direction == ROWWISE or scale.dim() == 1 else scale.t()
        found[f"{direction}_scale_inv"] = in_gemm_layout(scale, scheme)
        if scheme.needs_tensor_amax and (direction == ROWWISE or scheme.block is not None):
            found[f"{direction}_amax"] = group.amax
    return found


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """In which a weight wants its gradient: `grad_dtype` of a parameter, else its own."""
    wanted = weight.grad_dtype if weight.is_leaf and not torch.compiler.is_compiling() else None
    return wanted or weight.dtype


# --------------------------------------------------------------------------------------------- several parameters as one matrix


def one_matrix(weights: Sequence[Any]) -> bool:
    """Whether weights are all the parts of one matrix, in order: bytes that can be multiplied as one."""
    if not all(isinstance(w, Weight) and w.memory.quantized for w in weights):
        return False
    parts = weights[0].memory.group.parts
    return [id(w.memory) for w in weights] == [id(part) for part in parts]


def as_one_matrix(weights: Sequence[Weight]) -> QuantizedTensor:
    """The matrix that the weights are the rows of, without rounding again; gradients go back to each. Only if `one_matrix`."""
    return _OneMatrix.apply(*weights)


class _OneMatrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Weight) -> QuantizedTensor:
        ctx.rows = [w.shape[0] for w in weights]
        ctx.set_materialize_grads(False)
        group, first = weights[0].memory.group, weights[0]
        if first._gather is None:
            parts = operands(group)
        else:
            names = ["rowwise_data", "columnwise_data"] if group.keeps_columnwise else ["rowwise_data"]
            parts = {name: group.joined[name] for name in names}
            parts |= _gathered_scales(weights)
        return QuantizedTensor(parts, first.scheme, (sum(ctx.rows), first.shape[1]), gradient_dtype(first))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None,) * len(ctx.rows) if grad is None else grad.split(ctx.rows)


def _gathered_scales(weights: Sequence[Weight]) -> dict[str, Tensor]:
    """Scales that travelled are put under one another; those that every rank has are asked from the group."""
    group, scheme = weights[0].memory.group, weights[0].scheme
    directions = [ROWWISE, COLUMNWISE] if group.keeps_columnwise else [ROWWISE]
    known = [d for d in directions if scheme.block is None or group.parts[0].extent(d) is not Extent.OWN]
    found = _joined_scales(group, known)
    for direction in (d for d in directions if d not in known):
        name = f"{direction}_scale_inv"
        # Columnwise ones are filled before backward, in the memory that autograd holds from forward on.
        found[name] = group.joined[name] if direction == COLUMNWISE else torch.cat([w._parts[name] for w in weights])
        if scheme.needs_tensor_amax:
            found[f"{direction}_amax"] = group.amax
    return found


# ------------------------------------------------------------------------------------- are the bytes those of the master?


def fresh(weight: Weight) -> bool:
    """Whether the bytes are those of the master's values."""
    memory, master = weight.memory, weight.master
    assert master is not None
    return bool(memory.data) and memory.made_from.get(_address(master)) == master._version


def note_made(weight: Weight) -> None:
    """The bytes were just made from the master's values."""
    weight.memory.made_from = {}
    note_same(weight)


def note_same(weight: Weight) -> None:
    """The master is other memory with the values that the bytes were made from."""
    assert weight.master is not None
    weight.memory.made_from[_address(weight.master)] = weight.master._version


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ------------------------------------------------------------------------------------------------------------------ writing


def _written(func: Any, args: tuple, kwargs: dict) -> list[Weight]:
    """The weights that the op would write into."""
    found: list[Weight] = []
    for i, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not (written or _receives(func, argument.name)):
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found += [v for v in torch_private.tree_flatten(value)[0] if isinstance(v, Weight)]
    return found


def _receives(func: Any, argument: str) -> bool:
    """Collectives write without saying so in their schema."""
    tensors = argument == "tensors" and func is not torch.ops.c10d.send.default
    return func.namespace == "c10d" and (tensors or argument.startswith("output"))


def _write(func: Any, args: tuple, kwargs: dict) -> Any:
    """An op that writes: into masters, or by dequantize, compute, quantize."""
    targets = _written(func, args, kwargs)
    values = {id(w): w._values() for w in targets}

    def plain(q: Any) -> Tensor:
        return values[id(q)] if id(q) in values else q._values()

    plain_args, plain_kwargs = torch_private.map_instances(QuantizedTensor, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    received = func.namespace == "c10d"
    if received:  # `dist.broadcast(weight, async_op=True)` and the like: what is quantized next has to be there
        torch_private.wait_for_work(result)
    bytes_only = [w for w in targets if w.master is None]
    if bytes_only:
        requantize = _requantize_given if received else Weight.requantize_together_
        requantize(bytes_only, [values[id(w)] for w in bytes_only])
        mark_written(bytes_only)
    for weight in targets:
        weight.memory.made_from = {}
    back = {id(values[id(w)]): w for w in targets}
    return torch_private.map_instances(Tensor, lambda t: back.get(id(t), t), result)


def _warn_of_buckets(weight: Weight, value: Tensor) -> None:
    """Who puts a parameter's own values into a larger buffer and gives it a view of that means the buffer to be the parameter."""
    if isinstance(value, QuantizedTensor) or weight.master is not None or torch_private.is_fake(value) or value.is_meta:
        return
    if value.untyped_storage().nbytes() > value.numel() * value.element_size() and torch.equal(value, weight._values()):
        warn_once(
            f"ottava: {weight.memory.name} is stored in FP8, and its `data` was set to a view of a larger buffer with the same values. It "
            "does not follow that buffer: ZeroRedundancyOptimizer(parameters_as_bucket_view=True) and the like would not train it."
        )


def _change_dtype(weight: Weight, values: Tensor) -> None:
    """It stands for a tensor of another type from now on (`module.to(dtype)`). Values that are only rounded to it leave the bytes alone."""
    if weight.master is None:
        if not torch.equal(values, weight._values(values.dtype)):
            with torch.no_grad():
                weight.copy_(values)
        master = None
    else:
        master = weight.master = values.detach()
    other = Weight(weight._cell, weight.state, weight.shape, values.dtype, weight.device, master, weight._gather)
    torch.Tensor.data.__set__(weight, other)  # type: ignore[attr-defined]


def mark_written(weights: Sequence[Weight]) -> None:
    """Below autograd, where ops on a weight arrive, writing changes no tensor's version. But versions are how `operands` knows that scales
    have changed, and how autograd refuses a backward that holds bytes of before."""
    for group in {id(w.memory.group): w.memory.group for w in weights}.values():
        made = [] if group.operands is None else list(group.operands[1].values())
        torch.autograd.graph.increment_version([*made, *(t for part in group.parts for t in part.tensors())])
        for part in group.parts:
            part.bytes_follow_given()


def _copy(func: Any, target: Weight, source: Tensor, *unused: Any) -> Any:
    written = _copy_into(func, target, source)
    if target.master is None and target.state is not State.GATHERED:
        mark_written([target])
    return written


def _copy_into(func: Any, target: Weight, source: Tensor) -> Any:
    if source.dtype == torch.uint8 and target.master is None and target.state is not State.GATHERED:
        # No weight has values of this type: torch's `broadcast_from_rank0` writes an entry of a state dict where the parameter is.
        target.memory.take_bytes(source)
        return target
    if target.shape != source.shape:
        raise ValueError(f"copy_ needs equal shapes: target {tuple(target.shape)}, source {tuple(source.shape)}.")
    if isinstance(source, Weight) and target._cell.new:
        target._cell.move_in(source.memory)
    if target.master is not None:
        same = isinstance(source, Weight) and source.memory is target.memory and fresh(source)
        func(target.master, source._values() if isinstance(source, QuantizedTensor) else source)
        if same:
            note_same(target)
        else:
            target.memory.made_from = {}
        return target
    if isinstance(source, Weight) and source.master is None and source.scheme == target.scheme:
        if source.memory is target.memory:
            return target
        if not target.memory.shares_scales or target.memory.group.same_scales(source.memory.group):
            target.memory.copy_from(source.memory)
            return target
    whole = target.state is State.WHOLE and not target.memory.shares_scales
    if type(source) is QuantizedTensor and source.scheme == target.scheme and whole:
        _take_buffers(target.memory, {n: t.to(target.device, copy=True) for n, t in source._parts.items()})
        return target
    _requantize_given([target], [source._values() if isinstance(source, QuantizedTensor) else source])
    return target


def _requantize_given(targets: Sequence[Weight], values: Sequence[Tensor]) -> None:
    """Values that come one parameter at a time, as from a file or another rank, into weights that share a scale with others: they are kept
    until all parts of the matrix have theirs, so that what comes last does not round those before it a second time. So it is the same
    whether they come one by one or at once, and ranks that get the same values have the same bytes."""
    Weight.requantize_together_(targets, values)
    for target, value in zip(targets, values, strict=True):
        memory = target.memory
        if memory.shares_scales and not torch_private.is_fake(value):
            memory.keep_given(value.detach().reshape(memory.place.rows, memory.place.unit[1]))


# ------------------------------------------------------------------------------------------------------- views and new memory


def _alias(func: Any, weight: Weight) -> Weight:
    return weight._like(weight.shape, None if weight.master is None else func(weight.master))


def _view(func: Any, weight: Weight, size: Any, *rest: Any) -> Any:
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


def _slice(
    func: Any, weight: Weight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if weight.master is not None:
        master = func(weight.master, dim, start, end, step)
        return weight._like(master.shape, master)
    if weight.state is not State.SHARD:
        return QUANTIZED_HANDLERS[func](func, weight, dim, start, end, step)
    if dim != 0 or start or step != 1 or weight.dim() != 2:
        return NotImplemented
    return weight._like((len(range(*slice(start, end).indices(weight.shape[0]))), weight.shape[1]))


@functools.cache
def _makes_views(func: Any) -> bool:
    """Whether what the op returns is memory of what it is given."""
    returned = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _master_views(func: Any, weight: Weight, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Views of a master (a row, the transpose) know whose they are. Below autograd a view has a version of its own, so a write through
    a plain one would leave bytes that nobody knows to be old."""
    made = func(weight.master, *args, **kwargs)
    seen = [weight._like(view.shape, view) for view in (made if isinstance(made, list | tuple) else [made])]
    return seen if isinstance(made, list | tuple) else seen[0]


def _split(func: Any, weight: Weight, size: int, dim: int = 0) -> Any:
    """How FSDP2 cuts a parameter into rows."""
    if weight.state is not State.WHOLE or dim != 0 or weight.dim() != 2 or not _can_be_cut(weight):
        return NotImplemented
    rows = weight.shape[0]
    starts = range(0, rows, size) if size else range(1)

    def shard(start: int) -> Weight:
        stop = min(start + size, rows)
        cell = Cell(lambda: _shard_memory(weight, start, stop, size))
        master = None if weight.master is None else weight.master[start:stop]
        shape = (stop - start, weight.shape[1])
        return Weight(cell, State.SHARD, shape, weight.dtype, weight.device, master)

    return [shard(start) for start in starts]


def _can_be_cut(weight: Weight) -> bool:
    scheme = weight.memory.group.scheme
    return scheme is None or not (scheme.hadamard or scheme.stochastic)


def _shard_memory(weight: Weight, start: int, stop: int, padded: int) -> WeightMemory:
    place = weight.memory.place.shard(start, stop, padded)
    return weight.memory.part(place, ("shard", place.world, start // max(padded, 1) if stop > start else "empty"))


def _new(func: Any, weight: Weight, size: Any, *, dtype: Any = None, device: Any = None, **unused: Any) -> Any:
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
    return Weight(cell, State.SHARD, tuple(size), weight.dtype, weight.device, master)


def _moved(weight: Weight, function: Callable[[Tensor], Tensor], same_values: bool = True) -> Any:
    """The weight in other memory: `function` is applied to each of its tensors."""
    if weight.state is State.GATHERED:
        return NotImplemented
    if weight.master is None:
        memory = weight.memory.map(function)
        device = next(iter(memory.data.values())).device
        return Weight(memory, weight.state, weight.shape, weight.dtype, device)
    was_fresh = weight.memory.quantized and fresh(weight)
    moved = weight._like(weight.shape, function(weight.master))
    if was_fresh and same_values:
        note_same(moved)
    return moved


def _to_copy(func: Any, weight: Weight, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, weight.dtype):
        return NotImplemented
    blocking = options.get("non_blocking", False)
    return _moved(weight, lambda t: t.to(device, non_blocking=blocking, copy=True))


def _empty_like(func: Any, weight: Weight, **options: Any) -> Any:
    if options.get("dtype") not in (None, weight.dtype):
        return NotImplemented
    device = options.get("device")
    return _moved(weight, lambda t: torch.empty_like(t, device=device), same_values=False)


def _clone(func: Any, weight: Weight, memory_format: Any = None) -> Any:
    return _moved(weight, torch.clone) if weight.master is None else NotImplemented


_HANDLERS: dict[Any, Callable] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.as_strided.default: _view,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.new_zeros.default: _new,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: lambda func, weight, device=None: _moved(weight, lambda t: t.pin_memory()),
}
