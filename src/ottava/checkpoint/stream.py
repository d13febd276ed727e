"""Tensors that are made a box at a time, written as a checkpoint by one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ottava.checkpoint.boxes import Box, Index
from ottava.checkpoint.files import About, check_shards, entries_of, seal, write_shard
from ottava.checkpoint.flat import Path
from ottava.checkpoint.names import directory_name, shard_name
from ottava.checkpoint.storage import Location, Storage


@dataclass(frozen=True)
class Stream:
    """A tensor of which any box can be had."""

    dtype: torch.dtype
    shape: Index
    read: Callable[[Box], Tensor]
    """A new, contiguous CPU tensor."""


def write_streams(
    storage: Storage, about: About, streams: Mapping[str, Stream], state: bytes, shards: int, block_bytes: int
) -> Location:
    """Writes a checkpoint in `shards` files and commits it. state: from `files.encode_state`. One box is in memory at a time."""
    if shards < 1 or block_bytes < 1:
        raise ValueError(f"shards={shards}, block_bytes={block_bytes}: expected numbers from 1.")
    if (there := storage.folder(directory_name(about.step))).exists():
        raise ValueError(f"{there.path} exists, and is not replaced: choose another target, or another step.")
    items = [
        [(n, box) for n, stream in streams.items() for box in _boxes(stream, i, shards, block_bytes)]
        for i in range(shards)
    ]
    folder = storage.begin(about.step)
    try:
        reports = [
            write_shard(folder, shard_name(i), (streams[name].read(box) for name, box in own), about.hash)
            for i, own in enumerate(items)
        ]
        entries = entries_of(streams, items, reports)
        paths: dict[str, Path] = {name: tuple(name.split(".")) for name in streams}
        seal(folder, about, entries, paths, state, check_shards(folder, reports, [len(own) for own in items]))
        return storage.publish(folder, about.step).path
    except BaseException:
        with suppress(OSError):  # the error that is raised says more
            storage.discard(folder)
        raise


def _boxes(stream: Stream, index: int, shards: int, block_bytes: int) -> list[Box]:
    """What shard `index` gets of a tensor: its share of the rows, in boxes of at most `block_bytes` (or one row)."""
    if not stream.shape or not math.prod(stream.shape):
        return [((0,) * len(stream.shape), stream.shape)] if index == 0 else []
    rows, rest = stream.shape[0], stream.shape[1:]
    share = -(-rows // shards)
    first, last = min(index * share, rows), min((index + 1) * share, rows)
    step = max(1, block_bytes // (math.prod(rest) * stream.dtype.itemsize))
    return [((r, *(0 for _ in rest)), (min(step, last - r), *rest)) for r in range(first, last, step)]
