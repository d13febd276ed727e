"""Triton kernels of `squares.py`: one partial sum a chunk, then one program a bin adds them up, always in the same order."""

from __future__ import annotations

from collections import defaultdict

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launcher
from ottava.kernels.upload import Upload

TILE = tl.constexpr(4096)  # elements: 32 a thread at 4 warps, 8 loads of 16 bytes
CHUNK = tl.constexpr(65536)
PARTIALS = tl.constexpr(4096)  # that one program reads at a time
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WIDTH = tl.constexpr(4)  # columns of the table: address, elements, code of the dtype, nothing


@triton.jit
def _squares_of(address, first, numel, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The sum of squares of elements first to first + CHUNK of a tensor."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], dtype=tl.float32)
    last = tl.minimum(first + CHUNK, numel)
    full = (last - first) // TILE
    for tile in range(full):
        value = tl.load(pointer + (first + tile * TILE + lanes)).to(tl.float32)
        total += value * value
    at = first + full * TILE + lanes
    value = tl.load(pointer + at, mask=at < last, other=0.0).to(tl.float32)
    total += value * value
    return tl.sum(total)


@triton.jit
def _partials_kernel(table, chunks, partials, ALIGNED: tl.constexpr):
    """A program a chunk; chunks [c, 2]: tensor, number of the chunk in it."""
    row = table + tl.load(chunks + 2 * tl.program_id(0)) * WIDTH
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    address, numel, code = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if code == 0:
        found = _squares_of(address, first, numel, tl.float32, ALIGNED)
    elif code == 1:
        found = _squares_of(address, first, numel, tl.bfloat16, ALIGNED)
    else:
        found = _squares_of(address, first, numel, tl.float16, ALIGNED)
    tl.store(partials + tl.program_id(0), found)


@triton.jit
def _bins_kernel(partials, ends, squares):
    """A program a bin: ends [bins + 1] are the borders of its chunks."""
    first, last = tl.load(ends + tl.program_id(0)), tl.load(ends + tl.program_id(0) + 1)
    total = tl.zeros([PARTIALS], dtype=tl.float32)
    for start in range(first, last, PARTIALS):
        at = start + tl.arange(0, PARTIALS)
        total += tl.load(partials + at, mask=at < last, other=0.0)
    tl.store(squares + tl.program_id(0), tl.sum(total))


@triton.jit
def _norm_kernel(squares, out, limit, COUNT: tl.constexpr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    norm = tl.sqrt_rn(tl.sum(tl.load(squares + lanes, mask=lanes < COUNT, other=0.0)))
    scale = tl.div_rn(tl.zeros_like(norm) + limit, norm + 1e-6)
    tl.store(out, norm)
    tl.store(out + 1, tl.where(scale > 1.0, 1.0, scale))


_PARTIALS, _BINS, _NORM = Launcher(_partials_kernel), Launcher(_bins_kernel), Launcher(_norm_kernel)
_TABLES: dict[torch.device, Upload] = defaultdict(Upload)
_CHUNKS: dict[tuple, tuple[Tensor, Tensor]] = {}
"""(chunks, borders of bins) by device and sizes: those of a model's gradients are always the same."""


def sums(tensors: list[Tensor], bins: list[int], count: int) -> Tensor:
    """See `squares._sums`. Two launches, whatever the number of tensors and their types."""
    order = sorted(range(len(tensors)), key=lambda i: bins[i])
    tensors, bins = [tensors[i] for i in order], [bins[i] for i in order]
    device = tensors[0].device
    rows: list[int] = []
    for tensor in tensors:
        rows += [tensor.data_ptr(), tensor.numel(), CODES[tensor.dtype], 0]
    aligned = all(address % 16 == 0 for address in rows[:: WIDTH.value])
    table = _TABLES[device](rows, device)
    chunks, ends = _chunks_of(tuple(rows[1 :: WIDTH.value]), tuple(bins), count, device)
    partials = torch.empty(chunks.shape[0], dtype=torch.float32, device=device)
    squares = torch.empty(count, dtype=torch.float32, device=device)
    if chunks.shape[0]:
        arguments = {"table": table, "chunks": chunks, "partials": partials, "ALIGNED": aligned}
        _PARTIALS((chunks.shape[0],), 4, arguments)
    _BINS((count,), 4, {"partials": partials, "ends": ends, "squares": squares})
    return squares


def _chunks_of(
    sizes: tuple[int, ...], bins: tuple[int, ...], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    key = (device, sizes, bins, count)
    if key not in _CHUNKS:
        pairs, ends, chunk = [], [0] * (count + 1), CHUNK.value
        for tensor, (size, chosen) in enumerate(zip(sizes, bins, strict=True)):
            pairs += [(tensor, number) for number in range(-(-size // chunk))]
            ends[chosen + 1 :] = [len(pairs)] * (count - chosen)
        made = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2), torch.tensor(ends, dtype=torch.int32)
        _CHUNKS[key] = (made[0].to(device), made[1].to(device))
    return _CHUNKS[key]


def norm_and_scale(squares: Tensor, max_norm: float) -> Tensor:
    """See `squares._norm_and_scale`."""
    out, count = squares.new_empty(2), squares.shape[0]
    arguments = {"squares": squares, "out": out, "limit": max_norm, "COUNT": count}
    _NORM((1,), 1, arguments | {"SIZE": triton.next_power_of_2(count)})
    return out
