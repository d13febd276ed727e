"""One save: plan, stage, write, commit ([design note 3] has the protocol).

    save = Save.begin(team, root, step, state, options)    all ranks agree who writes what; rank 0 makes the directory
    save.stage(buffers)                                    optional: copies what this rank writes, so that training can go on
    save.finish()                                          writes, then rank 0 checks everything and commits

What is in the directory before the last rename is called `step-N.tmp-...` and is nobody's checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ottava.checkpoint import directory, metadata
from ottava.checkpoint.archive import write_tensor
from ottava.checkpoint.boxes import Box, Pieces, one_piece, part_of
from ottava.checkpoint.digest import HashedFile
from ottava.checkpoint.errors import CheckpointError
from ottava.checkpoint.flat import Flat, flatten
from ottava.checkpoint.manifest import FileEntry, Manifest, config_digest
from ottava.checkpoint.metadata import Chunk, Entry
from ottava.checkpoint.names import MANIFEST, MAX_JSON_BYTES, METADATA, STATE, shard_name, sync_directory
from ottava.checkpoint.plan import Item, Offer, SavePlan, make_plan, offer
from ottava.checkpoint.team import Team

PHASES = ("planning", "staging", "writing", "fsync", "hash", "manifest", "rename", "prune")
"""In their order. Every rank passes the first five (staging in asynchronous saves only), rank 0 the others."""


def no_hook(phase: str) -> None:
    """The default of `SaveOptions.hook`."""


@dataclass(frozen=True)
class SaveOptions:
    """What stays the same from save to save."""

    hash: str
    """Algorithm of the files' digests (digest.py)."""
    keep_last: int = 0
    keep_every: int = 0
    pieces: Pieces = one_piece
    config: Mapping[str, Any] | None = None
    hook: Callable[[str], None] = no_hook
    """Called with the name of each phase as it begins. Tests end the process there."""


@dataclass(frozen=True)
class Written:
    """A rank's report."""

    file: str
    entry: FileEntry | None
    """None: the rank had nothing to write and made no file."""
    places: list[tuple[int, int]]
    """(start, length) of each item's archive."""


