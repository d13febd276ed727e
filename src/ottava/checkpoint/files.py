"""Writing the files of a checkpoint into a folder: shards, then the index, the plain values and the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ottava.checkpoint import metadata
from ottava.checkpoint.archive import write_tensor
from ottava.checkpoint.boxes import Box
from ottava.checkpoint.digest import HashedFile
from ottava.checkpoint.errors import CheckpointError
from ottava.checkpoint.flat import Path
from ottava.checkpoint.manifest import FileEntry, Manifest, config_digest
from ottava.checkpoint.metadata import Chunk, Entry
from ottava.checkpoint.names import MANIFEST, MAX_JSON_BYTES, METADATA, STATE
from ottava.checkpoint.storage import Folder
from ottava.exchange import travels


@travels
@dataclass(frozen=True)
class Written:
    """Report about a shard."""

    file: str
    entry: FileEntry | None
    """None: there was nothing to write, and no file was made."""
    places: list[tuple[int, int]]
    """(start, length) of each tensor's archive."""


@dataclass(frozen=True)
class About:
    """What the manifest says of a checkpoint beside its files."""

    step: int
    world_size: int
    meshes: list[dict[str, int]]
    hash: str


def write_shard(
    folder: Folder, name: str, tensors: Iterable[Tensor], hash: str, hook: Callable[[str], None] = lambda phase: None
) -> Written:
    """A file with these tensors (contiguous, on the CPU, each alone in its storage), durable when this returns."""
    try:
        with folder.create(name) as raw:
            file = HashedFile(raw, hash)
            try:
                places = [write_tensor(file, tensor) for tensor in tensors]
            except RuntimeError:
                if file.error is None:
                    raise
                raise file.error from None
            finally:
                file.close()
            hook("fsync")
            folder.make_durable(raw)
        hook("hash")
        return Written(name, FileEntry(file.bytes, file.digest()), places)
    except OSError as error:
        raise _of_file(error, name) from error


def check_shards(folder: Folder, reports: Sequence[Written], counts: Sequence[int]) -> dict[str, FileEntry]:
    """The shards, if every rank wrote as many boxes as were planned and the storage has the bytes that the ranks say."""
    files = {}
    for rank, (report, count) in enumerate(zip(reports, counts, strict=True)):
        if len(report.places) != count:
            raise CheckpointError(f"{report.file}: rank {rank} wrote {len(report.places)} of {count} boxes.")
        if report.entry is None:
            continue
        size = folder.size(report.file)
        if size != report.entry.bytes:
            raise CheckpointError(f"{report.file}: rank {rank} wrote {report.entry.bytes} bytes, the disk has {size}.")
        files[report.file] = report.entry
    return files


def entries_of(
    tensors: Mapping[str, Any], items: Sequence[Sequence[tuple[str, Box]]], reports: Sequence[Written]
) -> dict[str, Entry]:
    """The index. tensors: what has a dtype and a shape, by name; items: what each report's file was to hold, in its order."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for report, own in zip(reports, items):
        for (name, (offset, shape)), (start, length) in zip(own, report.places):
            chunks[name].append(Chunk(offset, shape, report.file, start, length))
    return {name: Entry(held.dtype, held.shape, tuple(chunks[name])) for name, held in tensors.items()}


def seal(
    folder: Folder,
    about: About,
    entries: Mapping[str, Entry],
    paths: Mapping[str, Path],
    state: bytes,
    shards: Mapping[str, FileEntry],
) -> None:
    """Writes the index, the plain values and, last, the manifest. state: from `encode_state`."""
    files = dict(shards)
    files[METADATA] = _write_small(folder, METADATA, metadata.encode(entries, paths), about.hash)
    files[STATE] = _write_small(folder, STATE, state, about.hash)
    manifest = Manifest(
        step=about.step,
        world_size=about.world_size,
        meshes=about.meshes,
        dtypes=_count_dtypes(entries),
        hash=about.hash,
        files=files,
        torch=str(torch.__version__),
        ottava=_own_version(),
        config_digest=config_digest(json.loads(state)["config"]),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    content = manifest.encode()
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(f"{MANIFEST} would have {len(content)} bytes; at most {MAX_JSON_BYTES} are read.")
    _write_small(folder, MANIFEST, content, about.hash)
    folder.sync()


def encode_state(values: Mapping[str, Any], config: Mapping[str, Any] | None) -> bytes:
    """The content of `state.json`. ValueError for what JSON cannot hold, or too much of it."""
    content = json.dumps({"values": values, "config": config}, indent=1, sort_keys=True, allow_nan=False).encode()
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(
            f"The state has {len(content)} bytes of plain values, at most {MAX_JSON_BYTES} are kept: use tensors for large ones."
        )
    return content


def _write_small(folder: Folder, name: str, content: bytes, hash: str) -> FileEntry:
    try:
        with folder.create(name) as raw:
            file = HashedFile(raw, hash)
            file.write(content)
            folder.make_durable(raw)
    except OSError as error:
        raise _of_file(error, name) from error
    return FileEntry(file.bytes, file.digest())


def _of_file(error: OSError, name: str) -> OSError:
    """A failed write does not say of which file; an error of a remote storage may have no number."""
    return OSError(error.errno, error.strerror, name) if error.strerror else OSError(5, str(error), name)


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
