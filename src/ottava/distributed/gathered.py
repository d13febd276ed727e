"""A weight that FSDP2 shards in high precision and gathers in FP8: the shard, its FP8 copy, and what comes out of the all-gather.

    ShardedWeight    the parameter: this rank's rows of the float32 (or bf16) master. An optimizer sees an ordinary tensor.
    Copy             beside it: the FP8 bytes of those rows and the scales of the FULL weight, renewed by `fsdp.refresh`
    GatheredWeight   the whole weight during forward and backward: a `QuantizedTensor` made of the gathered bytes

FSDP replaces and views the parameter's tensor object as it likes, on some ranks only where shards are uneven. So everything but
the master's values lives in the `Copy`, which all those objects share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottava import torch_private
from ottava.kernels.cast import NVFP4_SCALE_MAX, NVFP4_SCALE_MIN, nvfp4_tensor_scale, to_e2m1_codes, to_fp8_bytes
from ottava.quant.delayed import DelayedState
from ottava.quant.formats import NAN_BYTE
from ottava.quant.scaling import amax_of, scale_from_amax
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor

aten = torch.ops.aten


class GatheredWeight(QuantizedTensor):
    """The whole weight as modules take it. FSDP views it once (`as_strided` to its own shape) and refills it before each use."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._again()
        if func is aten.as_strided.default and isinstance(args[0], cls):
            weight, size, stride = args[:3]
            if tuple(size) == tuple(weight.shape) and tuple(stride) == tuple(weight.stride()):
                return weight._again()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _again(self) -> GatheredWeight:
        return GatheredWeight(self._parts, self.scheme, self.shape, self.dtype)  # type: ignore[return-value]

    def refill(self, parts: dict[str, Tensor]) -> None:
        """Takes the tensors of a new all-gather; autograd may hold the old ones, whose memory FSDP fills again."""
        self._parts.update(parts)


