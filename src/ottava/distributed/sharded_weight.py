"""`ShardedWeight`: a parameter that FSDP2 shards in high precision and gathers in FP8.

It is this rank's rows of the float32 (or bf16) master, and an optimizer sees an ordinary tensor. FSDP replaces and views the
parameter's tensor object as it likes, on some ranks only where shards are uneven. So everything but the master's values lives in the
`WireCopy`, which all those objects share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.distributed.gathered import receive, receive_plain, send, send_plain
from ottava.distributed.wire_copy import PLAIN, WireCopy

aten = torch.ops.aten

# What FSDP and Module.to_empty do to a parameter and need a ShardedWeight back from. All else gives plain tensors.
_KEEPS_KIND = {
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}
_COPIES_VALUES = {aten._pin_memory.default, aten._to_copy.default}


class ShardedWeight(torch.Tensor):
    """A high-precision tensor that FSDP2 gathers through its `copy` instead. Every other op works on the values."""

    master: Tensor
    copy: WireCopy

    @staticmethod
    def __new__(cls, master: Tensor, copy: WireCopy) -> ShardedWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            master.shape,
            strides=master.stride(),
            storage_offset=master.storage_offset(),
            dtype=master.dtype,
            device=master.device,
        )
        self.master, self.copy = master, copy
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    __torch_function__ = torch_private.DISABLED_TORCH_FUNCTION  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.copy.name!r}, {self.master!r}, gathered as {'it is' if self.copy.plain else self.copy.scheme})"

    def __tensor_flatten__(self) -> tuple[list[str], WireCopy]:
        return ["master"], self.copy

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: WireCopy, size: Any, stride: Any) -> ShardedWeight:
        return ShardedWeight(inner["master"], meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        plain_args, plain_kwargs = torch_private.map_instances(cls, lambda t: t.master, (args, kwargs))
        if func is aten.copy_.default and isinstance(args[0], cls) and isinstance(args[1], cls):
            target, source = args[:2]
            same = target.copy is source.copy and source.copy.fresh(source.master)
            func(*plain_args, **plain_kwargs)
            if same:  # FSDP moves the shard into padded memory
                target.copy.note_same(target.master)
            else:
                target.copy.note_write()
            return target
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            return _after_write(func, args, kwargs, result)
        first = args[0] if args and isinstance(args[0], cls) else None
        if func not in _KEEPS_KIND or first is None:
            return result
        if isinstance(result, Tensor) and result.dtype != first.dtype:
            return result
        if func in _COPIES_VALUES and first.copy.fresh(first.master):
            first.copy.note_same(result)
        return torch_private.map_instances(Tensor, lambda t: ShardedWeight(t, first.copy), result)

    # ------------------------------------------------------------------------------------------------------ FSDP2's hooks

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], str]:
        """The bytes of this rank's rows. (One argument besides self: torch then allows shards of different sizes.)"""
        if self.copy.plain:
            return send_plain(self.copy, self.master, self.device)
        if self.copy.row_data is None or not self.copy.fresh(self.master):
            what = "has no FP8 copy yet" if self.copy.row_data is None else "has changed since its FP8 copy was made"
            raise ValueError(
                f"{self.copy.name} {what}: call ottava.distributed.refresh(model) after loading, initializing or changing weights by "
                "hand. If the model is not called through its own forward, attach(optimizer, model) renews them after each step."
            )
        return send(self.copy, self.device)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], direction: str, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The whole weight (`gathered.py`)."""
        if direction == PLAIN:
            return receive_plain(self.copy, outputs, out)
        return receive(self.copy, outputs, direction, param_dtype, out)


def _after_write(func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
    """Marks the copies of what the op has written, and returns what the op returns."""
    returned = result
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, ShardedWeight):
                tensor.copy.note_write()
                returned = tensor if isinstance(result, Tensor) and result is tensor.master else returned
    return returned
