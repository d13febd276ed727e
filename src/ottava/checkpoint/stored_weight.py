"""Weights that are stored in FP8 (`quantized_model_init`): their bytes and scales as entries of a state.

NAME.rowwise_data            uint8 [M, K]; E2M1: [M, K/2]
NAME.rowwise_scale_inv       [1], or one a block: [ceil(M/B), ceil(K/B)], [M, ceil(K/B)]
NAME.rowwise_amax            [1], where the scheme keeps it
NAME.columnwise_data         uint8 [K, M], and
NAME.columnwise_scale_inv    [K, ceil(M/B)]: 1-D blocks only; elsewhere the columnwise copy is the transpose
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ottava.checkpoint.boxes import Index, Part
from ottava.distributed.block_grid import transposed
from ottava.distributed.stored_shard import StoredShard
from ottava.nn.strategy import Layout
from ottava.quant.tensor import QuantizedTensor


def stored_entry(
    name: str, local: QuantizedTensor, shape: Index, layout: Layout, size: int, tp_rank: int
) -> dict[str, Part]:
    """Parts of the bytes and scales of a weight [M, K] = `shape`, of which `local` is what this rank holds."""
    buffers, first_row, held = _buffers(name, local)
    # Where what tensor parallelism gave this rank begins in the weight, in the order of the ranks.
    origin = [tp_rank * held[i] if layout.dim == i and size > 1 else 0 for i in (0, 1)]
    entry = {}
    for key, (tensor, unit, row) in buffers.items():
        if unit is None:
            entry[key] = Part(tuple(tensor.shape), tensor.dtype, (((0,) * tensor.dim(), tensor),))
            continue
        flipped = key.startswith("columnwise")
        step, dim = (unit[::-1] if flipped else unit), layout.dim
        if size > 1 and dim is not None and any(n // size % step[dim] for n in layout.parts or (shape[dim],)):
            raise ValueError(
                f"{name}: {size} tensor-parallel ranks hold parts that are no multiple of the blocks of {step[dim]}, so the scales are not "
                "those of the whole weight and no other mesh could load them: build the model outside of quantized_model_init."
            )
        offset = [(origin[0] + (first_row if row else 0)) // step[0], origin[1] // step[1]]
        if row and (origin[0] + first_row) % step[0]:
            offset[0] += 1  # a block that began before these rows is held by the rank where it began
        whole: Index = tuple(-(-n // u) for n, u in zip(shape, step))
        scaled = Layout(dim, tuple(n // step[dim] for n in layout.parts) if dim is not None else ())
        upright = tensor.t() if flipped else tensor
        pieces = scaled.pieces(offset, tuple(upright.shape), size)
        views = [(p.start, p.of(upright)) for p in pieces]
        if flipped:
            whole, views = whole[::-1], [(start[::-1], view.t()) for start, view in views]
        entry[key] = Part(whole, tensor.dtype, tuple(views))
    return entry


Buffer = tuple[Tensor, tuple[int, int] | None, bool]
"""(memory, elements of the buffer's own orientation that one number of it stands for (None: of the whole tensor), whether it has this
rank's rows only and not all rows)"""


def _buffers(name: str, local: QuantizedTensor) -> tuple[dict[str, Buffer], int, Index]:
    """(buffers by key, first row that this rank holds, shape of what FSDP gathers)."""
    scheme = local.scheme
    if scheme.format == "e2m1" and not scheme.transposable:
        raise ValueError(
            f"{name} is stored as {scheme}, whose two copies are packed along different dimensions: use 2-D blocks."
        )
    pack = 2 if scheme.format == "e2m1" else 1
    block = scheme.block
    if isinstance(local, StoredShard):
        copy, rows = local.copy, local.shape[0]
        assert copy.row_data is not None
        found: dict[str, Buffer] = {"rowwise_data": (copy.row_data[:rows], (1, pack), True)}
        if block is None:
            found["rowwise_scale_inv"] = (copy.joint.scale_inv, None, False)
        elif scheme.transposable:
            found["rowwise_scale_inv"] = (copy.scale_inv, block, False)
        else:
            found["rowwise_scale_inv"] = (copy.row_scale[:rows], block, True)
            if copy.needs_columnwise:
                along = copy.column_block[0]
                count = -(-(copy.start + rows) // along) - -(-copy.start // along)
                found["columnwise_data"] = (copy.column_data[:rows].t(), (1, 1), True)
                found["columnwise_scale_inv"] = (copy.column_scale[:count].t(), (1, along), True)
        if copy.joint.amax.numel():
            found["rowwise_amax"] = (copy.joint.amax, None, False)
        return found, copy.start, copy.shape
    parts = local._parts
    found = {"rowwise_data": (parts["rowwise_data"], (1, pack), False)}
    found["rowwise_scale_inv"] = (parts["rowwise_scale_inv"], block, False)
    if "rowwise_amax" in parts:
        found["rowwise_amax"] = (parts["rowwise_amax"], None, False)
    if not scheme.transposable and "columnwise_data" in parts:
        assert block is not None
        found["columnwise_data"] = (parts["columnwise_data"], (1, 1), False)
        found["columnwise_scale_inv"] = (parts["columnwise_scale_inv"], block, False)
    return found, 0, tuple(local.shape)


@torch.no_grad()
def restore_columns(parameters: Iterable[Any]) -> None:
    """After bytes were loaded: makes columnwise copies that are transposes anew, and forgets values from before quantization."""
    for placed in parameters:
        local = placed.local
        if not isinstance(local, QuantizedTensor):
            continue
        for holder in (local, placed.parameter):
            getattr(holder, "clear_high_precision_init_val", lambda: None)()
        parts = local._parts
        if isinstance(local, StoredShard) or not local.scheme.transposable or "columnwise_data" not in parts:
            continue
        parts["columnwise_data"].copy_(transposed(parts["rowwise_data"], local.scheme))
        scale = parts["rowwise_scale_inv"]
        parts["columnwise_scale_inv"].copy_(scale if local.scheme.block is None else scale.t())
        if "columnwise_amax" in parts:
            parts["columnwise_amax"].copy_(parts["rowwise_amax"])
