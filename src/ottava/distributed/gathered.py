"""`GatheredWeight`: the whole weight during forward and backward, made of the bytes that FSDP2 gathered.

`send` and `receive` are what FSDP2's two hooks do for every tensor that is gathered through a `WireCopy`: masters in high
precision (`ShardedWeight`) and weights that are stored in FP8 (`StoredShard`).

[Note: memory]
FSDP frees the gathered bytes and the "inner tensors" by emptying their storage, and fills the same tensors again before backward.
Autograd holds the columnwise copy meanwhile. So that copy is always the same tensor; where only rowwise bytes were gathered (1-D
blocks in forward) its storage stays empty, and backward's gather fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottava import torch_private
from ottava.distributed.block_grid import transposed
from ottava.distributed.wire_copy import BOTH, COLUMNWISE, PLAIN, ROWWISE, WireCopy
from ottava.quant.tensor import QuantizedTensor

aten = torch.ops.aten


class GatheredWeight(QuantizedTensor):
    """The whole weight as modules take it. FSDP views it once (`as_strided` to its own shape) and refills it before each use."""

    _copy: WireCopy
    _held: list[str]
    """[direction] whose bytes are gathered now; shared by all views."""

    @classmethod
    def of(cls, copy: WireCopy, parts: dict[str, Tensor], dtype: torch.dtype, held: list[str]) -> GatheredWeight:
        """The weight that `parts` are the buffers of, standing for a tensor of `dtype`."""
        weight: Any = cls(parts, copy.scheme, copy.shape, dtype)
        weight._copy, weight._held = copy, held
        if copy.joint.stack is not None:
            weight._part_of = (copy.joint.stack, copy.joint.copies.index(copy))
        return weight

    def _again(self) -> GatheredWeight:
        return GatheredWeight.of(self._copy, self._parts, self.dtype, self._held)

    def _get(self, name: str) -> Tensor | None:
        if name.startswith(ROWWISE) and self._held[0] == COLUMNWISE:
            raise ValueError(
                f"{self._copy.name} ({self.scheme}) is needed rowwise, but its columnwise bytes are gathered: they were, for backward. "
                "If its forward runs again in backward (activation checkpointing), name its module in shard_model(recomputed=...). "
                "Otherwise let FSDP reshard after backward: set_reshard_after_backward(True)."
            )
        return super()._get(name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._again()
        if func in (aten.as_strided.default, aten.view.default) and isinstance(args[0], cls):
            weight, size = args[:2]
            stride = tuple(args[2]) if func is aten.as_strided.default else weight.stride()
            if tuple(size) == tuple(weight.shape) and stride == weight.stride():
                return weight._again()
        return super().__torch_dispatch__(func, types, args, kwargs)


# ------------------------------------------------------------------------------------------------------- FSDP2's two hooks


def send(copy: WireCopy, device: torch.device) -> tuple[tuple[Tensor, ...], str]:
    """What this rank gives to the all-gather, and the direction that it is of."""
    direction = ROWWISE
    if copy.apart:
        direction = BOTH if copy.gathers_both else COLUMNWISE if torch_private.inside_backward() else ROWWISE
    return tuple(message.to(device) for message in copy.messages(direction)), direction


def send_plain(copy: WireCopy, master: Tensor, device: torch.device) -> tuple[tuple[Tensor, ...], str]:
    """The rows themselves, for a weight whose recipe is not known or quantizes nothing."""
    rows = master.to(device, copy.plain_dtype or master.dtype)
    return (pad(rows, (0, 0, 0, copy.padded_rows - rows.shape[0])).contiguous(),), PLAIN


def receive_plain(
    copy: WireCopy, outputs: Sequence[Tensor], out: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The whole weight in high precision: a view of what was gathered, which FSDP frees and refills."""
    return (outputs[0][: copy.shape[0]], ()) if out is None else None


def receive(
    copy: WireCopy, outputs: Sequence[Tensor], direction: str, dtype: torch.dtype, out: Tensor | None
) -> tuple[GatheredWeight, tuple[Tensor, ...]] | None:
    """The whole weight and its inner tensors, or nothing where `out` is the weight of an earlier all-gather to refill.

    It stands for a tensor of `dtype`, so that its gradient has that dtype as its neighbours' have.
    """
    if copy.world == 1:  # torch keeps only the first message then
        outputs = (outputs[0], *(message.to(outputs[0].device) for message in copy.messages(direction)[1:]))
    if out is None:
        held, inner = [direction], _allocate(copy, outputs[0].device)
        parts = _fill(copy, inner, outputs, direction)
        return GatheredWeight.of(copy, parts, dtype, held), tuple(_memory(copy, inner))
    weight: Any = out if isinstance(out, GatheredWeight) else torch_private.local_tensor(out)
    assert isinstance(weight, GatheredWeight)
    weight._held[0] = direction
    weight._parts.update(_fill(copy, weight._parts, outputs, direction))
    return None


def _memory(copy: WireCopy, inner: dict[str, Tensor]) -> list[Tensor]:
    """The tensors that own the memory of `inner`: parts of one matrix share it, and the first one owns it."""
    stack = copy.joint.stack
    if stack is None:
        return list(inner.values())
    shared = [stack.buffers[name] for name in inner if name in stack.buffers] if copy is copy.joint.copies[0] else []
    return shared + [tensor for name, tensor in inner.items() if name not in stack.buffers]


