"""Where the memory of a parameter lies in the parameter that one process would hold.

FSDP2, HSDP, x TP     a DTensor says it
DDP, x TP             a plain tensor: the whole, or the part that the module's `layouts` and `tp_rank` say
FSDP1, x TP           a stretch of the flattened tensor: up to three boxes of a matrix

Weights that are stored in FP8 (`quantized_model_init`) are entries of bytes and scales:

NAME.rowwise_data            uint8 [M, K]; E2M1: [M, K/2]
NAME.rowwise_scale_inv       [1], or one a block: [ceil(M/B), ceil(K/B)], [M, ceil(K/B)]
NAME.rowwise_amax            [1], where the scheme keeps it
NAME.format                  uint8 [24]: element format and block as text, padded with zeros
NAME.columnwise_data         uint8 [K, M], and
NAME.columnwise_scale_inv    [K, ceil(M/B)] or [1]: 1-D blocks, two ways; elsewhere the columnwise copy is the transpose
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ottava import torch_private
from ottava.checkpoint.boxes import Box, Former, Index, Part
from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead
from ottava.distributed.whole import layout_of, modules_of
from ottava.kernels.block_moment import scale_shape, scales_at
from ottava.quant.weight import Weight
from ottava.quant.weight_memory import COLUMNWISE, WeightMemory
from ottava.quant.weight_place import blocks_of


@dataclass(frozen=True)
class Fused:
    """The parameter under the name of a matrix that it holds rows of, as checkpoints before 0.2 have it."""

    name: str
    first: int
    """Row at which the parameter begins."""
    rows: int
    """Of the matrix."""


@dataclass(frozen=True)
class Placed:
    """A parameter, and where this rank's memory of it lies."""

    name: str
    """As in one process."""
    parameter: nn.Parameter
    local: Tensor
    """What this rank holds: a plain tensor, or a stored Weight. Of FSDP1 a flat one."""
    shape: Index
    """Of the whole parameter."""
    boxes: tuple[Box, ...]
    """Of `local`: several if it is flat."""
    fused: Fused | None

    def part(self, tensor: Tensor, key: str = "") -> Part:
        """`tensor` has the place of the parameter. key: what its name in the state ends with, after the parameter's."""
        views, at = [], 0
        flat = len(self.boxes) != 1 or tuple(tensor.shape) != self.boxes[0][1]
        for offset, shape in self.boxes:
            count = math.prod(shape)
            views.append((offset, tensor[at : at + count].view(shape) if flat else tensor))
            at += count
        return Part(self.shape, tensor.dtype, tuple(views), former=self._former(key, self.shape))

    def _former(self, key: str, shape: Index, first: int | None = None, rows: int | None = None) -> Former | None:
        """Where a checkpoint under the fused name has an entry of `shape`; first, rows: in units of the entry's own rows."""
        if self.fused is None:
            return None
        first = self.fused.first if first is None else first
        rows = self.fused.rows if rows is None else rows
        return Former(f"{self.fused.name}{key}", (first, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))

    def entry(self) -> Any:
        """For the state's "model"."""
        if isinstance(self.local, Weight) and self.local.stored_quantized:
            return self._stored(self.local.memory)
        return self.part(
            self.local.master if isinstance(self.local, Weight) and self.local.master is not None else self.local
        )

    def state_entry(self, key: str, value: Any) -> Any:
        """For a value of the optimizer's state of this parameter."""
        if not isinstance(value, Tensor):
            return value
        local = torch_private.local_tensor(value) if isinstance(value, DTensor) else value
        if local.shape == self.local.shape:
            return self.part(local, f".{key}")
        if (
            len(self.boxes) == 1
            and local.dim() > 1
            and (at := scales_at(self.boxes[0], self.shape, tuple(local.shape)))
        ):
            return Part(scale_shape(self.shape), local.dtype, ((at, local),))
        if local.numel() != 1 or (key != "step" and self.local.numel() != math.prod(self.shape)):
            raise ValueError(
                f"The optimizer's {key!r} of {self.name} has shape {tuple(local.shape)} where the parameter has "
                f"{tuple(self.local.shape)} of {self.shape}: no other mesh could load it. Use an optimizer whose state is shaped like "
                "its parameters (FusedAdam with float32 or bfloat16 moments; float8_block128 where rows are not cut inside of blocks)."
            )
        # FSDP1 makes no steps with a parameter of which a rank holds nothing, so such a rank's count is not to be believed.
        counts = self.local.numel() > 0 or math.prod(self.shape) == 0
        former = Former(f"{self.fused.name}.{key}", (0,) * local.dim(), tuple(local.shape)) if self.fused else None
        return Part(tuple(local.shape), local.dtype, (((0,) * local.dim(), local),), writes=counts, former=former)

    def _stored(self, memory: WeightMemory) -> dict[str, Part]:
        """Bytes and scales, each where it lies in the whole parameter."""
        place, scheme = memory.place, memory.scheme
        if scheme.two_copies and scheme.elements_per_byte > 1:
            raise ValueError(
                f"{self.name} is stored as {scheme}, whose two copies are packed along different dimensions: use 2-D blocks."
            )
        first, rows = place.part
        entry: dict[str, Part] = {}
        for direction in memory.directions:
            packed = memory.along(direction).elements_per_byte
            shape, at = (rows, place.matrix[1] // packed), (place.top - first, place.left // packed)
            data = memory.data[direction][: place.rows]
            entry[f"{direction}_data"] = Part(
                shape, data.dtype, ((at, data),), former=self._former(f".{direction}_data", shape)
            )
            key = f"{direction}_scale_inv"
            blocks = memory.has_blocks(direction)
            entry[key] = (
                self._scale(memory, direction) if blocks else self._of_tensor(memory.group.scale_inv, f".{key}")
            )
        text = scheme.as_bytes()  # not in checkpoints before 0.2
        entry["format"] = Part(tuple(text.shape), text.dtype, (((0,), text),), optional=True)
        if scheme.needs_tensor_amax:
            entry["rowwise_amax"] = self._of_tensor(memory.group.amax, ".rowwise_amax")
        return {key: _transposed(part) if key.startswith(COLUMNWISE) else part for key, part in entry.items()}

    def _of_tensor(self, tensor: Tensor, key: str) -> Part:
        former = None if self.fused is None else Former(f"{self.fused.name}{key}", (0,), (1,))
        return Part((1,), tensor.dtype, (((0,), tensor),), former=former)

    def _scale(self, memory: WeightMemory, direction: str) -> Part:
        """Scales of blocks, as rows and columns of the matrix."""
        (first, rows), (matrix_rows, columns), block = memory.place.part, memory.place.matrix, memory.block(direction)
        whole = blocks_of((first, 0, rows, columns), block)
        held = blocks_of(memory.box_of_scales(direction), block)
        scale, offset = memory.scales(direction), [h.start - w.start for h, w in zip(held, whole)]
        if offset[0] < 0 or held[0].stop > whole[0].stop:  # of the whole matrix: those of the parameter's rows
            scale, offset[0] = scale[whole[0]], 0
        shape = (whole[0].stop - whole[0].start, whole[1].stop)
        former = self._former(f".{direction}_scale_inv", shape, first // block[0], -(-matrix_rows // block[0]))
        return Part(shape, scale.dtype, ((tuple(offset), scale),), former=former)


def _transposed(part: Part) -> Part:
    """The part of the transpose."""
    views = tuple((offset[::-1], view.t()) for offset, view in part.views)
    former = part.former
    if former is not None:
        former = Former(former.name, former.offset[::-1], former.shape[::-1])
    return replace(part, shape=part.shape[::-1], views=views, former=former)


def _fsdp1_units(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, FullyShardedDataParallel))


def placed_parameters(model: nn.Module) -> Iterator[Placed]:
    """Every parameter once, under the first of its names."""
    flat = {key: found for unit in _fsdp1_units(model) for key, found in _stretches(unit)}
    seen: set[int] = set()
    for path, module in modules_of(model):
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}".strip(".")
            if isinstance(parameter, FlatParameter):
                raise ValueError(
                    f"{path or type(module).__name__} was wrapped by FullyShardedDataParallel(use_orig_params=False), which hides the "
                    "names of parameters: use use_orig_params=True (shard_model_fsdp1 does)."
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield _placed(name, module, attribute, parameter, flat.get((id(module), attribute)))


def _stretches(unit: nn.Module) -> Iterator[tuple[tuple[int, str], tuple[Tensor, Index, int]]]:
    """((module's id, parameter's name), (this rank's stretch of it, its shape, where the stretch begins)) of an FSDP1 unit."""
    for module, attribute, shape, local, start in torch_private.fsdp1_stretches(unit):
        yield (id(module), attribute), (local, shape, start)


def _placed(
    name: str,
    module: nn.Module,
    attribute: str,
    parameter: nn.Parameter,
    stretch: tuple[Tensor, Index, int] | None,
) -> Placed:
    layout, size = layout_of(module, attribute)
    tp_rank = getattr(module, "tp_rank", 0) if size > 1 else 0
    if isinstance(parameter, DTensor):
        local = torch_private.local_tensor(parameter)
        shape, offset = torch_private.local_box(parameter)
        whole: Index = tuple(parameter.shape)
        boxes: tuple[Box, ...] = ((offset, shape),)
    else:
        local, held, first = stretch or (parameter.detach(), tuple(parameter.shape), 0)
        whole, start = _tensor_parallel_place(module, layout, size, tp_rank, held)
        stop = first + local.numel()
        cut = flat_boxes(held, first, stop) if stretch else [((0,) * len(held), held)]
        boxes = tuple((tuple(a + b for a, b in zip(start, offset)), extent) for offset, extent in cut)
    return Placed(name, parameter, local, whole, boxes, _fused(name, module, attribute))


def _fused(name: str, module: Any, attribute: str) -> Fused | None:
    for whole, rows in getattr(module, "fused", {}).items():
        if attribute in rows:
            first = sum(list(rows.values())[: list(rows).index(attribute)])
            return Fused(f"{name.removesuffix(attribute)}{whole}", first, sum(rows.values()))
    return None


def _tensor_parallel_place(module: nn.Module, layout: Any, size: int, tp_rank: int, held: Index) -> tuple[Index, Index]:
    """(shape of the whole, where a plain tensor-parallel part of shape `held` begins)."""
    whole, start = list(held), [0] * len(held)
    if isinstance(module, VocabParallelEmbedding | VocabParallelHead):
        if held[0] != module.padded_embeddings:
            whole[0], start[0] = module.padded_embeddings, module.first_row
    elif layout.dim is not None and size > 1:
        start[layout.dim] = tp_rank * held[layout.dim]
        whole[layout.dim] *= size
    return tuple(whole), tuple(start)


def flat_boxes(shape: Index, start: int, stop: int) -> list[Box]:
    """Elements start to stop of the flattened tensor, as boxes of the tensor, in order.

    >>> flat_boxes((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,) * len(shape), (stop - start,) * len(shape))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all in one row
        return [((last, *o), (1, *s)) for o, s in flat_boxes(shape[1:], start - last * row, stop - last * row)]
    head = [((first - 1, *o), (1, *s)) for o, s in flat_boxes(shape[1:], start - (first - 1) * row, row)]
    tail = [((last, *o), (1, *s)) for o, s in flat_boxes(shape[1:], 0, stop - last * row)]
    middle = [((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))] if first < last else []
    return (head if start % row else []) + middle + tail
