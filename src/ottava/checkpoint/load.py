"""One load: find a checkpoint that verifies, compare it with what is wanted, then fill the tensors.

Nothing is written into the caller's tensors before every rank knows that every element it wants is there.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ottava.checkpoint import metadata
from ottava.checkpoint.archive import find_data
from ottava.checkpoint.boxes import Part, overlap, part_of, within
from ottava.checkpoint.errors import InvalidCheckpoint, NoUsableCheckpoint, Rejected, joined, listed
from ottava.checkpoint.flat import Flat, assign, flatten
from ottava.checkpoint.manifest import (
    Manifest,
    check_digest,
    check_sizes,
    check_stamp,
    json_object,
    read_manifest,
    read_verified,
)
from ottava.checkpoint.metadata import Chunk, Entry
from ottava.checkpoint.names import MAX_JSON_BYTES, METADATA, STATE, directory_name, step_of
from ottava.checkpoint.storage import Folder, Location, Storage, folder_at
from ottava.checkpoint.team import Team
from ottava.untrusted.stamps import Stamp

_BLOCK_BYTES = 16 << 20  # read at once

Allow = bool | Sequence[str]
"""False: nothing. True: everything. Otherwise patterns of names as for file names: ("rng.*",)."""


@dataclass(frozen=True)
class Relaxed:
    """Differences between checkpoint and state that are not errors."""

    missing: Allow = False
    """Wanted and not stored: the entry keeps its value."""
    extra: Allow = False
    """Stored and not wanted: ignored."""
    shape: Allow = False
    """Stored with another shape: the entry keeps its value."""
    dtype: Allow = False
    """Stored with another dtype: converted. A plain value of another type is taken as it is."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    step: int
    path: Any
    """A Path; a URL (str) where the storage is not local."""
    manifest: Manifest
    config: Any
    """The configuration that was saved with it."""
    kept: tuple[str, ...]
    """Entries of this rank that were not restored and keep their values, as `missing` or `shape` allowed."""
    rejected: tuple[Rejected, ...]
    """Newer checkpoints that could not be used."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose files are what its manifest says."""

    folder: Folder
    manifest: Manifest
    entries: dict[str, Entry]
    values: dict[str, Any]
    config: Any
    stamps: dict[str, Stamp]
    """What each file was known by before its content was verified."""


@dataclass(frozen=True)
class Read:
    """Bytes to be copied: `target` gets the part `part` of the stored box `chunk`, whose bytes begin at `position` of its file."""

    target: Tensor
    chunk: Chunk
    dtype: torch.dtype
    part: tuple[slice, ...]
    position: int


def load(
    team: Team, storage: Storage, state: Any, which: Location | int, relaxed: Relaxed, rotten: set[int]
) -> Loaded | None:
    """See `Checkpoints.load`. rotten: gets the steps that were found to be unusable."""
    flat = Flat({}, {}, {})

    def work() -> Location | int:
        nonlocal flat
        flat = flatten(state)
        return which

    def combine(asked: list[Location | int]) -> list[str]:
        if any(a != asked[0] for a in asked):
            raise ValueError(f"ranks ask for different checkpoints: {listed(sorted({str(a) for a in asked}))}.")
        return _names(storage, which)

    names = team.agree("no checkpoint was loaded", work, combine)
    folders = [storage.folder(n) for n in names] if _by_name(which) else [folder_at(which)]  # type: ignore[arg-type]
    rejected: list[Rejected] = []
    for folder in folders:
        what = f"{folder.name} was not loaded"
        opened, failures = team.attempt(what, lambda f=folder: read_index(f))  # type: ignore[misc]
        if not failures:  # every rank knows the files now, so nobody hashes one that another has not seen
            _, failures = team.attempt(what, lambda o=opened: verify_shards(o, team.rank, team.size))  # type: ignore[misc]
        if not failures:
            assert opened is not None
            named = as_stored(flat, opened)
            wanted = _compare(team, what, opened, named, relaxed)
            reads, failures = team.attempt(what, lambda: plan_reads(opened, named, wanted))  # noqa: B023
        if failures:
            rejected.append(Rejected(str(folder.path), joined(failures, team.size)))
            rotten.update({step_of(folder.name)} - {None} if _by_name(which) else ())  # type: ignore[arg-type]
            continue
        assert opened is not None and reads is not None
        team.agree(f"{what}, and tensors may be filled in part", lambda: read_all(opened, reads), lambda _: None)  # noqa: B023
        for name in named.values:
            if name in wanted:
                assign(state, named.paths[name], opened.values[name])
        kept = tuple(name for name in named.paths if name not in wanted)
        return Loaded(opened.manifest.step, folder.path, opened.manifest, opened.config, kept, tuple(rejected))
    if rejected or which != "newest":
        raise NoUsableCheckpoint.of(str(storage.path), rejected)
    return None


