"""`WireCopy`: the FP8 bytes of the rows that this rank holds of a weight, with scales that are those of the WHOLE weight.

"Whole" is what FSDP gathers: the weight, or with tensor parallelism this rank's tp part of it. One scale a tensor is shared more
widely, over all ranks that hold a part of the weight (dp_shard x tp).

[Note: what travels]
Whole tensors and square blocks have one set of bytes: the columnwise copy is the transpose. The rows' bytes are gathered; all
ranks know all scales after `renew_copies`.
1-D blocks (1x32, 1x128, 1x16) have two: rowwise bytes are gathered in forward and columnwise bytes in backward, one byte an
element each time, or both at once where a forward runs again in backward. Their scales are 1/32 of the data, so they travel with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ottava.distributed.block_grid import Block, amax_of_blocks, block_scales, each_element, encode
from ottava.quant.delayed import DelayedState
from ottava.quant.scaling import amax_of, scale_from_amax
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import Stack

ROWWISE, COLUMNWISE, BOTH = "rowwise", "columnwise", "both"
PLAIN = "plain"  # no bytes: high precision


class Joint:
    """Copies that are multiplied as one matrix: the parts of a weight that is split into several parameters, or one copy alone.

    They share the scale of the tensor, and the memory of their columnwise bytes.
    """

    def __init__(self, copies: list[WireCopy], delayed: DelayedState | None = None, column: int = 0) -> None:
        self.copies = copies
        self.delayed, self.column = delayed, column
        """Where delayed scaling keeps the scale: a column of `fwd_scale`. None for the other recipes."""
        self.amax = self.scale = self.scale_inv = torch.empty(0)
        """float32 [1], equal on all ranks that hold a part of the weight; empty where the scheme has none."""
        self.stack = Stack(tuple(copy.shape[0] for copy in copies), {}) if len(copies) > 1 else None

    def set_amax(self, amax: Tensor) -> None:
        """Takes the amax [1] of all parts on all ranks and makes the scale of the tensor."""
        scheme = self.copies[0].scheme
        self.amax = amax.clone()
        if scheme.block is not None:
            return
        if self.delayed is not None:
            self.scale = self.delayed.fwd_scale[self.column : self.column + 1].clone()
            self.delayed.fwd_amax_history[0, self.column] = amax[0]  # this step's entry, once a step
        else:
            self.scale = scale_from_amax(amax, scheme.element.max, scheme.epsilon, scheme.power_of_two)
        self.scale_inv = torch.ones_like(self.scale) / self.scale


class WireCopy:
    """See above. `bind` tells it where its rows lie, `renew_copies` fills it."""

    def __init__(self, name: str, scheme: Scheme | None, shape: tuple[int, int], needs_columnwise: bool = True) -> None:
        self.name, self.shape = name, shape
        self._scheme = scheme
        self.needs_columnwise = needs_columnwise
        """Whether backward multiplies by the columnwise copy. (Not if the recipe's `backward_override` dequantizes.)"""
        self.plain_dtype: torch.dtype | None = None
        """Type in which the weight is gathered while it has no scheme; None: the master's."""
        self.gathers_both = False
        """1-D blocks: gather both directions at once, because a forward runs again in backward or memory stays gathered."""
        self.joint = Joint([self])
        self.bind(0, 1)
        self.row_data: Tensor | None = None
        """uint8 [padded_rows, K] ([padded_rows, K/2] for E2M1)."""
        self.column_data = torch.empty(0)
        """1-D blocks: the same, quantized by blocks that lie along the rows."""
        self.scale_inv = torch.empty(0)
        """Square blocks: of the whole weight [ceil(M/B), ceil(K/B)], equal on all ranks."""
        self.row_scale = self.column_scale = torch.empty(0)
        """1-D blocks: the scales that this rank sends, rowwise [padded_rows, ceil(K/B)] and columnwise [slots, K]."""
        self._written = True
        self._seen: dict[int, int] = {}  # memory that holds the values the bytes were made from -> its version then

    def bind(
        self,
        rank: int,
        world: int,
        shard_group: Any = None,
        weight_group: Any = None,
        device_type: str | None = None,
    ) -> None:
        """rank of world: among those that hold different rows. weight_group: the ranks that share one scale a tensor.

        device_type: where the groups' collectives run, if not where the masters are (CPU offload).
        """
        self.world = world
        self.padded_rows = -(-self.shape[0] // world)  # as `torch.chunk` cuts
        self.start = min(rank * self.padded_rows, self.shape[0])
        self.shard_group, self.weight_group = shard_group, weight_group or shard_group
        self.device_type = device_type
        self._layout: dict[Any, Any] = {}  # what follows from the above and is asked for at every step

    @property
    def plain(self) -> bool:
        """No recipe is known yet, or it quantizes nothing: the weight is gathered in high precision."""
        return self._scheme is None

    @property
    def scheme(self) -> Scheme:
        """How the bytes are made."""
        assert self._scheme is not None
        return self._scheme

    def set_scheme(self, scheme: Scheme | None, needs_columnwise: bool) -> None:
        """Takes another scheme; `renew_copies` has to follow."""
        self._scheme, self.needs_columnwise = scheme, needs_columnwise
        self.row_data, self._written, self._layout = None, True, {}

    @property
    def apart(self) -> bool:
        """Rowwise and columnwise bytes differ and both are needed."""
        return not self.scheme.transposable and self.needs_columnwise

    @property
    def column_block(self) -> Block:
        """Block of the columnwise direction, in the orientation of the weight."""
        assert self.scheme.block is not None
        return self.scheme.block[::-1]

    # --------------------------------------------------------------------------------------------- are the bytes up to date?

    def fresh(self, master: Tensor) -> bool:
        """Whether the bytes are those of `master`'s values."""
        return not self._written and self._seen.get(_address(master)) == master._version

    def note_write(self) -> None:
        """The master's values change: the bytes are out of date."""
        self._written = True

    def note_same(self, master: Tensor) -> None:
        """`master` is other memory with the values that the bytes were made from."""
        self._seen[_address(master)] = master._version

    # ----------------------------------------------------------------------------------------------------- amax over ranks

    def tensor_amax(self, master: Tensor) -> Tensor:
        """What is MAX-reduced over the weight group: float32 [1], or nothing for blocks that need no scale of the tensor."""
        return amax_of(master) if self.scheme.kind in ("tensor", "nvfp4") else master.new_empty(0, dtype=torch.float32)

    def block_amax(self, master: Tensor) -> Tensor:
        """What is MAX-reduced over the shard group, flat float32 and of one length on all ranks.

        Square blocks: one number a block of the whole weight, 0 where this rank holds nothing of it. 1-D blocks: K numbers a
        columnwise block that a border between ranks cuts. E2M1: as much again, flags of blocks that have a NaN.
        """
        if self.scheme.block is None or not (self.scheme.transposable or self.needs_columnwise):
            return master.new_empty(0, dtype=torch.float32)
        grids = [self._to_reduce(master)]
        if self.scheme.kind == "nvfp4":
            grids.append(self._to_reduce(master.isnan().float()))
        return torch.cat([grid.flatten() for grid in grids])

    def cut_blocks(self) -> list[int]:
        """Columnwise blocks of which several ranks hold rows."""
        if "cut" not in self._layout:
            along = self.column_block[0]
            borders = range(self.padded_rows, self.shape[0], self.padded_rows)
            self._layout["cut"] = sorted({row // along for row in borders if row % along})
        return self._layout["cut"]

    def _own_cuts(self, count: int) -> tuple[slice, list[int]]:
        """Of `cut_blocks`, those among the `count` blocks that this rank touches: where in the list, and which of its blocks."""
        cut, first = self.cut_blocks(), self.start // self.column_block[0]
        chosen = slice(bisect_left(cut, first), bisect_left(cut, first + count))
        return chosen, [index - first for index in cut[chosen]]

    def _to_reduce(self, x: Tensor) -> Tensor:
        touched = amax_of_blocks(x, self.column_block, self.start)
        first = self.start // self.column_block[0]
        if self.scheme.transposable:
            out = torch.zeros(-(-self.shape[0] // self.column_block[0]), touched.shape[1], device=x.device)
            out[first : first + touched.shape[0]] = touched
            return out
        out = torch.zeros(len(self.cut_blocks()), touched.shape[1], device=x.device)
        chosen, own = self._own_cuts(touched.shape[0])
        out[chosen] = touched[own]
        return out

    # ---------------------------------------------------------------------------------------------------------- amax -> bytes

    def renew(self, master: Tensor, reduced: Tensor) -> None:
        """Makes bytes and scales from `master` and the reduced result of `block_amax`. The joint has its amax already.

        New memory each time: a backward that is still to come may hold the old scales.
        """
        if self.scheme.block is None:
            self.row_data = self._padded(encode(master, self.joint.scale, self.scheme))
        elif self.scheme.transposable:
            amax, has_nan = self._grids(reduced)
            factor, self.scale_inv = block_scales(amax, self.scheme, master.dtype, self.joint.amax, has_nan)
            first = self.start // self.scheme.block[0]
            each = each_element(factor[first:], self.scheme.block, master.shape, self.start)
            self.row_data = self._padded(encode(master, each, self.scheme))
        else:
            self._renew_apart(master, reduced)
        self._written, self._seen = False, {}
        self.note_same(master)

    def _padded(self, data: Tensor) -> Tensor:
        return pad(data, (0, 0, 0, self.padded_rows - data.shape[0]))

    def _grids(self, reduced: Tensor) -> tuple[Tensor, Tensor]:
        """(amax, NaN flags) from what `block_amax` concatenated."""
        across = -(-self.shape[1] // self.column_block[1])
        grids = reduced.view(-1, across).chunk(2) if self.scheme.kind == "nvfp4" else (reduced.view(-1, across),)
        return grids[0], grids[-1] if len(grids) > 1 else torch.zeros_like(grids[0])

    def _renew_apart(self, master: Tensor, reduced: Tensor) -> None:
        assert self.scheme.block is not None
        self.row_data, row_scale = self._one_way(master, self.scheme.block, None)
        column_scale = self.column_data = torch.empty(0)
        if self.needs_columnwise:
            self.column_data, column_scale = self._one_way(master, self.column_block, reduced)
        self.set_scales(row_scale, column_scale)

    def _one_way(self, master: Tensor, block: Block, reduced: Tensor | None) -> tuple[Tensor, Tensor]:
        """(bytes [padded_rows, K], scales of the blocks that the rows touch). reduced: amax of the blocks that borders cut."""
        amax = amax_of_blocks(master, block, self.start)
        has_nan = torch.zeros_like(amax)
        if self.scheme.kind == "nvfp4":
            has_nan = amax_of_blocks(master.isnan().float(), block, self.start)
        if reduced is not None and reduced.numel():
            chosen, own = self._own_cuts(amax.shape[0])
            cut_amax, cut_nan = self._grids(reduced)
            amax[own], has_nan[own] = cut_amax[chosen], cut_nan[chosen]
        factor, stored = block_scales(amax, self.scheme, master.dtype, self.joint.amax, has_nan)
        each = each_element(factor, block, master.shape, self.start)
        return self._padded(encode(master, each, self.scheme)), stored

    # ---------------------------------------------------------------------------------------------------- scales on the wire

    def _slots(self) -> int:
        """Columnwise blocks that one rank sends: those whose first row lies among its (padded) rows."""
        return -(-self.padded_rows // self.column_block[0])

    def _row_blocks(self) -> int:
        assert self.scheme.block is not None
        return -(-self.shape[1] // self.scheme.block[1])

    def set_scales(self, row_scale: Tensor, column_scale: Tensor) -> None:
        """1-D blocks: rowwise scales [m, ceil(K/B)] of the rows, columnwise ones [n, K] of all blocks that the rows touch."""
        self.row_scale = self._padded(row_scale)
        if self.needs_columnwise:
            # A first block that started before these rows is sent by the rank where it started.
            own = column_scale[1:] if self.start % self.column_block[0] else column_scale
            self.column_scale = pad(own, (0, 0, 0, self._slots() - own.shape[0]))

    def messages(self, direction: str) -> tuple[Tensor, ...]:
        """What this rank gives to the all-gather: bytes, and for 1-D blocks the bytes of their scales."""
        assert self.row_data is not None
        if self.scheme.transposable:
            return (self.row_data,)
        row, column = (scale.contiguous().view(torch.uint8).flatten() for scale in (self.row_scale, self.column_scale))
        if direction == BOTH:
            return self.row_data, self.column_data, torch.cat([row, column])
        data, scale = (self.row_data, row) if direction == ROWWISE else (self.column_data, column)
        # FSDP wants messages of one size in forward and backward.
        size = max(row.numel(), column.numel()) if self.needs_columnwise else row.numel()
        return data, pad(scale, (0, size - scale.numel()))

    def _scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.scheme.kind == "block" else torch.uint8

    def row_scales(self, message: Tensor) -> Tensor:
        """Gathered scale bytes [world, n] -> rowwise scales [M, ceil(K/B)]."""
        size = self.padded_rows * self._row_blocks() * self._scale_dtype().itemsize
        rows = message[:, :size].contiguous().view(self._scale_dtype())
        return rows.view(-1, self._row_blocks())[: self.shape[0]]

    def column_scales(self, message: Tensor) -> Tensor:
        """Gathered scale bytes [world, n] -> columnwise scales, one row a block: [ceil(M/B), K]."""
        size = self._slots() * self.shape[1] * self._scale_dtype().itemsize
        start = message.shape[1] - size if self.gathers_both else 0
        slots = message[:, start : start + size].contiguous().view(self._scale_dtype()).view(-1, self.shape[1])
        if slots.device not in self._layout:
            places = self._places()
            in_order = places == list(range(slots.shape[0]))
            self._layout[slots.device] = None if in_order else torch.tensor(places, device=slots.device)
        chosen = self._layout[slots.device]
        return slots if chosen is None else slots.index_select(0, chosen)

    def _places(self) -> list[int]:
        """Which of the gathered slots holds each columnwise block."""
        along, padded, slots = self.column_block[0], self.padded_rows, self._slots()
        places = []
        for row in range(0, self.shape[0], along):
            owner = row // padded
            places.append(owner * slots + row // along - -(-owner * padded // along))
        return places


def renew_copies(weights: Iterable[tuple[Tensor, WireCopy]]) -> None:
    """Renews every copy from its master. All ranks have to call it with the same weights in the same order.

    At most two MAX all-reduces: one number a weight over the ranks that hold a part of it, and the amax of blocks over those that
    hold different rows; one where these groups are the same, or where the recipe needs only one of them.
    """
    weights = [(master, copy) for master, copy in weights if not copy.plain]
    to_reduce: dict[Any, list[tuple[tuple[WireCopy, str], Tensor]]] = defaultdict(list)
    for master, copy in weights:
        to_reduce[copy.weight_group].append(((copy, "tensor"), copy.tensor_amax(master)))
        to_reduce[copy.shard_group].append(((copy, "block"), copy.block_amax(master)))
    reduced: dict[tuple[WireCopy, str], Tensor] = {}
    for group, parts in to_reduce.items():
        flat = torch.cat([amax for _, amax in parts])
        if flat.numel() and group is not None and dist.get_world_size(group) > 1:
            moved = flat.to(parts[0][0][0].device_type or flat.device)
            dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=group)
            flat = moved.to(flat.device)
        reduced.update(zip([key for key, _ in parts], flat.split([amax.numel() for _, amax in parts]), strict=True))
    for joint in {id(copy.joint): copy.joint for _, copy in weights}.values():
        amax = torch.stack([reduced[copy, "tensor"] for copy in joint.copies]).amax(dim=0)
        if amax.numel():
            joint.set_amax(amax)
    for master, copy in weights:
        copy.renew(master, reduced[copy, "block"])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
