"""The Triton kernels of `many.py`: a table of pointers on the device, and one program for each tile of each tensor."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava import torch_private
from ottava.kernels import tally
from ottava.kernels.launch import Launcher
from ottava.kernels.tile_kernel import _store, _to_bytes

# Columns of the table: pointer to values, rows, columns, rows of the first block that lie above them, columns before them, pointer to
# bytes, pointer to factors or place of the first amax, blocks across.
FIELDS = tl.constexpr(8)
TILE = 128
WHOLE_TILE = (32, 128), 4
"""Tile and warps where a tensor has one number."""


@triton.jit
def _tile(table_ptr, tiles_ptr, DTYPE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """(the row of the table, number of the tile's block, row and column indices of the tile, its mask, its values in float32)."""
    at = tiles_ptr + 3 * tl.program_id(0)
    entry = table_ptr + tl.load(at).to(tl.int64) * FIELDS
    down, across = tl.load(at + 1), tl.load(at + 2)
    rows, columns = tl.load(entry + 1), tl.load(entry + 2)
    r = down * BM - tl.load(entry + 3) + tl.arange(0, BM)
    c = across * BK - tl.load(entry + 4) + tl.arange(0, BK)
    mask = ((r >= 0) & (r < rows))[:, None] & ((c >= 0) & (c < columns))[None, :]
    x_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    offset = r[:, None].to(tl.int64) * columns + c[None, :]
    return entry, down * tl.load(entry + 7) + across, offset, mask, x_ptr


@triton.jit
def amax_kernel(
    table_ptr, tiles_ptr, found_ptr, bad_ptr, DTYPE: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BLOCKS: a number for each block, which is a tile; else one for the tensor, which is zero before. Infinite ones are counted in
    *bad_ptr."""
    entry, block, offset, mask, x_ptr = _tile(table_ptr, tiles_ptr, DTYPE, BM, BK)
    if EVEN:
        x = tl.load(x_ptr + offset).to(tl.float32)
    else:
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0))
    amax_ptr = found_ptr + tl.load(entry + 6)
    if BLOCKS:
        tl.store(amax_ptr + block, amax)
        if amax == float("inf"):
            tl.atomic_add(bad_ptr, 1)
    elif amax > tl.load(amax_ptr):  # see `raise_to`
        before = tl.atomic_max(amax_ptr, amax)
        if (amax == float("inf")) & (before < amax):
            tl.atomic_add(bad_ptr, 1)


@triton.jit
def encode_kernel(
    table_ptr, tiles_ptr, DTYPE: tl.constexpr, BLOCKS: tl.constexpr, E5M2: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Values times the factor of their block (a tile) or tensor, as bytes."""
    entry, block, offset, mask, x_ptr = _tile(table_ptr, tiles_ptr, DTYPE, BM, BK)
    if EVEN:
        x = tl.load(x_ptr + offset).to(tl.float32)
    else:
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    factor_ptr = tl.load(entry + 6).to(tl.pointer_type(tl.float32))
    if BLOCKS:
        factor = tl.load(factor_ptr + block)
    else:
        factor = tl.load(factor_ptr)
    out_ptr = tl.load(entry + 5).to(tl.pointer_type(tl.uint8))
    _store(out_ptr + offset, _to_bytes(x * factor, E5M2), mask, EVEN)


_AMAX, _ENCODE = Launcher(amax_kernel), Launcher(encode_kernel)
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def fits(values: Sequence[Tensor], out: Sequence[Tensor], blocks: list[int]) -> bool:
    """Whether one launch serves: contiguous matrices of one dtype, whose rows of bytes start on 16 bytes (see `tile.supports`), with
    one scale or a scale for each tile."""
    first = values[0]
    return blocks in ([], [TILE, TILE]) and all(
        x.dtype == first.dtype and x.device == first.device and x.is_contiguous() and o.is_contiguous()
        and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0 and o.data_ptr() % 16 == 0 and x.numel() > 0
        for x, o in zip(values, out)
    )  # fmt: skip


def amax(values: list[Tensor], sizes: list[int], blocks: list[int], offsets: list[tuple[int, int]]) -> Tensor:
    """See `many.amax_many`. sizes: how many numbers each tensor gets."""
    found = torch.zeros(sum(sizes), dtype=torch.float32, device=values[0].device)
    places = [0, *itertools.accumulate(sizes)][:-1]
    _launch(_AMAX, values, values, places, blocks, offsets, found_ptr=found, bad_ptr=tally.weights_counter(found))
    return found


def encode(
    out: list[Tensor],
    values: list[Tensor],
    factors: list[Tensor],
    e5m2: bool,
    blocks: list[int],
    offsets: list[tuple[int, int]],
) -> None:
    """See `many.encode_many_`."""
    factors = [factor.contiguous() for factor in factors]
    _launch(_ENCODE, values, out, [factor.data_ptr() for factor in factors], blocks, offsets, E5M2=e5m2)


def _launch(
    kernel: Launcher,
    values: list[Tensor],
    out: list[Tensor],
    numbers: list[int],
    blocks: list[int],
    offsets: list[tuple[int, int]],
    **arguments: Any,
) -> None:
    (r, c), warps = ((TILE, TILE), 8) if blocks else WHOLE_TILE
    rows, grids = [], []
    even = True
    for x, o, number, (top, left) in zip(values, out, numbers, offsets, strict=True):
        (m, k), above, before = x.shape, (top % r if blocks else 0), (left % c if blocks else 0)
        grid = -(-(above + m) // r), -(-(before + k) // c)
        rows.append((x.data_ptr(), m, k, above, before, o.data_ptr(), number, grid[1]))
        grids.append(grid)
        even &= not (above or before or m % r or k % c)
    device = values[0].device
    tiles = _tiles(tuple(grids), device)
    # Weights stay where they are, so most tables have been there before. A graph must not read one that may be forgotten.
    make = _table.__wrapped__ if torch_private.is_capturing() else _table
    table = make(tuple(rows), device, torch_private.current_stream(values[0].get_device()))
    arguments |= {"table_ptr": table, "tiles_ptr": tiles, "DTYPE": _TRITON_DTYPES[values[0].dtype], "BM": r, "BK": c}
    kernel((tiles.shape[0],), warps, arguments | {"BLOCKS": bool(blocks), "EVEN": even})


@functools.lru_cache(maxsize=32)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """int64 [tensors, FIELDS], for kernels of that stream."""
    return torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=32)
def _tiles(grids: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """int32 [tiles, 3]: the tensor, and the tile's place in it, down and across."""
    parts = []
    for number, (down, across) in enumerate(grids):
        tile = torch.arange(down * across, dtype=torch.int32)
        parts.append(torch.stack([torch.full_like(tile, number), tile // across, tile % across], dim=1))
    return torch.cat(parts).to(device)