def open_checkpoint(folder: Folder) -> Opened:
    """A checkpoint, verified."""
    opened = read_index(folder)
    verify_shards(opened)
    return opened


def verify_shards(opened: Opened, rank: int = 0, size: int = 1) -> None:
    """InvalidCheckpoint unless the shards are what the manifest says. This rank reads one in `size`."""
    files = opened.manifest.files
    shards = sorted(files.keys() - {METADATA, STATE}, key=lambda name: (-files[name].bytes, name))
    for name in shards[rank::size]:
        check_digest(opened.folder, opened.manifest, name, opened.stamps[name])


def read_index(folder: Folder) -> Opened:
    """Reads what a checkpoint says of itself, verified; of the shards the sizes alone."""
    if not folder.exists():
        raise InvalidCheckpoint.of(folder.name, "there is no such directory.")
    manifest = read_manifest(folder)
    stamps = check_sizes(folder, manifest)
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    limit = metadata.size_limit(folder, sizes)
    entries = metadata.decode(read_verified(folder, manifest, METADATA, limit), sizes)
    state = json_object(read_verified(folder, manifest, STATE, MAX_JSON_BYTES), STATE)
    if type(state.get("values")) is not dict:
        raise InvalidCheckpoint.of(STATE, "has no values.")
    return Opened(folder, manifest, entries, state["values"], state.get("config"), stamps)


def _by_name(which: Location | int) -> bool:
    """Whether `which` is a checkpoint of the run's own storage."""
    return isinstance(which, int) or which == "newest"


def _names(storage: Storage, which: Location | int) -> list[str]:
    """Folders of the storage to try, in this order. Rank 0 looks for all."""
    if isinstance(which, Path) or (isinstance(which, str) and "://" in which):
        return []
    with suppress(OSError):  # a directory that may only be read has to be enough
        storage.recover()
    if isinstance(which, int):
        return [directory_name(which)]
    if which != "newest":
        raise ValueError(f"which={which!r}: expected 'newest', a step (int), a directory (Path) or a URL.")
    return [folder.name for _, folder in storage.candidates()]


def as_stored(flat: Flat, opened: Opened) -> Flat:
    """`flat`, with entries that the checkpoint has under a former name under that name (`Part.former`)."""
    tensors: dict[str, Tensor | Part] = {}
    paths = dict(flat.paths)
    for name, tensor in flat.tensors.items():
        former = tensor.former if isinstance(tensor, Part) else None
        if former is None or name in opened.entries or former.name not in opened.entries:
            tensors[name] = tensor
            continue
        assert isinstance(tensor, Part)
        views = tuple((tuple(a + b for a, b in zip(offset, former.offset)), view) for offset, view in tensor.views)
        before = tensors.get(former.name)
        views = (before.views if isinstance(before, Part) else ()) + views
        tensors[former.name] = Part(former.shape, tensor.dtype, views, tensor.writes, tensor.optional)
        paths.setdefault(former.name, paths.pop(name))
    return Flat(tensors, flat.values, paths)


# ---------------------------------------------------------------------------------------------------------- comparison

Texts = dict[str, str]
"""name -> the name with what was found, for the message"""


def _compare(team: Team, what: str, opened: Opened, flat: Flat, relaxed: Relaxed) -> set[str]:
    """Names to restore in this rank. ValueError in every rank, with the keys, for differences that are not allowed."""
    differences = _differences(opened, flat)
    stored = set(opened.entries) | set(opened.values)

    def combine(parts: list[tuple[list[str], tuple[Texts, Texts, Texts]]]) -> None:
        wanted = {name for part in parts for name in part[0]}
        every = [{n: text for _, texts in parts for n, text in texts[i].items()} for i in range(3)]
        found = [
            ("missing in the checkpoint", "missing", every[0], relaxed.missing),
            ("stored and not wanted", "extra", {n: n for n in stored - wanted}, relaxed.extra),
            ("of another shape", "shape", every[1], relaxed.shape),
            ("of another type", "dtype", every[2], relaxed.dtype),
        ]
        problems = []
        for text, field, names, allow in found:
            if refused := [names[n] for n in sorted(names) if not _allowed(n, allow)]:
                problems.append(f"{len(refused)} {text}: {listed(refused)} (Relaxed({field}=...) allows it)")
        if problems:
            raise ValueError("\n  ".join(["the checkpoint differs from the state:", *problems]))

    names = list(flat.paths)
    team.agree(what, lambda: (names, differences), combine)
    return {name for name in names if name in stored and name not in differences[1]}


