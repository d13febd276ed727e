"""FSDP2's two hooks for a `Weight`: what a rank gives to the all-gather, and what is made of all that was gathered.

[Note: what travels]
One scale a tensor and square blocks have one set of bytes: the columnwise copy is the transpose. The rows' bytes are gathered; all
ranks know all scales. 1-D blocks (1x32, 1x128, 1x16) and two ways (scheme.py) have two sets: rowwise bytes are gathered in forward and
columnwise bytes in backward, one byte an element each time, or both at once where a forward runs again in backward. Scales that only
their rank knows (`Extent.OWN`) travel with the bytes. A weight whose recipe is not known, or quantizes nothing, travels in high precision.

[Note: freed memory]
FSDP frees gathered memory and "inner tensors" by emptying their storage, and fills the same tensors again before backward. Autograd
holds them meanwhile. So what backward multiplies by is always the same tensor; where only rowwise bytes were gathered its storage stays
empty, and backward's gather fills it. Parameters that hold rows of one matrix are gathered into one memory, so that a GEMM can take
them as one: it belongs to the group, and the first of them hands it to FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ottava import torch_private
from ottava.quant.scheme import Scheme
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE, WeightMemory
from ottava.quant.weight_operands import in_gemm_layout
from ottava.quant.weight_place import Extent

BOTH, UNQUANTIZED = "both", "unquantized"


@dataclass(eq=False)
class GatherState:
    """What all views of a gathered weight share."""

    direction: str
    """Whose bytes are there now."""
    parts: dict[str, Tensor]
    """By name, as `QuantizedTensor` has them."""


# ----------------------------------------------------------------------------------------------------------------- sending


def messages(memory: WeightMemory, master: Tensor | None, device: torch.device) -> tuple[tuple[Tensor, ...], str]:
    """What this rank gives to the all-gather, and the direction that it is of."""
    if not memory.quantized:
        assert master is not None
        rows = master.to(device, memory.gather_dtype or master.dtype)
        return (pad(rows, (0, 0, 0, memory.place.padded - rows.shape[0])).contiguous(),), UNQUANTIZED
    memory.check_scales()
    direction = ROWWISE
    if memory.two_copies:
        direction = BOTH if memory.gathers_both else COLUMNWISE if torch_private.inside_backward() else ROWWISE
    return tuple(message.to(device) for message in _bytes(memory, direction)), direction


def _bytes(memory: WeightMemory, direction: str) -> tuple[Tensor, ...]:
    if not memory.scheme.two_copies:
        return (memory.data[ROWWISE],)
    own = {each: _scale_message(memory, each) for each in memory.directions}
    if direction == BOTH:
        scales = torch.cat(list(own.values()))
        data: tuple[Tensor, ...] = tuple(memory.data[each] for each in memory.directions)
    else:
        # FSDP wants messages of one size in forward and backward.
        scales = pad(own[direction], (0, max(s.numel() for s in own.values()) - own[direction].numel()))
        data = (memory.data[direction],)
    return (*data, scales) if scales.numel() else data


def _slots(memory: WeightMemory, direction: str) -> tuple[int, int]:
    """Blocks down and across that a rank's (padded) rows have."""
    (r, c), place = memory.block(direction), memory.place
    return -(-place.padded // r), -(-place.unit[1] // c)


def _scale_message(memory: WeightMemory, direction: str) -> Tensor:
    """Bytes of the scales that only this rank knows, as many on every rank."""
    if memory.extent(direction) is not Extent.OWN:
        return torch.empty(0, dtype=torch.uint8, device=memory.data[direction].device)
    scale = memory.scales(direction)
    padded = pad(scale, (0, 0, 0, _slots(memory, direction)[0] - scale.shape[0]))
    return padded.contiguous().view(torch.uint8).flatten()


# --------------------------------------------------------------------------------------------------------------- receiving


def fill_rows(memory: WeightMemory, outputs: Sequence[Tensor], target: Tensor | None) -> tuple[Tensor, tuple]:
    """High precision: (the whole unit, tensors whose memory FSDP is to free and give back).

    A matrix of several parameters lies in one memory. target: where it was put the first time.
    """
    rows = outputs[0][: memory.place.unit[0]]
    if len(memory.group.parts) == 1:
        return rows, ()
    inner: tuple = ()
    if target is None:
        target, inner = _joined(memory, "values", 0, 1, lambda n: rows.new_empty(n, rows.shape[1]))
    target.data.copy_(rows)
    outputs[0].untyped_storage().resize_(0)  # FSDP gives the memory back when it gathers
    return target, inner


def fill(
    memory: WeightMemory, outputs: Sequence[Tensor], direction: str, state: GatherState | None
) -> tuple[GatherState, tuple[Tensor, ...]]:
    """FP8: (the unit's buffers, tensors whose memory FSDP is to free and give back). state: what is to be filled again."""
    if memory.place.world == 1 and memory.scheme.two_copies:  # torch keeps only the first message then
        outputs = (outputs[0], *(message.to(outputs[0].device) for message in _bytes(memory, direction)[1:]))
    inner: dict[str, Tensor] = {}
    owned: tuple[Tensor, ...] = ()
    if state is None:
        inner, owned = _allocate(memory, outputs[0].device)
        state = GatherState(direction, {})
    else:
        inner = state.parts
    state.direction = direction
    state.parts.update(_fill_parts(memory, inner, outputs, direction))
    return state, owned


def _joined(
    memory: WeightMemory, name: str, dim: int, per: int, make: Callable[[int], Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(this part's stretch of a memory that all parts of the matrix share along `dim`, the memory if this part is the first).

    per: rows of the matrix that one row (column) of the memory stands for. make: from the length along `dim`.
    """
    parts = memory.group.parts
    lengths, index = [-(-part.place.unit[0] // per) for part in parts], parts.index(memory)
    owned: tuple[Tensor, ...] = ()
    if index == 0:
        memory.group.joined[name] = make(sum(lengths))
        owned = (memory.group.joined[name],)
    return memory.group.joined[name].narrow(dim, sum(lengths[:index]), lengths[index]), owned


def _allocate(memory: WeightMemory, device: torch.device) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Memory for what is not simply a view of the gathered bytes: (buffers, those that FSDP is to free)."""
    rows, columns = memory.place.unit
    inner: dict[str, Tensor] = {}
    owned: tuple[Tensor, ...] = ()

    def joined(name: str, dim: int, per: int, make: Callable[[int], Tensor]) -> None:
        nonlocal owned
        inner[name], mine = _joined(memory, name, dim, per, make)
        owned += mine

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    if len(memory.group.parts) > 1:
        joined("rowwise_data", 0, 1, lambda n: empty(n, columns // memory.along(ROWWISE).elements_per_byte))
    if memory.two_copies:
        joined("columnwise_data", 1, memory.along(COLUMNWISE).elements_per_byte, lambda n: empty(columns, n))
    if memory.scheme.two_copies and memory.extent(ROWWISE) is Extent.OWN:
        inner["rowwise_scale_inv"] = _scale_memory(memory.along(ROWWISE), rows, _slots(memory, ROWWISE)[1], device)
        owned += (inner["rowwise_scale_inv"],)
    if memory.two_copies and memory.extent(COLUMNWISE) is Extent.OWN:
        scheme = memory.along(COLUMNWISE)
        per = memory.block(COLUMNWISE)[0]
        joined("columnwise_scale_inv", 1, per, lambda n: _scale_memory(scheme, columns, n, device))
    return inner, owned


def _scale_memory(scheme: Scheme, rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows, columns]; float32 scales of 1-D blocks lie with the row index fastest, as the block GEMM reads them."""
    if scheme.scale_dtype == torch.float32:
        return torch.empty(columns, rows, dtype=torch.float32, device=device).t()
    return torch.empty(rows, columns, dtype=torch.uint8, device=device)


def _fill_parts(
    memory: WeightMemory, inner: dict[str, Tensor], outputs: Sequence[Tensor], direction: str
) -> dict[str, Tensor]:
    """The unit's buffers, of which those in `inner` are filled in place.

    `.data`: autograd holds these tensors for backward and must not take the refill for a change of their values.
    """
    unit = memory.place.unit
    parts: dict[str, Tensor] = dict(inner)
    rows = outputs[0][: unit[0]]
    if direction != COLUMNWISE:
        if "rowwise_data" in inner and len(memory.group.parts) > 1:
            inner["rowwise_data"].data.copy_(rows)
        else:
            parts["rowwise_data"] = rows
    if memory.two_copies and direction != ROWWISE:
        source = outputs[1][: unit[0]] if direction == BOTH else rows
        _transpose_into(inner["columnwise_data"], source, memory.along(COLUMNWISE))
    _fill_scales(memory, parts, outputs, direction)
    if memory.scheme.needs_tensor_amax:
        parts["rowwise_amax"] = memory.group.amax
        if memory.two_copies:
            parts["columnwise_amax"] = memory.group.amax
    _release(memory, parts, outputs, direction)
    return parts


def _transpose_into(target: Tensor, source: Tensor, scheme: Scheme) -> None:
    if scheme.elements_per_byte == 1:
        target.data.copy_(source.t())
    else:
        target.data.copy_(torch.ops.ottava.transpose(source, str(scheme)))


def _fill_scales(memory: WeightMemory, parts: dict[str, Tensor], outputs: Sequence[Tensor], direction: str) -> None:
    """Scales that travelled are unpacked; those that every rank has are cut to the unit."""
    box = memory.place.box(Extent.UNIT)
    ranks = outputs[0].shape[0] // max(memory.place.padded, 1)  # also those that have no rows
    travelled = outputs[-1].view(ranks, -1) if len(outputs) > (2 if direction == BOTH else 1) else None
    at = 0
    for each in memory.directions:
        name, scheme = f"{each}_scale_inv", memory.along(each)
        if memory.extent(each) is not Extent.OWN:
            scale = memory.scale_inv(each, box)
            scale = scale if each == ROWWISE or scale.dim() == 1 else scale.t()
            parts[name] = in_gemm_layout(scale, scheme)
        elif direction in (each, BOTH):
            assert travelled is not None
            down, across = _slots(memory, each)
            size = down * across * scheme.scale_dtype.itemsize
            stretch = travelled[:, at : at + size].contiguous().view(scheme.scale_dtype).view(-1, across)
            count = -(-memory.place.unit[0] // memory.block(each)[0])
            scale = stretch[:count]
            parts[name].data.copy_(scale if each == ROWWISE else scale.t())
            at += size


def _release(memory: WeightMemory, parts: dict[str, Tensor], outputs: Sequence[Tensor], direction: str) -> None:
    """Empties memory that nobody reads until the next gather; FSDP gives it back then."""
    several = len(memory.group.parts) > 1
    last = memory is memory.group.parts[-1]
    if direction == COLUMNWISE or several:
        outputs[0].untyped_storage().resize_(0)
    if direction == COLUMNWISE and several and last:
        parts["rowwise_data"].untyped_storage().resize_(0)
    if direction == ROWWISE and memory.two_copies and last:
        parts["columnwise_data"].untyped_storage().resize_(0)
