"""`WeightMemory`: the bytes and scales that a rank holds of a weight.

They are those of the matrix that one process would hold: `weight_place` says where they lie in it ([Note: one matrix]) and which scales a
rank has ([Note: extent of scales]). What all parameters of the matrix share, its `ScaleGroup` has.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottava import torch_private
from ottava.quant.scale_group import ScaleGroup
from ottava.quant.scheme import Scheme
from ottava.quant.weight_place import Block, Box, Extent, Place, blocks_of, count_blocks, extent_of, grid_step, within
from ottava.recipe import Recipe

ROWWISE, COLUMNWISE = "rowwise", "columnwise"
TENSOR_NAMES = (
    *(f"{direction}_{kind}" for direction in (ROWWISE, COLUMNWISE) for kind in ("bytes", "scales", "grid")),
    "tensor_amax",
    "tensor_scale_inv",
)
"""Of the tensors that a stored weight is made of, as torch.compile asks for them: see `WeightMemory.named_tensors`."""
Groups = tuple[Any, ...]
"""Process groups over which something is reduced one after the other."""


def written_over(old: Sequence[Tensor | None], new: Sequence[Tensor]) -> list[Tensor]:
    """The values of `new`, in the memory of `old` where there is some of the same kind: a CUDA graph reads addresses, always the same ones.

    Where there is none, `new` itself.
    """
    found, targets, sources = [], [], []
    for before, value in zip(old, new, strict=True):
        if before is None or not _same_kind(before, value):
            found.append(value)
            continue
        found.append(before)
        if before is not value and before.data_ptr() != value.data_ptr():
            targets.append(before)
            sources.append(value)
    if targets:
        torch_private.copy_all(targets, sources)
    return found


def _same_kind(old: Tensor, new: Tensor) -> bool:
    """Whether values of `new` can take the place of those of `old`."""
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device or old.is_meta:
        return False
    return old.stride() == new.stride() and not old.is_inference() and not torch_private.is_fake(new)


class WeightMemory:
    """See above. All views of a parameter share it; `weight_renew.renew` fills it."""

    def __init__(self, name: str, place: Place, group: ScaleGroup) -> None:
        self.name, self.place = name, place
        self.group = group
        self.join(group)
        self.data: dict[str, Tensor] = {}
        """By direction, uint8 [padded, columns] (E2M1: [padded, columns/2]); columnwise bytes, where they differ, are not transposed."""
        self._scales: dict[str, Tensor] = {}
        self.recipe: Recipe | None = None
        """What `quantized_model_init` was given, where it made the weight."""
        self.preserves = False
        self.preserved: Tensor | None = None
        """The rows before they were first quantized, where `quantized_model_init(preserve_high_precision_init_val=True)` kept them."""
        self.given: tuple[Tensor, int] | None = None
        """What the bytes were made from, and their version then, while other parts of the matrix have not got theirs (`keep_given`)."""
        self.tensor_groups: Groups = ()
        """Tensor-parallel ranks among which the parameter is split."""
        self.shard_groups: Groups = ()
        """Ranks among which FSDP shares the unit."""
        self.weight_group: Any = None
        """All ranks that hold a part of the parameter, where somebody has said so; else the two above, one after the other."""
        self.shards: weakref.WeakSet[WeightMemory] = weakref.WeakSet()
        """What FSDP has cut from it."""
        self.device_type: str | None = None
        """Where collectives run, if not where the values are (CPU offload)."""
        self.gather_dtype: torch.dtype | None = None
        """Type in which the weight is gathered while it has no scheme; None: the master's."""
        self.made_from: dict[int, int] = {}
        """Where there is a master: address of memory that holds the values the bytes were made from -> its version then."""
        self.without_scales = False
        """Somebody has written bytes, and their scales have not come yet: `load_state_dict` brings them."""
        self.rows_first = False
        """Somebody reads bytes and scales as rows of the matrix: see `lay_rows_first`."""
        self.gathers_both = False
        """Where directions differ: gather both at once, because a forward runs again in backward or memory stays gathered."""

    # ------------------------------------------------------------------------------------------------------------- geometry

    @property
    def scheme(self) -> Scheme:
        """How the bytes are made."""
        assert self.group.scheme is not None
        return self.group.scheme

    @property
    def quantized(self) -> bool:
        """Whether a recipe says how bytes are made."""
        return self.group.scheme is not None

    @property
    def two_copies(self) -> bool:
        """Rowwise and columnwise bytes differ and both are needed."""
        return self.group.keeps_columnwise

    @property
    def directions(self) -> tuple[str, ...]:
        """Those that have bytes of their own."""
        return (ROWWISE, COLUMNWISE) if self.two_copies else (ROWWISE,)

    def along(self, direction: str) -> Scheme:
        """How the bytes of one direction are made."""
        return self.scheme.along(direction)

    def block(self, direction: str) -> Block:
        """Rows and columns of the matrix that share a scale."""
        block = self.along(direction).block
        assert block is not None
        return block if direction == ROWWISE else block[::-1]

    def has_blocks(self, direction: str) -> bool:
        """Whether blocks have scales of their own, not the tensor one scale."""
        return self.along(direction).block is not None

    def extent(self, direction: str) -> Extent:
        """[Note: extent of scales]"""
        return self._extent(direction, [part.place for part in self.group.parts])

    def _extent(self, direction: str, places: Sequence[Place]) -> Extent:
        if not self.has_blocks(direction):
            return Extent.MATRIX
        return extent_of(self.along(direction), self.block(direction), places)

    def box_of_scales(self, direction: str) -> Box:
        """The box of the matrix whose scales are here."""
        return self.place.box(self.extent(direction))

    def scales(self, direction: str) -> Tensor:
        """One number a block of the extent, as rows and columns of the matrix; not for a scale of the tensor."""
        return (self.group.grids if self.extent(direction) is Extent.MATRIX else self._scales)[direction]

    def held_scales(self, direction: str) -> Tensor | None:
        """`scales`, or None where there are none yet."""
        return (self.group.grids if self.extent(direction) is Extent.MATRIX else self._scales).get(direction)

    def set_scales(self, direction: str, scales: Tensor, extent: Extent | None = None) -> None:
        """Those of the matrix belong to all its parts."""
        matrix = (extent or self.extent(direction)) is Extent.MATRIX
        (self.group.grids if matrix else self._scales)[direction] = scales

    @property
    def shares_scales(self) -> bool:
        """Whether scales depend on other parts of the matrix, too."""
        if len(self.group.parts) == 1 or not self.quantized:
            return False
        return self.scheme.needs_tensor_amax or any(self.extent(d) is Extent.MATRIX for d in self.directions)

    @property
    def weight_groups(self) -> Groups:
        """The ranks that hold parts of the matrix."""
        return self.tensor_groups + self.shard_groups if self.weight_group is None else (self.weight_group,)

    def bind(self, shard_groups: Groups, device_type: str | None = None) -> None:
        """Tells with whom FSDP shares the unit."""
        self.shard_groups, self.device_type = shard_groups, device_type

    def place_on(self, mesh: Any, placements: Sequence[Any]) -> None:
        """What was taken for a whole parameter is this rank's box of a DTensor on a tensor-parallel mesh."""
        for i, placement in enumerate(placements):
            if mesh.size(i) > 1 and not placement.is_replicate():
                self.place = self.place.enlarged(placement.dim, mesh.get_local_rank(i), mesh.size(i))
                self.tensor_groups += (mesh.get_group(i),)

    def check_bound(self) -> None:
        """Raises if it is not known which ranks have to reduce their amax."""
        if self.place.world > 1 and not self.shard_groups:
            raise ValueError(
                f"{self.name} does not know yet with which ranks it shares its scales: call set_device_mesh(tp_mesh, weight_mesh) before "
                "fully_shard and reset_parameters() after it, run a forward pass first, or use ottava.distributed.shard_model."
            )

    def check_scales(self) -> None:
        """Raises if the scales that are here are not those of the bytes."""
        if self.without_scales:
            raise ValueError(
                f"{self.name} is stored in FP8, and uint8 values were copied into it: they were taken for its bytes, whose scales have not "
                "been loaded. Load a whole state dict (NAME and NAME_scale_inv ...), or copy high-precision values."
            )

    # --------------------------------------------------------------------------------------------------------------- memory

    def allocate(self, device: torch.device | str) -> None:
        """Memory of the right shapes, without values."""
        place, scheme = self.place, self.scheme
        for direction in self.directions:
            own = self.along(direction)
            width = place.unit[1] // own.elements_per_byte
            self.data[direction] = torch.zeros(place.padded, width, dtype=torch.uint8, device=device)
            if self.has_blocks(direction):
                shape = count_blocks(blocks_of(self.box_of_scales(direction), self.block(direction)))
                self.set_scales(direction, torch.zeros(shape, dtype=own.scale_dtype, device=device))
        group = self.group
        if scheme.needs_tensor_amax:
            group.amax = torch.zeros(1, dtype=torch.float32, device=device)
        if scheme.of_tensor is not None:
            group.scale, group.scale_inv = (torch.ones(1, dtype=torch.float32, device=device) for _ in range(2))

    def room_for(self, direction: str, device: torch.device) -> Tensor:
        """Where bytes of the rows that are held are to be written: over the old ones, or into new memory."""
        place = self.place
        shape = place.padded, place.unit[1] // self.along(direction).elements_per_byte
        held = self.data.get(direction)
        if held is None or held.shape != shape or held.device != device or held.is_inference():
            held = self.data[direction] = torch.zeros(shape, dtype=torch.uint8, device=device)
        return held[: place.rows]

    def lay_rows_first(self) -> None:
        """Bytes and scales become memory in which the matrix's rows follow one another, as files want them, and stay so.

        Columnwise bytes of a whole weight are a view of the transposed ones that a GEMM takes, until somebody asks for a state dict: its
        entries are to be the weight's own memory, too, so from then on these are two.
        """
        self.rows_first = True
        for direction, data in self.data.items():
            self.data[direction] = data.contiguous()
        for held in (self._scales, self.group.grids):
            held.update({direction: scale.contiguous() for direction, scale in held.items()})

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        shared = [t for t in (self.group.amax, self.group.scale_inv) if t.numel()]
        return [*self.data.values(), *self._scales.values(), *self.group.grids.values(), *shared]

    def named_tensors(self) -> dict[str, Tensor]:
        """All that it holds, by `TENSOR_NAMES`."""
        found = {f"{direction}_bytes": t for direction, t in self.data.items()}
        found |= {f"{direction}_scales": t for direction, t in self._scales.items()}
        found |= {f"{direction}_grid": t for direction, t in self.group.grids.items()}
        found |= {"tensor_amax": self.group.amax, "tensor_scale_inv": self.group.scale_inv}
        return {name: t for name, t in found.items() if t.numel()}

    def set_tensors(self, named: Mapping[str, Tensor]) -> None:
        """The inverse of `named_tensors`."""
        for direction in (ROWWISE, COLUMNWISE):
            for kind, target in (("bytes", self.data), ("scales", self._scales), ("grid", self.group.grids)):
                if f"{direction}_{kind}" in named:
                    target[direction] = named[f"{direction}_{kind}"]
        self.group.amax = named.get("tensor_amax", self.group.amax)
        self.group.scale_inv = named.get("tensor_scale_inv", self.group.scale_inv)

    def map(self, function: Callable[[Tensor], Tensor]) -> WeightMemory:
        """The same weight in other memory, alone in its group: the module that holds the parts joins them again."""
        other = WeightMemory(self.name, self.place, self.group.map(function))
        self._hand_over(other)
        other.data = {key: function(t) for key, t in self.data.items()}
        other._scales = {key: function(t) for key, t in self._scales.items()}
        return other

    def _hand_over(self, other: WeightMemory) -> None:
        other.recipe, other.preserves, other.preserved = self.recipe, self.preserves, self.preserved
        other.weight_group, other.device_type = self.weight_group, self.device_type
        other.tensor_groups, other.shard_groups = self.tensor_groups, self.shard_groups
        other.gather_dtype, other.gathers_both = self.gather_dtype, self.gathers_both

    def join(self, group: ScaleGroup) -> None:
        """Becomes a part of `group`."""
        self.group.parts = [part for part in self.group.parts if part is not self]
        self.group = group
        group.parts = sorted([*group.parts, self], key=lambda part: part.place.part[0])

    def copy_from(self, other: WeightMemory) -> None:
        """Takes bytes and scales of the same box of the same kind of weight."""
        if (self.scheme, self.place) != (other.scheme, other.place):
            raise ValueError(
                f"copy_ needs the same box of a weight in the same scheme: {self.name} is {self.place} in {self.scheme}, the source "
                f"{other.place} in {other.scheme}."
            )
        device = next(iter(self.data.values())).device
        self.data = {key: t.to(device, copy=True) for key, t in other.data.items()}
        self._scales = {key: t.to(device, copy=True) for key, t in other._scales.items()}
        self.group.grids = {key: t.to(device, copy=True) for key, t in other.group.grids.items()}
        for name in ("amax", "scale", "scale_inv"):
            setattr(self.group, name, getattr(other.group, name).to(device, copy=True))
        self.preserved, self.without_scales = None, other.without_scales

    def take_bytes(self, data: Tensor) -> None:
        """Rowwise bytes of the rows that are held, whose scales are still to come."""
        self.data[ROWWISE][: self.place.rows].copy_(data)
        self.preserved, self.without_scales = None, True

    def keep_given(self, values: Tensor) -> None:
        """Keeps values until all parts of the matrix were given theirs."""
        self.given = (values.clone(), self._bytes_version())
        if all(part.given is not None for part in self.group.parts):
            for part in self.group.parts:
                part.given = None

    def given_values(self) -> Tensor:
        """The rows that are held [rows, columns]: as they were given, if the bytes are still those, else dequantized."""
        self.check_given()
        return self.values(torch.float32) if self.given is None else self.given[0]

    def check_given(self) -> None:
        """Forgets what was given if somebody has written other bytes since."""
        if self.given is not None and self.given[1] != self._bytes_version():
            self.given = None

    def bytes_follow_given(self) -> None:
        """The bytes were written from what was given, or moved."""
        if self.given is not None:
            self.given = (self.given[0], self._bytes_version())

    def _bytes_version(self) -> int:
        held = self.data[ROWWISE]
        return 0 if held.is_inference() else held._version

    def keep_first_values(self, values: Tensor | None) -> None:
        """Keeps what was quantized first, on the CPU."""
        self.preserves, self.preserved = True, values

    def forget_first_values(self) -> None:
        """Frees what `preserved` holds."""
        self.preserved = None

    def drop_columnwise(self) -> None:
        """Frees the columnwise copies of the matrix, which only a backward pass needs."""
        self.group.needs_columnwise = False
        for part in self.group.parts:
            part.data.pop(COLUMNWISE, None)
            part._scales.pop(COLUMNWISE, None)
        self.group.grids.pop(COLUMNWISE, None)
        self.group.operands = None

    def forget_bytes(self) -> None:
        """Another scheme: what was made before means nothing now."""
        self.data, self._scales, self.made_from, self.group.grids = {}, {}, {}, {}

    def bytes_were_loaded(self) -> None:
        """Somebody has written into the bytes and scales: what follows from them is made anew, and the first values are forgotten."""
        self.preserved, self.without_scales = None, False
        if self.scheme.of_tensor is not None:
            self.group.scale = torch.ones_like(self.group.scale_inv) / self.group.scale_inv

    # ------------------------------------------------------------------------------------------------------------ cutting up

    def part(self, place: Place, key: Any, places: Sequence[Place] | None = None) -> WeightMemory:
        """The box `place` of this weight, which lies inside the one that is held here: bytes and scales are cut.

        key: names the way of cutting, equal for all parts of the matrix. places: those of all parts after cutting, if not all parts are
        cut alike.
        """
        other = WeightMemory(self.name, place, self.group.cut(key))
        self._hand_over(other)
        if not self.quantized or not self.data:
            return other
        places = places or [part.place.cut_like(self.place, place) for part in self.group.parts]
        first, left = place.top - self.place.top, place.left - self.place.left
        for direction in self.directions:
            packed = self.along(direction).elements_per_byte
            held = self.data[direction][first : first + place.rows]
            held = held[:, left // packed : (left + place.unit[1]) // packed]
            other.data[direction] = pad(held, (0, 0, 0, place.padded - place.rows)).clone(
                memory_format=torch.contiguous_format
            )
            if self.has_blocks(direction):
                extent = self._extent(direction, places)
                other.set_scales(direction, self._cut_scales(direction, place.box(extent)), extent)
        if self.preserved is not None:
            other.preserved = self.preserved[first : first + place.rows, left : left + place.unit[1]]
        return other

    def _cut_scales(self, direction: str, box: Box) -> Tensor:
        """Scales of the blocks that a box touches: this parameter's, and those of others that hold rows of the matrix."""
        block = self.block(direction)
        wanted = blocks_of(box, block)
        down, across = count_blocks(wanted)
        found, covered = self.scales(direction).new_empty(down, across), 0
        whole = self.extent(direction) is Extent.MATRIX
        for part in [self] if whole else self.group.parts:
            held = blocks_of(part.box_of_scales(direction), block)
            rows, columns = (slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted, held))
            shared = rows, columns
            if all(s.stop > s.start for s in shared):
                found[within(shared, wanted)] = part.scales(direction)[within(shared, held)]
                covered += math.prod(s.stop - s.start for s in shared)
        if covered != down * across:
            raise ValueError(
                f"{self.name}: new borders cut blocks of {block[0]}x{block[1]} whose scales are on other ranks: split the weight before "
                "it is quantized (on the meta device), or choose sizes that fill blocks."
            )
        return found

    # ------------------------------------------------------------------------------------------------------- what a GEMM takes

    def scale_inv(self, direction: str, box: Box, step: Block | None = None) -> Tensor:
        """Scales of a box of the matrix on a grid that begins with the box.

        Where blocks begin elsewhere the grid is finer, so that every number of it lies in one block: its block follows from its
        shape (`kernels.cast.block_of`). step: a block to use instead.
        """
        if not self.has_blocks(direction):
            return self.group.scale_inv
        block, (top, left, rows, columns) = self.block(direction), box
        scale, outer = self.scales(direction), blocks_of(self.box_of_scales(direction), block)
        r, c = step or grid_step(block, [box])

        def index(start: int, size: int, block: int, step: int, first: int) -> Tensor | slice:
            if step == block:
                return slice(start // block - first, -(-(start + size) // block) - first)
            return torch.arange(start, start + size, step, device=scale.device) // block - first

        down = index(top, rows, block[0], r, outer[0].start)
        return scale[down][:, index(left, columns, block[1], c, outer[1].start)]

    def held_parts(self, rows: int) -> dict[str, Tensor]:
        """Rowwise bytes and scales of the first `rows` rows, and the amax."""
        place = self.place
        parts = {
            "rowwise_data": self.data[ROWWISE][:rows],
            "rowwise_scale_inv": self.scale_inv(ROWWISE, (place.top, place.left, rows, place.unit[1])),
        }
        return parts | ({"rowwise_amax": self.group.amax} if self.group.amax.numel() else {})

    def values(self, dtype: torch.dtype) -> Tensor:
        """The rows that are held [rows, columns], dequantized."""
        self.check_scales()
        parts = self.held_parts(self.place.rows)
        amax = parts.get("rowwise_amax", self.group.amax)
        operand = parts["rowwise_data"], parts["rowwise_scale_inv"], amax
        return torch.ops.ottava.dequantize(*operand, str(self.along(ROWWISE)), dtype)