def _differences(opened: Opened, flat: Flat) -> tuple[Texts, Texts, Texts]:
    """Of this rank: names that are missing, of another shape, of another type."""
    missing, shape, dtype = {}, {}, {}
    for name, tensor in flat.tensors.items():
        entry = opened.entries.get(name)
        if entry is None:
            if name in opened.values:
                shape[name] = f"{name} (stored: a plain value)"
            elif not (isinstance(tensor, Part) and tensor.optional):
                missing[name] = name
        elif entry.shape != tuple(tensor.shape):
            shape[name] = f"{name} (stored: {entry.shape}, wanted: {tuple(tensor.shape)})"
        elif entry.dtype != tensor.dtype:
            dtype[name] = f"{name} (stored: {entry.dtype}, wanted: {tensor.dtype})"
    for name, value in flat.values.items():
        if name in opened.entries:
            shape[name] = f"{name} (stored: a tensor)"
        elif name not in opened.values:
            missing[name] = name
        elif type(opened.values[name]) is not type(value) and None not in (value, opened.values[name]):
            dtype[name] = f"{name} (stored: {type(opened.values[name]).__name__}, wanted: {type(value).__name__})"
    return missing, shape, dtype


def _allowed(name: str, allow: Allow) -> bool:
    return allow if isinstance(allow, bool) else any(fnmatchcase(name, pattern) for pattern in allow)


# ---------------------------------------------------------------------------------------------------------- reading


def plan_reads(opened: Opened, flat: Flat, wanted: set[str]) -> list[Read]:
    """What this rank reads. InvalidCheckpoint if an archive is not what the index says, or an element is stored nowhere."""
    reads: list[Read] = []
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        positions: dict[tuple[str, int], int] = {}
        for name, tensor in flat.tensors.items():
            if name not in wanted:
                continue
            entry = opened.entries[name]
            for offset, target in part_of(name, tensor).views:
                box, covered = (offset, tuple(target.shape)), 0
                for chunk in entry.chunks:
                    common = overlap(box, chunk.box)
                    if common is None:
                        continue
                    place = chunk.file, chunk.start
                    if place not in positions:
                        if chunk.file not in files:
                            files[chunk.file] = stack.enter_context(opened.folder.open(chunk.file))
                        positions[place] = find_data(files[chunk.file], chunk, entry.dtype)
                    part = target[within(common, box)]
                    covered += part.numel()
                    reads.append(Read(part, chunk, entry.dtype, within(common, chunk.box), positions[place]))
                if covered != target.numel():
                    raise InvalidCheckpoint.of(
                        METADATA, f"{name}: {covered} of {target.numel()} elements of {box} are stored."
                    )
    return reads


def read_all(opened: Opened, reads: list[Read]) -> None:
    """Fills the tensors, file by file in the order of their bytes. InvalidCheckpoint if a file is not what was verified."""
    buffer = bytearray()
    ordered = sorted(reads, key=lambda r: (r.chunk.file, r.position))
    for name, own in groupby(ordered, lambda r: r.chunk.file):
        with torch.no_grad(), opened.folder.open(name) as file:
            for read in own:
                buffer = _read(file, read, buffer)
            check_stamp(name, file, opened.stamps[name])


def _read(file: BinaryIO, read: Read, buffer: bytearray) -> bytearray:
    """One part of one box, some rows at a time; returns the buffer, larger if it had to be."""
    shape, part, target = read.chunk.shape or (1,), read.part or (slice(0, 1),), read.target
    target = target.view(1) if target.dim() == 0 else target
    row_bytes = read.dtype.itemsize * math.prod(shape[1:])
    if _is_stretch(read, target, shape, part):
        memory = (ctypes.c_char * target.nbytes).from_address(target.data_ptr())
        _fill(file, read, memoryview(memory).cast("B"), read.position + part[0].start * row_bytes)
        # Writes nothing, and tells everyone who watches the tensor's version that it was written.
        target.view(-1)[:0].zero_()
        return buffer
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(part[0].start, part[0].stop, rows):
        count = min(rows, part[0].stop - first)
        if len(buffer) < count * row_bytes:
            buffer = bytearray(count * row_bytes)
        _fill(file, read, memoryview(buffer)[: count * row_bytes], read.position + first * row_bytes)
        block = torch.frombuffer(buffer, dtype=read.dtype, count=count * row_bytes // read.dtype.itemsize)
        at = first - part[0].start
        target[at : at + count].copy_(block.view(count, *shape[1:])[(slice(None), *part[1:])])
    return buffer


def _is_stretch(read: Read, target: Tensor, shape: tuple[int, ...], part: tuple[slice, ...]) -> bool:
    """Whether the bytes in the file are those of the target's memory, one after the other: no need for a copy in between."""
    whole_rows = all((p.start, p.stop) == (0, n) for p, n in zip(part[1:], shape[1:]))
    return whole_rows and read.dtype == target.dtype and target.device.type == "cpu" and target.is_contiguous()


def _fill(file: BinaryIO, read: Read, view: memoryview, position: int) -> None:
    file.seek(position)
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise InvalidCheckpoint.of(
                read.chunk.file, f"ends at byte {position}: it was truncated after it was verified."
            )
        view, position = view[count:], position + count