def _allocate(copy: WireCopy, device: torch.device) -> dict[str, Tensor]:
    """Memory for what is not simply a view of the gathered bytes: the columnwise copy, and the scales of 1-D blocks."""
    inner: dict[str, Tensor] = {}
    if copy.needs_columnwise:
        inner["columnwise_data"] = _joint_columns(copy, "columnwise_data", device)
    if not copy.scheme.transposable:
        assert copy.scheme.block is not None
        inner["rowwise_scale_inv"] = _scale_memory(
            copy, copy.shape[0], -(-copy.shape[1] // copy.scheme.block[1]), device
        )
    if copy.apart:
        inner["columnwise_scale_inv"] = _joint_columns(copy, "columnwise_scale_inv", device)
    return inner


def _joint_columns(copy: WireCopy, name: str, device: torch.device) -> Tensor:
    """[K, M] bytes or [K, ceil(M/B)] scales of this copy: its part of the memory that is made with the first of its joint."""
    rows = [part.shape[0] for part in copy.joint.copies]
    if name == "columnwise_data":
        packed = 2 if copy.scheme.format == "e2m1" else 1
        widths = [m // packed for m in rows]
    else:
        widths = [-(-m // copy.column_block[0]) for m in rows]
    stack, index = copy.joint.stack, copy.joint.copies.index(copy)
    if stack is None or index == 0:
        if name == "columnwise_data":
            whole = torch.empty(copy.shape[1], sum(widths), dtype=torch.uint8, device=device)
        else:
            whole = _scale_memory(copy, copy.shape[1], sum(widths), device)
        if stack is None:
            return whole
        stack.buffers[name] = whole
    left = sum(widths[:index])
    return stack.buffers[name][:, left : left + widths[index]]


def _scale_memory(copy: WireCopy, rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows, columns]; 1x128 scales lie with the row index fastest, as the block GEMM reads them."""
    if copy.scheme.kind == "block":
        return torch.empty(columns, rows, device=device).t()
    return torch.empty(rows, columns, dtype=torch.uint8, device=device)


def _fill(copy: WireCopy, inner: dict[str, Tensor], outputs: Sequence[Tensor], direction: str) -> dict[str, Tensor]:
    """The weight's buffers, of which those in `inner` are filled in place.

    `.data`: autograd holds these tensors for backward and must not take the refill for a change of their values.
    """
    parts = {"rowwise_data": outputs[0][: copy.shape[0]]}
    if copy.scheme.transposable:
        parts |= _known_scales(copy)
        if copy.needs_columnwise:
            parts["columnwise_data"] = inner["columnwise_data"]
            parts["columnwise_data"].data.copy_(transposed(parts["rowwise_data"], copy.scheme))
    else:
        parts |= {name: inner[name] for name in _APART if name in inner}
        _fill_apart(copy, parts, outputs, direction)
    if copy.scheme.kind == "nvfp4":
        parts["rowwise_amax"] = copy.joint.amax
        if copy.needs_columnwise:
            parts["columnwise_amax"] = copy.joint.amax
    if copy.joint.stack is not None:
        of_tensor = ("rowwise_scale_inv", "columnwise_scale_inv") if copy.scheme.block is None else ()
        shared = [name for name in ("rowwise_amax", "columnwise_amax", *of_tensor) if name in parts]
        copy.joint.stack.buffers.update({name: parts[name] for name in shared})
    return parts


_APART = ("rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def _fill_apart(copy: WireCopy, parts: dict[str, Tensor], outputs: Sequence[Tensor], direction: str) -> None:
    """1-D blocks: what was gathered, and empty memory for what was not."""
    scales = outputs[-1].view(copy.world, -1)
    if direction != COLUMNWISE:
        parts["rowwise_scale_inv"].data.copy_(copy.row_scales(scales))
    if direction != ROWWISE:
        columns = outputs[0 if direction == COLUMNWISE else 1][: copy.shape[0]]
        parts["columnwise_data"].data.copy_(transposed(columns, copy.scheme))
        parts["columnwise_scale_inv"].data.copy_(copy.column_scales(scales).t())
    if direction == COLUMNWISE:
        outputs[0].untyped_storage().resize_(
            0
        )  # nobody reads rowwise bytes now; FSDP gives the memory back when it gathers
    elif direction == ROWWISE and copy.needs_columnwise and copy is copy.joint.copies[-1]:
        parts["columnwise_data"].untyped_storage().resize_(
            0
        )  # parts of one matrix share this memory; FSDP gives it back


def _known_scales(copy: WireCopy) -> dict[str, Tensor]:
    """Scales that every rank has: of the tensor, or of square blocks."""
    if copy.scheme.block is None:
        parts = {"rowwise_scale_inv": copy.joint.scale_inv, "rowwise_amax": copy.joint.amax}
        return parts | ({"columnwise_scale_inv": copy.joint.scale_inv} if copy.needs_columnwise else {})
    parts = {"rowwise_scale_inv": copy.scale_inv}
    return parts | ({"columnwise_scale_inv": copy.scale_inv.t().contiguous()} if copy.needs_columnwise else {})