class Copy:
    """The FP8 copy of one sharded weight, and where the shard lies in the whole."""

    def __init__(self, name: str, scheme: Scheme, shape: tuple[int, int], delayed: DelayedState | None, column: int):
        self.name, self.scheme, self.shape = name, scheme, shape
        self.delayed, self.column = delayed, column
        """Where delayed scaling keeps this weight's scale: a column of `fwd_scale`. None for the other recipes."""
        self.joint: list[Copy] = [self]
        """The copies that share one scale: the parts of a weight that is split into several parameters."""
        self.offset: tuple[int, int] = (0, 0)
        self.padded_rows = shape[0]
        """Rows of every rank's all-gather input: those of the largest shard."""
        self.group: Any = None
        """Process group of the ranks that hold different rows."""
        self.data: Tensor | None = None
        """uint8 [padded_rows, K] ([padded_rows, K/2] for E2M1)."""
        self.scale_inv = self.amax = torch.empty(0)
        """Of the whole weight, equal on all ranks of the group."""
        self._written = True
        self._seen: dict[int, int] = {}  # memory that holds the values the bytes were made from -> its version then

    def fresh(self, master: Tensor) -> bool:
        """Whether the bytes are those of `master`'s values."""
        return not self._written and self._seen.get(_address(master)) == master._version

    def note_write(self) -> None:
        """The master's values change: the bytes are out of date."""
        self._written = True

    def note_same(self, master: Tensor) -> None:
        """`master` is other memory with the values that the bytes were made from."""
        self._seen[_address(master)] = master._version

    # ---------------------------------------------------------------------------------------------------- amax -> bytes

    def local_amax(self, master: Tensor) -> Tensor:
        """What has to be MAX-reduced over the group before `renew`, flat float32: the same length on every rank.

        One number a weight, or one a block of the whole weight's grid (0 where this rank holds nothing of the block); for E2M1
        also a flag a block that has a NaN.
        """
        if self.scheme.block is None:
            return amax_of(master)
        parts = [self._on_grid(master)]
        if self.scheme.kind == "nvfp4":
            parts.append(self._on_grid(master.isnan().float()))
        return torch.cat([p.flatten() for p in parts])

    def _grid(self) -> tuple[int, int]:
        assert self.scheme.block is not None
        return -(-self.shape[0] // self.scheme.block[0]), -(-self.shape[1] // self.scheme.block[1])

    def _on_grid(self, x: Tensor) -> Tensor:
        """max(|x|) of each block of the whole weight, of which x [m, K] lies at `offset`."""
        assert self.scheme.block is not None
        out = torch.zeros(self._grid(), device=x.device)
        if x.numel() == 0:
            return out
        (rows, columns), (top, left) = self.scheme.block, self.offset
        above, before = top % rows, left % columns  # of the first block, what other ranks hold
        below, after = -(above + x.shape[0]) % rows, -(before + x.shape[1]) % columns
        blocks = pad(x, (before, after, above, below)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        part = amax_of(blocks, dim=(1, 3))
        top, left = top // rows, left // columns
        out[top : top + part.shape[0], left : left + part.shape[1]] = part
        return out

    def renew(self, master: Tensor, reduced: Tensor) -> None:
        """Makes bytes and scales from `master` and the reduced result of `local_amax`."""
        if self.scheme.block is None:
            data = self._renew_whole(master, reduced)
        elif self.scheme.kind == "nvfp4":
            data = self._renew_nvfp4(master, reduced)
        else:
            data = self._renew_blocks(master, reduced)
        # New memory each time: a backward that is still to come may hold the old scales.
        self.data = pad(data, (0, 0, 0, self.padded_rows - data.shape[0]))
        self._written, self._seen = False, {}
        self.note_same(master)

    def _renew_whole(self, master: Tensor, amax: Tensor) -> Tensor:
        if self.delayed is not None:
            scale = self.delayed.fwd_scale[self.column : self.column + 1].clone()
            self.delayed.fwd_amax_history[0, self.column] = amax[0]  # this step's entry, once a step
        else:
            scale = scale_from_amax(amax, self.scheme.element.max, self.scheme.epsilon, self.scheme.power_of_two)
        self.scale_inv, self.amax = torch.ones_like(scale) / scale, amax.clone()
        return to_fp8_bytes(master.float() * scale, self.scheme.element)

    def _renew_blocks(self, master: Tensor, amax: Tensor) -> Tensor:
        largest = torch.finfo(master.dtype).max
        scale = scale_from_amax(
            amax.view(self._grid()), self.scheme.element.max, self.scheme.epsilon, self.scheme.power_of_two, largest
        )
        self.scale_inv = torch.ones_like(scale) / scale
        return to_fp8_bytes(master.float() * self._each(scale, master), self.scheme.element)

    def _renew_nvfp4(self, master: Tensor, reduced: Tensor) -> Tensor:
        block_amax, has_nan = (part.view(self._grid()) for part in reduced.chunk(2))
        self.amax = block_amax.max().reshape(1)
        tensor_scale = nvfp4_tensor_scale(self.amax)
        block_scale = (block_amax / torch.full_like(block_amax, 6.0)) / tensor_scale
        block_scale = block_scale.clamp(NVFP4_SCALE_MIN, NVFP4_SCALE_MAX).to(torch.float8_e4m3fn)
        inverse = (torch.ones_like(tensor_scale) / tensor_scale) / block_scale.float()
        self.scale_inv = block_scale.view(torch.uint8).masked_fill(has_nan > 0, NAN_BYTE["e4m3"])
        codes = to_e2m1_codes((master.float() * self._each(inverse, master)).clamp(-6.0, 6.0), stochastic=False)
        return codes[:, 0::2] | (codes[:, 1::2] << 4)

    def _each(self, of_blocks: Tensor, master: Tensor) -> Tensor:
        """The number of its block for every element of the shard."""
        assert self.scheme.block is not None
        indices = [
            torch.arange(start, start + size, device=master.device) // block
            for start, size, block in zip(self.offset, master.shape, self.scheme.block, strict=True)
        ]
        return of_blocks[indices[0]][:, indices[1]]

    # ------------------------------------------------------------------------------------------------------ bytes -> weight

    def parts(self, gathered: Tensor, columnwise: Tensor) -> dict[str, Tensor]:
        """Buffers of the whole weight from the gathered rows (with padding) and the transposed copy."""
        row, of_tensor = gathered[: self.shape[0]], self.scheme.block is None
        parts = {"rowwise_data": row, "rowwise_scale_inv": self.scale_inv, "columnwise_data": columnwise}
        parts["columnwise_scale_inv"] = self.scale_inv if of_tensor else self.scale_inv.t().contiguous()
        if self.amax.numel():
            parts["rowwise_amax"] = self.amax
            if not of_tensor:
                parts["columnwise_amax"] = self.amax
        return parts

    def transposed(self, gathered: Tensor) -> Tensor:
        """The columnwise bytes [K, M] ([K, M/2] for E2M1), as a view where that is possible."""
        row = gathered[: self.shape[0]]
        if self.scheme.format != "e2m1":
            return row.t()
        codes = torch.stack([row & 0xF, row >> 4], dim=-1).flatten(1).t()
        return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
    copy: Copy

    @staticmethod
    def __new__(cls, master: Tensor, copy: Copy) -> ShardedWeight:
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
        return f"ShardedWeight({self.copy.name!r}, {self.master!r}, gathered as {self.copy.scheme})"

    def __tensor_flatten__(self) -> tuple[list[str], Copy]:
        return ["master"], self.copy

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Copy, size: Any, stride: Any) -> ShardedWeight:
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

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """The bytes of this rank's rows. (One argument besides self: torch then allows shards of different sizes.)"""
        if self.copy.data is None or not self.copy.fresh(self.master):
            what = "has no FP8 copy yet" if self.copy.data is None else "has changed since its FP8 copy was made"
            raise ValueError(
                f"{self.copy.name} {what}: call ottava.distributed.fsdp.refresh(model) after loading or initializing "
                "weights, and attach(optimizer, model) once, so that every optimizer step renews the copies."
            )
        return (self.copy.data.to(self.device),), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The whole weight, standing for a tensor of `param_dtype`, so that its gradient has that dtype as its neighbours' have.

        The transposed bytes lie in memory of their own, which FSDP frees with the gathered bytes and gives back before backward.
        """
        (gathered,) = outputs
        if out is None:
            columnwise = self.copy.transposed(gathered).clone(memory_format=torch.contiguous_format)
            parts = self.copy.parts(gathered, columnwise)
            weight = GatheredWeight(parts, self.copy.scheme, self.copy.shape, param_dtype)
            return weight, (columnwise,)
        assert isinstance(out, GatheredWeight)
        columnwise = out._parts["columnwise_data"]
        # .data: autograd holds this tensor for backward and must not take the refill for a change of its values.
        columnwise.data.copy_(self.copy.transposed(gathered))
        out.refill(self.copy.parts(gathered, columnwise))
        return None


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
