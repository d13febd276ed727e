"""What a GEMM takes of a weight: bytes and scales of both directions, of all parts of a matrix as one.

[Note: operands] The parts of a matrix that lie whole on a rank are multiplied as one, so a `ScaleGroup` has one set of operands: rowwise
bytes one part under the other, columnwise bytes [K, M] side by side, and scales in the layout that the GEMM reads. They are kept, and
made again once the version of something that they are made from has changed, whoever has written into it (an optimizer, DCP). New ones
are written over the old: a CUDA graph reads addresses, always the same ones. The parts' bytes are views of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ottava import torch_private
from ottava.quant.scale_group import ScaleGroup
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE, WeightMemory, written_over
from ottava.quant.weight_place import Extent, grid_step
from ottava.quant.weight_state import State

if TYPE_CHECKING:
    from ottava.quant.weight import Weight


def operands(group: ScaleGroup) -> dict[str, Tensor]:
    """Both directions of the units of all parts as one matrix, as a GEMM takes them; made again, in the same memory, when bytes or
    scales change."""
    if group.operands is None or group.operands[0] != _versions(group):
        # They stay: an evaluation in inference mode must not leave what a later backward cannot save.
        with torch.inference_mode(False):
            group.operands = _renewed_operands(group)
    return group.operands[1]


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
        if part.two_copies and part.along(COLUMNWISE).elements_per_byte == 1 and not part.rows_first:
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
    made |= joined_scales(group, [ROWWISE, COLUMNWISE] if group.keeps_columnwise else [ROWWISE])
    if group.keeps_columnwise:
        made["columnwise_data"] = torch.ops.ottava.transpose(joined(COLUMNWISE), str(scheme.along(COLUMNWISE)))
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


def whole_parts(memory: WeightMemory) -> dict[str, Tensor]:
    """Both directions of a whole unit."""
    group = memory.group
    joined = operands(group)
    if len(group.parts) == 1:
        return joined
    index = group.parts.index(memory)
    first = sum(part.place.unit[0] for part in group.parts[:index])
    rows, box = memory.place.unit[0], memory.place.box(Extent.UNIT)
    parts = dict(joined)
    parts["rowwise_data"] = joined["rowwise_data"].narrow(0, first, rows)
    parts["rowwise_scale_inv"] = memory.scale_inv(ROWWISE, box)
    if group.keeps_columnwise:
        packed, scale = memory.along(COLUMNWISE).elements_per_byte, memory.scale_inv(COLUMNWISE, box)
        parts["columnwise_data"] = joined["columnwise_data"].narrow(1, first // packed, rows // packed)
        parts["columnwise_scale_inv"] = scale if scale.dim() == 1 else scale.t()
    return parts


def transposed_part(weight: Weight, name: str) -> Tensor | None:
    """A part of the columnwise copy, of which only the rowwise one is kept."""
    part = weight._parts.get(name.replace(COLUMNWISE, ROWWISE))
    if part is None or name.endswith("_amax"):
        return part if weight.scheme.kind == "nvfp4" else None
    if name.endswith("_data"):
        return torch.ops.ottava.transpose(part, str(weight.scheme))
    return part if part.dim() == 1 else part.t().contiguous()


def tensors_of(weight: Weight) -> list[Tensor]:
    """What a forward of this weight reads: the values that it has in high precision, and what a GEMM takes, made if it is not there."""
    held = [] if weight.master is None else [weight.master]
    whole = weight.state is State.WHOLE and weight.memory.quantized and bool(weight.memory.data)
    made = operands(weight.memory.group) if whole else {}
    return held + [made[name] for name in sorted(made)]  # in one order, whoever has made them


# ---------------------------------------------------------------------------------------------------------------- scales


def joined_scales(group: ScaleGroup, directions: Sequence[str]) -> dict[str, Tensor]:
    """Scales and amax of the matrix that all parts are rows of, by the names that `QuantizedTensor` has for them."""
    found: dict[str, Tensor] = {}
    assert group.scheme is not None
    for direction in directions:
        scheme = group.scheme.along(direction)
        scale = _joined_scale_inv(group.parts, direction)
        scale = scale if direction == ROWWISE or scale.dim() == 1 else scale.t()
        found[f"{direction}_scale_inv"] = in_gemm_layout(scale, scheme)
        if scheme.needs_tensor_amax and (direction == ROWWISE or scheme.block is not None):
            found[f"{direction}_amax"] = group.amax
    return found


def _joined_scale_inv(parts: Sequence[WeightMemory], direction: str) -> Tensor:
    """Scales of the units of all parts, one under the other, as rows and columns of the matrix."""
    boxes = [part.place.box(Extent.UNIT) for part in parts]
    if not parts[0].has_blocks(direction):
        return parts[0].group.scale_inv
    block = parts[0].block(direction)
    if parts[0].extent(direction) is Extent.MATRIX and all(a[0] + a[2] == b[0] for a, b in itertools.pairwise(boxes)):
        top, left, _, columns = boxes[0]
        return parts[0].scale_inv(direction, (top, left, sum(box[2] for box in boxes), columns))
    step = grid_step(block, boxes)
    scales = [part.scale_inv(direction, box, step) for part, box in zip(parts, boxes)]
    return scales[0] if len(scales) == 1 else torch.cat(scales)


def in_gemm_layout(scale: Tensor, scheme: Scheme) -> Tensor:
    """float32 scales of 1-D blocks lie with the row index fastest, as the block GEMM reads them; others are contiguous."""
    if scale.dim() == 2 and scheme.two_copies and scale.dtype == torch.float32:
        return scale.t().contiguous().t()
    return scale.contiguous()


# ------------------------------------------------------------------------------------------------- bytes of a whole unit


def quantize_whole(memory: WeightMemory, values: Tensor) -> None:
    """Values [M, K] -> bytes and scales of both directions, in one kernel. Only if `weight_writes.quantizes_alone`."""
    columnwise = memory.group.keeps_columnwise
    buffers = torch.ops.ottava.quantize(values, str(memory.scheme), None, None, True, columnwise)
    q = QuantizedTensor.from_buffers(buffers, memory.scheme, values.shape, values.dtype, True, columnwise)
    parts = {name: tensor for name, tensor in q._parts.items() if tensor.numel() or name.endswith("_data")}
    if memory.group.operands is not None:
        parts = _in_place_of(memory.group.operands[1], parts)
    take_buffers(memory, parts)
    memory.group.operands = (_versions(memory.group), parts)


def take_buffers(memory: WeightMemory, parts: dict[str, Tensor]) -> None:
    """The bytes and scales of a whole matrix in the same scheme, as they are."""
    group, scheme = memory.group, memory.scheme
    memory.data[ROWWISE] = parts["rowwise_data"]
    if scheme.needs_tensor_amax:
        group.amax = parts["rowwise_amax"]
    if scheme.of_tensor is not None:
        group.scale_inv = parts["rowwise_scale_inv" if scheme.per_tensor else "columnwise_scale_inv"]
        group.scale = torch.ones_like(group.scale_inv) / group.scale_inv
    if not scheme.per_tensor:
        memory.set_scales(ROWWISE, parts["rowwise_scale_inv"])
    if memory.two_copies:
        _take_columnwise(
            memory, upright(parts["columnwise_data"], memory.along(COLUMNWISE)), parts["columnwise_scale_inv"]
        )
    memory.preserved, memory.without_scales = None, False


def _take_columnwise(memory: WeightMemory, data: Tensor, scales: Tensor) -> None:
    """Upright views of what a GEMM takes, or, where somebody reads them as rows, these rows. scales: as the GEMM takes them."""
    if memory.rows_first:
        (data,) = written_over([memory.data.get(COLUMNWISE)], [data.contiguous()])
    memory.data[COLUMNWISE] = data
    if not memory.has_blocks(COLUMNWISE):
        return
    scales = scales.t()
    if memory.rows_first:
        (scales,) = written_over([memory.held_scales(COLUMNWISE)], [scales.contiguous()])
    memory.set_scales(COLUMNWISE, scales)


def upright(columnwise: Tensor, scheme: Scheme) -> Tensor:
    """Columnwise bytes [K, M] as rows of the matrix: a view, where bytes are not packed."""
    return columnwise.t() if scheme.elements_per_byte == 1 else torch.ops.ottava.transpose(columnwise, str(scheme))