class Save:
    """One save in progress, in every rank."""

    def __init__(self, team: Team, root: Path, step: int, options: SaveOptions) -> None:
        self.team, self.root, self.step, self.options = team, root, step, options
        self.directory = Path()
        self._plan: SavePlan | None = None  # in rank 0
        self._items: list[Item] = []
        self._sources: dict[Item, Tensor] = {}
        self._staging_error: Exception | None = None

    @property
    def _what(self) -> str:
        return f"step {self.step} was not saved"

    @classmethod
    def begin(cls, team: Team, root: Path, step: int, state: Mapping[str, Any], options: SaveOptions) -> Save:
        """Agrees who writes what. The tensors must not change until they are staged or the save is finished."""
        save = cls(team, root, step, options)
        flat = Flat({}, {}, {})

        def work() -> tuple[int, Offer]:
            nonlocal flat
            options.hook("planning")
            if type(step) is not int or not 0 <= step < 10**18:
                raise ValueError(f"step={step!r}: expected an integer from 0.")
            flat = flatten(state)
            return step, offer(flat, options.pieces)

        def combine(parts: list[tuple[int, Offer]]) -> list[tuple[str, list[Item]]]:
            if len(steps := sorted({s for s, _ in parts})) > 1:
                raise ValueError(f"ranks save different steps: {steps[:8]}.")
            save._plan = make_plan([offered for _, offered in parts])
            _encode_state(save._plan.values, options.config)  # its mistakes now, not after an hour of writing
            _make_root(root)
            directory.sweep(root)
            temporary = directory.temporary(root, step)
            os.mkdir(temporary)
            return [(str(temporary), items) for items in save._plan.items]

        name, save._items = team.agree(save._what, work, combine, scatter=True)
        save.directory = Path(name)
        save._sources = _sources(save._items, flat, options.pieces)
        return save

    def stage(self, buffers: dict[Item, Tensor]) -> None:
        """Copies what this rank writes into `buffers`, whose memory is used again from save to save.

        An error is kept for `finish`, where all ranks learn of it.
        """
        try:
            self._stage(buffers)
        except Exception as error:
            self._staging_error = error

    def _stage(self, buffers: dict[Item, Tensor]) -> None:
        self.options.hook("staging")
        wanted = set(self._sources)
        for item in [i for i in buffers if i not in wanted]:
            del buffers[item]
        for item, source in self._sources.items():
            buffer = buffers.get(item)
            if buffer is None or buffer.dtype != source.dtype:
                buffer = buffers[item] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=True)
        if any(s.is_cuda for s in self._sources.values()):
            torch.cuda.synchronize()
        self._sources = {item: buffers[item] for item in self._sources}

    def finish(self, team: Team | None = None) -> Path:
        """Writes and commits; the checkpoint's directory. team: to be used instead, by another thread than that of `begin`."""
        team = team or self.team
        try:
            return Path(team.agree(self._what, self._write, lambda reports: str(self._commit(reports))))
        except (CheckpointError, ValueError):
            if team.rank == 0:
                with suppress(OSError):  # the next sweep tries again
                    shutil.rmtree(self.directory)
            raise
        finally:
            self._sources = {}

    # ------------------------------------------------------------------------------------------------------ every rank

    def _write(self) -> Written:
        """Writes this rank's file and makes it durable."""
        if self._staging_error is not None:
            raise self._staging_error
        name, hook = shard_name(self.team.rank), self.options.hook
        hook("writing")
        if not self._items:
            return Written(name, None, [])
        path = self.directory / name
        try:
            with open(path, "xb", buffering=0) as raw:
                file = HashedFile(raw, self.options.hash)
                try:
                    places = [write_tensor(file, _standalone(self._sources[item])) for item in self._items]
                except RuntimeError:
                    if file.error is None:
                        raise
                    raise file.error from None
                hook("fsync")
                os.fsync(raw.fileno())
            hook("hash")
            return Written(name, FileEntry(file.bytes, file.digest()), places)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # a write does not say of which file

    # ------------------------------------------------------------------------------------------------------ rank 0

    def _commit(self, reports: Sequence[Written]) -> Path:
        """Compares the reports with the plan and the disk, writes the small files, renames, prunes."""
        assert self._plan is not None
        plan, options = self._plan, self.options
        files = _files_on_disk(self.directory, reports, plan)
        options.hook("manifest")
        entries = _entries(plan, reports)
        files[METADATA] = self._write_small(METADATA, metadata.encode(entries, plan.paths))
        files[STATE] = self._write_small(STATE, _encode_state(plan.values, options.config))
        manifest = Manifest(
            step=self.step,
            world_size=len(reports),
            meshes=plan.meshes,
            dtypes=_count_dtypes(entries),
            hash=options.hash,
            files=files,
            torch=str(torch.__version__),
            ottava=_own_version(),
            config_digest=config_digest(options.config),
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        content = manifest.encode()
        if len(content) > MAX_JSON_BYTES:
            raise CheckpointError(f"{MANIFEST} would have {len(content)} bytes; at most {MAX_JSON_BYTES} are read.")
        self._write_small(MANIFEST, content)
        sync_directory(self.directory)
        options.hook("rename")
        path = directory.publish(self.directory, self.step)
        options.hook("prune")
        with suppress(
            OSError
        ):  # the checkpoint is there; what could not be removed now is tried again after the next save
            directory.prune(self.root, self.step, options.keep_last, options.keep_every)
        return path

    def _write_small(self, name: str, content: bytes) -> FileEntry:
        path = self.directory / name
        try:
            with open(path, "xb", buffering=0) as raw:
                file = HashedFile(raw, self.options.hash)
                file.write(content)
                os.fsync(raw.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        return FileEntry(file.bytes, file.digest())


def _make_root(root: Path) -> None:
    """Creates the run's directory, with every name on the way made durable."""
    if not root.is_dir():
        _make_root(root.parent)
        root.mkdir(exist_ok=True)
        sync_directory(root.parent)


def _sources(items: Sequence[Item], flat: Flat, pieces: Pieces) -> dict[Item, Tensor]:
    """The part of the caller's tensor that each item is: views, no copies."""
    boxes: dict[str, dict[Box, Tensor]] = {}
    for name in {name for name, _ in items}:
        part = part_of(name, flat.tensors[name], pieces)
        boxes[name] = {(offset, tuple(view.shape)): view for offset, view in part.views}
    return {(name, box): boxes[name][box] for name, box in items}


def _standalone(source: Tensor) -> Tensor:
    """`source` as a contiguous CPU tensor with nothing else in its storage: torch.save writes whole storages."""
    tensor = source.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _files_on_disk(folder: Path, reports: Sequence[Written], plan: SavePlan) -> dict[str, FileEntry]:
    """The shards, if every rank wrote every item and the disk has as many bytes as the ranks say."""
    files = {}
    for rank, (report, items) in enumerate(zip(reports, plan.items, strict=True)):
        if len(report.places) != len(items):
            raise CheckpointError(f"{report.file}: rank {rank} wrote {len(report.places)} of {len(items)} boxes.")
        if report.entry is None:
            continue
        size = os.stat(folder / report.file).st_size
        if size != report.entry.bytes:
            raise CheckpointError(f"{report.file}: rank {rank} wrote {report.entry.bytes} bytes, the disk has {size}.")
        files[report.file] = report.entry
    return files


def _entries(plan: SavePlan, reports: Sequence[Written]) -> dict[str, Entry]:
    chunks: dict[str, list[Chunk]] = {name: [] for name in plan.tensors}
    for report, items in zip(reports, plan.items):
        for (name, (offset, shape)), (start, length) in zip(items, report.places):
            chunks[name].append(Chunk(offset, shape, report.file, start, length))
    return {name: Entry(held.dtype, held.shape, tuple(chunks[name])) for name, held in plan.tensors.items()}


def _encode_state(values: Mapping[str, Any], config: Mapping[str, Any] | None) -> bytes:
    content = json.dumps({"values": values, "config": config}, indent=1, sort_keys=True, allow_nan=False).encode()
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(
            f"The state has {len(content)} bytes of plain values, at most {MAX_JSON_BYTES} are kept: use tensors for large ones."
        )
    return content


def _count_dtypes(entries: Mapping[str, Entry]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for entry in entries.values():
        count = counts.setdefault(str(entry.dtype).removeprefix("torch."), {"tensors": 0, "bytes": 0})
        count["tensors"] += 1
        count["bytes"] += entry.nbytes
    return counts


def _own_version() -> str:
    try:
        return version("ottava")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
