"""`Weight`: a parameter that has an FP8 form, as torch sees it: how one is made, what it answers, FSDP2's hooks, the ops that are its own.

What it is made of, a file each; imports point up this list, and `weight_parts` lies above all:

    weight_place      where its rows lie in the matrix of one process, and which scales a rank has of that
    scale_group       what parameters that hold rows of one matrix share
    weight_memory     the bytes and scales that a rank holds
    weight_state      its states, and what memory each holds: [Note: states of a weight]
    weight_operands   what a GEMM takes of it
    weight_renew      values -> bytes and scales, of all weights at once
    weight_gather     what FSDP2's all-gather sends, and what is made of what it brings
    weight_views      ops that make another weight of it
    weight_writes     ops that write into it
    read_only         what other views of its values are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.quant import weight_views, weight_writes
from ottava.quant.read_only import read_only
from ottava.quant.scale_group import ScaleGroup
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor, makes_views
from ottava.quant.weight_gather import UNQUANTIZED, GatherState, fill, fill_rows, messages
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE, TENSOR_NAMES, WeightMemory
from ottava.quant.weight_operands import quantize_whole, tensors_of, transposed_part, whole_parts
from ottava.quant.weight_place import Place
from ottava.quant.weight_renew import renew
from ottava.quant.weight_state import Cell, State, fresh
from ottava.quant.weight_writes import partners, quantizes_alone, warn_of_buckets, write

__all__ = ["State", "Weight", "gradient_dtype"]

aten = torch.ops.aten


class Weight(QuantizedTensor):
    """See above, and [Note: states of a weight] in `weight_state`."""

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
            return whole_parts(self.memory)
        return self.memory.held_parts(self.numel() // self.memory.place.unit[1])

    def _get(self, name: str) -> Tensor | None:
        if self._gather is not None and name.startswith(ROWWISE) and self._gather.direction == COLUMNWISE:
            raise ValueError(
                f"{self.memory.name} ({self.scheme}) is needed rowwise, but its columnwise bytes are gathered: they were, for backward. "
                "If its forward runs again in backward (activation checkpointing), name its module in shard_model(recomputed=...). "
                "Otherwise let FSDP reshard after backward: set_reshard_after_backward(True)."
            )
        transposed = name.startswith(COLUMNWISE) and not self.scheme.two_copies and self.memory.group.needs_columnwise
        return transposed_part(self, name) if transposed else self._parts.get(name)

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
        values = torch.ops.ottava.dequantize(*operand, str(self.scheme.along(direction)), dtype or self.dtype)
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
        slow = partners([tensor.memory for tensor in tensors])
        for tensor, source in zip(tensors, sources, strict=True):
            memory, values = tensor.memory, source.detach().to(tensor.device)
            memory.preserved = memory.given = None
            if tensor.state is State.GATHERED:
                raise ValueError(
                    f"{memory.name} is gathered: write to the sharded parameter, outside of forward and backward."
                )
            if quantizes_alone(tensor):
                quantize_whole(memory, values)
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
        warn_of_buckets(self, value)
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

    def __getattr__(self, name: str) -> Any:
        memory = self.__dict__["_cell"].memory if "_cell" in self.__dict__ else None
        if memory is not None and name in TENSOR_NAMES and self.master is None:
            return memory.named_tensors().get(name)
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
        # After `fully_shard` alone the ranks are known here for the first time.
        if not memory.shard_groups and mesh.size() > 1:
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
        held = memory.named_tensors()
        names = [name for name in TENSOR_NAMES if name in held]
        needs_columnwise = memory.group.needs_columnwise
        return names, (memory.name, memory.place, str(self.scheme), needs_columnwise, self.state, self.dtype)

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
        first = args[0] if args else None
        if torch.is_inference_mode_enabled() and makes_views(func) and not first.is_inference():  # type: ignore[union-attr]
            # A view of an ordinary tensor is an ordinary tensor, which inference mode makes none of.
            with torch.inference_mode(False), torch.no_grad():
                return cls._dispatch(func, first, args, kwargs)
        return cls._dispatch(func, first, args, kwargs)

    @classmethod
    def _dispatch(cls, func: Any, first: Any, args: tuple, kwargs: dict) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(first, cls):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable or func.namespace == "c10d":
            return write(cls, func, args, kwargs)
        viewed = isinstance(first, cls) and makes_views(func)
        if viewed and first.master is not None and first.state is not State.GATHERED:
            return weight_views.master_views(func, first, args[1:], kwargs)
        args, kwargs = torch_private.map_instances(QuantizedTensor, lambda q: q._values(), (args, kwargs))
        result = func(*args, **kwargs)
        return read_only(func, result, first.memory.name) if viewed and first.master is None else result


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """In which a weight wants its gradient: `grad_dtype` of a parameter, else its own."""
    wanted = weight.grad_dtype if weight.is_leaf and not torch.compiler.is_compiling() else None
    return wanted or weight.dtype


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


_HANDLERS: dict[Any, Callable] = {
    aten.detach.default: weight_views.alias,
    aten.alias.default: weight_views.alias,
    aten.view.default: weight_views.view,
    aten._unsafe_view.default: weight_views.view,
    aten.as_strided.default: weight_views.view,
    aten.slice.Tensor: weight_views.slice_rows,
    aten.split.Tensor: weight_views.split,
    aten.new_zeros.default: weight_views.new_zeros,
    aten.new_empty.default: weight_views.new_empty,
    aten.empty_like.default: weight_views.empty_like,
    aten.copy_.default: weight_writes.copy,
    aten.clone.default: weight_views.clone,
    aten._to_copy.default: weight_views.to_copy,
    aten._pin_memory.default: weight_views.pin_memory,
}
