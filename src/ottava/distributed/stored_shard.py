"""`StoredShard`: this rank's rows of a weight that is stored in FP8, as `quantized_model_init` makes it.

torch's own `fully_shard` cuts such a weight into StoredShards and gathers their bytes; `optimizers.FusedAdam` holds the float32
masters of the rows, and after a step writes all weights at once, with the scales that one process would have.

    with ottava.quantized_model_init(recipe=recipe):
        model = build()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = ottava.optimizers.FusedAdam(model.parameters())
"""

from __future__ import annotations

import copy as copying
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottava.distributed.block_grid import transposed
from ottava.distributed.gathered import receive, send
from ottava.distributed.wire_copy import Joint, WireCopy, renew_copies
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor, use_shards

aten = torch.ops.aten


@dataclass
class Cell:
    """What all views of a shard share. FSDP moves a shard by making a new one and copying into it."""

    copy: WireCopy
    preserved: Tensor | None = None
    """The rows before they were quantized, where `quantized_model_init(preserve_high_precision_init_val=True)` kept them."""
    new: bool = False
    """Just made by `new_zeros`: what is copied in moves in."""


class StoredShard(QuantizedTensor):
    """Rows of a weight in FP8. Reading ops see the dequantized values; only `copy_` and `requantize_` write, on all ranks at once."""

    _cell: Cell

    @staticmethod
    def __new__(cls, cell: Cell, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> StoredShard:  # type: ignore[override]
        assert cell.copy.row_data is not None
        self: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=cell.copy.row_data.device)
        self._cell, self.scheme = cell, cell.copy.scheme
        return self

    @property
    def copy(self) -> WireCopy:
        """The bytes, the scales, and where they lie in the whole weight."""
        return self._cell.copy

    @property
    def _parts(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Rowwise bytes and scales, one row of scales a row of the weight; the columnwise copy exists when it is gathered."""
        copy, rows = self.copy, self.numel() // self.copy.shape[1]
        assert copy.row_data is not None
        parts = {"rowwise_data": copy.row_data[:rows], "rowwise_scale_inv": copy.joint.scale_inv}
        if copy.scheme.block is not None and copy.scheme.transposable:
            row = torch.arange(copy.start, copy.start + rows, device=copy.scale_inv.device) // copy.scheme.block[0]
            parts["rowwise_scale_inv"] = copy.scale_inv[row]
        elif copy.scheme.block is not None:
            parts["rowwise_scale_inv"] = copy.row_scale[:rows]
        return parts | ({"rowwise_amax": copy.joint.amax} if copy.joint.amax.numel() else {})

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        scheme = self.scheme
        if scheme.block is not None:
            scheme = Scheme(**{**vars(scheme), "block": (1, scheme.block[1])})
        values = torch.ops.ottava.dequantize(*self.operand("rowwise"), str(scheme), dtype or self.dtype)
        return values.reshape(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        last = self.copy.start + self.shape[0] if self.dim() == 2 else self.copy.start
        return (
            f"StoredShard({tuple(self.shape)}, rows {self.copy.start} to {last} of {self.copy.shape}, {self.scheme}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    # -------------------------------------------------------------------------------------------------------------- writing

    @classmethod
    def requantize_together_(cls, tensors: Sequence[Any], sources: Sequence[Tensor]) -> None:
        """Quantizes rows anew, all of them with at most two MAX all-reduces. Every rank has to call it with the same weights."""
        for tensor in tensors:
            copy = tensor.copy
            if copy.world > 1 and copy.shard_group is None:
                raise ValueError(
                    f"This {tensor!r} does not know yet with which ranks it shares its scales: run a forward pass first, or use "
                    "ottava.distributed.fsdp.shard_model."
                )
            tensor.clear_high_precision_init_val()
        renew_copies((source.detach(), tensor.copy) for tensor, source in zip(tensors, sources, strict=True))

    def requantize_(self, source: Tensor) -> StoredShard:
        """See `requantize_together_`."""
        self.requantize_together_([self], [source.to(self.device)])
        return self

    def is_quantization_of(self, value: Tensor) -> bool:
        """Whether these are the bytes of `value`, the preserved one: it is forgotten when something else is written."""
        return self._cell.preserved is not None

    def get_high_precision_init_val(self) -> Tensor | None:
        """The rows before they were quantized, if `quantized_model_init` was asked to preserve them."""
        return self._cell.preserved

    def clear_high_precision_init_val(self) -> None:
        """Frees what `get_high_precision_init_val` returns."""
        self._cell.preserved = None

    def _drop(self, names: tuple[str, ...], needed: str) -> QuantizedTensor:
        raise ValueError("A shard of a stored weight has one copy, which cannot be dropped.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "A shard of a weight that is stored in FP8 cannot be saved or copied by itself: save the masters of FusedAdam, or "
            "dequantize()d values."
        )

    # ------------------------------------------------------------------------------------------------------- FSDP2's hooks

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], str]:
        """The bytes of this rank's rows. (One argument besides self: torch then allows shards of different sizes.)"""
        copy = self.copy
        if copy.shard_group is None:  # `fully_shard` alone: here the ranks are known for the first time
            copy.bind(mesh.get_local_rank(), mesh.size(), mesh.get_group(), None, mesh.device_type)
        return send(copy, self.device)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], direction: str, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The whole weight (`gathered.py`)."""
        return receive(self.copy, outputs, direction, param_dtype, out)

    # ------------------------------------------------------------------------------------------------------------- dispatch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], cls):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return cls._by_values(func, args, kwargs)

    def _viewed(self, shape: Any) -> StoredShard:
        return StoredShard(self._cell, shape, self.dtype)


def _view(shard: StoredShard, size: Any, *unused: Any) -> Any:
    shape = torch.Size([shard.numel() if n == -1 else n for n in size])
    return shard._viewed(shape) if shape.numel() == shard.numel() else NotImplemented


def _slice(shard: StoredShard, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if dim != 0 or start or step != 1 or shard.dim() != 2:
        return NotImplemented
    return shard._viewed((len(range(*slice(start, end).indices(shard.shape[0]))), shard.shape[1]))


def _new(shard: StoredShard, size: Any, *, dtype: Any = None, device: Any = None, **unused: Any) -> Any:
    if dtype not in (None, shard.dtype) or device not in (None, shard.device):
        return NotImplemented
    return StoredShard(Cell(shard.copy, new=True), tuple(size), shard.dtype)


def _copy(target: StoredShard, source: Tensor, *unused: Any) -> Any:
    if isinstance(source, StoredShard):
        if target._cell.new:
            target._cell.copy, target._cell.preserved, target._cell.new = (
                source._cell.copy,
                source._cell.preserved,
                False,
            )
        elif target.copy is not source.copy:
            _take(target, source)
        return target
    return target.requantize_(source.dequantize() if isinstance(source, QuantizedTensor) else source)


_TENSORS = ("row_data", "column_data", "scale_inv", "row_scale", "column_scale")
_OF_JOINT = ("amax", "scale", "scale_inv")


def _take(target: StoredShard, source: StoredShard) -> None:
    """Copies bytes and scales of the same rows of the same kind of weight, as loading a state dict does."""
    one, other = target.copy, source.copy
    if (one.scheme, one.shape, one.start, target.shape) != (other.scheme, other.shape, other.start, source.shape):
        raise ValueError(f"copy_ needs the same rows of a weight: target {target!r}, source {source!r}.")
    for name in _TENSORS:
        setattr(one, name, getattr(other, name).clone())
    for name in _OF_JOINT:
        setattr(one.joint, name, getattr(other.joint, name).clone())
    target.clear_high_precision_init_val()


def _moved(shard: StoredShard, move: Any) -> StoredShard:
    """The shard in other memory: `move` is applied to each of its tensors."""
    copy, old = copying.copy(shard.copy), shard.copy.joint
    if len(old.copies) == 1:
        copy.joint = Joint([copy])
        copy.joint.amax, copy.joint.scale, copy.joint.scale_inv = (
            move(t) for t in (old.amax, old.scale, old.scale_inv)
        )
    for name in ("row_data", "column_data", "scale_inv", "row_scale", "column_scale"):
        setattr(copy, name, move(getattr(copy, name)))
    return StoredShard(Cell(copy, shard._cell.preserved), shard.shape, shard.dtype)


def _to_copy(
    shard: StoredShard, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **unused: Any
) -> Any:
    if dtype not in (None, shard.dtype):
        return NotImplemented
    return _moved(shard, lambda t: t.to(device, non_blocking=non_blocking, copy=True))


_HANDLERS: dict[Any, Any] = {
    aten.detach.default: lambda shard: shard._viewed(shard.shape),
    aten.alias.default: lambda shard: shard._viewed(shard.shape),
    aten.view.default: _view,
    aten.as_strided.default: _view,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _new,
    aten.new_empty.default: _new,
    aten.empty_like.default: lambda shard, **kwargs: _new(
        shard, shard.shape, **{k: v for k, v in kwargs.items() if k != "memory_format"}
    ),
    aten.copy_.default: _copy,
    aten.clone.default: lambda shard, memory_format=None: _moved(shard, torch.clone),
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: lambda shard, device=None: _moved(shard, lambda t: t.pin_memory()),
}


# ----------------------------------------------------------------------------------------------------- the whole -> shards


def _shards_of(func: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
    """What a whole stored weight answers to `split` (into rows) and `new_zeros` (memory for rows)."""
    if whole.dim() != 2 or "rowwise_data" not in whole._parts or whole.scheme.hadamard or whole.scheme.stochastic:
        return NotImplemented
    rows = whole.shape[0]
    if func is aten.new_zeros.default:
        size = args[0]
        other_kind = kwargs.get("dtype") not in (None, whole.dtype) or kwargs.get("device") not in (None, whole.device)
        if len(size) != 2 or size[1] != whole.shape[1] or other_kind:
            return NotImplemented
        cell = _cell_of(whole, rows, rows, size[0])
        cell.new = True
        return StoredShard(cell, tuple(size), whole.dtype)
    size, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim != 0:
        return NotImplemented
    starts = range(0, rows, size) if size else [0]
    cells = [(_cell_of(whole, start, min(start + size, rows), size), min(size, rows - start)) for start in starts]
    return [StoredShard(cell, (height, whole.shape[1]), whole.dtype) for cell, height in cells]


def _cell_of(whole: Any, first: int, last: int, padded: int) -> Cell:
    """Rows [first, last) of the whole, padded to `padded`."""
    parts, scheme = whole._parts, whole.scheme
    copy = WireCopy("a stored weight", scheme, tuple(whole.shape), "columnwise_data" in parts)
    copy.padded_rows, copy.start, copy.world = padded, first, -(-whole.shape[0] // max(padded, 1))
    copy.gathers_both = True  # who shards does not say whether gathered weights are freed between forward and backward

    def rows(data: Tensor) -> Tensor:
        return pad(data[first:last], (0, 0, 0, padded - (last - first))).contiguous()

    copy.row_data = rows(parts["rowwise_data"])
    if "rowwise_amax" in parts:
        copy.joint.amax = parts["rowwise_amax"]
    if scheme.block is None:
        copy.joint.scale_inv = parts["rowwise_scale_inv"]
    elif scheme.transposable:
        copy.scale_inv = parts["rowwise_scale_inv"]
    else:
        column_scale = torch.empty(0)
        if copy.needs_columnwise:
            copy.column_data = rows(transposed(parts["columnwise_data"], scheme))
            along = copy.column_block[0]
            touched = slice(first // along, -(-last // along) if last > first else first // along)
            column_scale = parts["columnwise_scale_inv"].t()[touched]
        copy.set_scales(parts["rowwise_scale_inv"][first:last], column_scale)
    preserved = getattr(whole, "get_high_precision_init_val", lambda: None)()
    return Cell(copy, None if preserved is None else preserved[first:last])


use_shards(_shards_of)
