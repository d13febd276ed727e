"""Looking at checkpoints from one CPU process, without loading them: `ls`, `verify`, `newest`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ottava.checkpoint import metadata
from ottava.checkpoint.archive import find_data
from ottava.checkpoint.errors import InvalidCheckpoint, NoUsableCheckpoint, Rejected, shown
from ottava.checkpoint.manifest import check_digest, check_holes, check_sizes, read_json, read_manifest, read_small
from ottava.checkpoint.names import MANIFEST, METADATA, STATE, step_of
from ottava.checkpoint.storage import Folder, Location, folder_at, storage_at

WIDEST = 100
"""Letters to which names are filled up."""


@dataclass(frozen=True)
class Row:
    """One line of an answer. `str(row)` prints it."""

    name: str
    good: bool
    text: str
    width: int = 24
    """Of the names of this answer."""

    def __str__(self) -> str:
        return f"{self.name:<{self.width}} {'ok ' if self.good else 'BAD'} {self.text}"


def ls(path: Location) -> Iterator[Row]:
    """The checkpoints in a directory, newest first; or, of one checkpoint, its tensors. Sizes are checked, contents are not.

    >>> for row in ls("run/checkpoints"):
    ...     print(row)
    step-00000100            ok  12.0 MB in 4 files, 2 ranks {'dp': 2}, float32, 2026-07-01T12:00:00+00:00
    """
    if checkpoint := _checkpoint(path):
        yield from _tensors(checkpoint)
        return
    for _, folder in storage_at(path).candidates():
        try:
            yield Row(folder.name, True, _summary(folder))
        except (InvalidCheckpoint, OSError) as error:
            yield Row(folder.name, False, str(error))


def verify(path: Location) -> Iterator[Row]:
    """Every file of a checkpoint, or of all checkpoints in a directory, against its manifest, and the index against the files.

    One row a file as it is done; reads in blocks, so a checkpoint may be larger than the memory.

    >>> all(row.good for row in verify("run/checkpoints/step-00000100"))
    True
    """
    checkpoint = _checkpoint(path)
    for folder in [checkpoint] if checkpoint else [folder for _, folder in storage_at(path).candidates()]:
        yield from _verify(folder)


def newest(path: Location) -> Location:
    """`path` if it is one checkpoint; of a directory of checkpoints the newest that verifies: its files are read.

    >>> newest("run/checkpoints")
    PosixPath('/home/me/run/checkpoints/step-00000100')
    """
    if _checkpoint(path):
        return path
    rejected = []
    for _, folder in storage_at(path).candidates():
        if not (bad := [row for row in _verify(folder) if not row.good]):
            return folder.path
        rejected.append(Rejected(str(folder.path), bad[0].text))
    raise NoUsableCheckpoint.of(str(path), rejected)


def _checkpoint(path: Location) -> Folder | None:
    """The checkpoint that `path` is; None for a directory of checkpoints."""
    folder = folder_at(path)
    if step_of(folder.name) is not None:
        return folder
    try:
        folder.open(MANIFEST).close()
    except InvalidCheckpoint:
        return None
    return folder


def _verify(folder: Folder) -> Iterator[Row]:
    try:
        manifest = read_manifest(folder)
        check_holes(folder, manifest)
    except (InvalidCheckpoint, OSError) as error:
        yield Row(folder.name, False, str(error))
        return
    good = True
    for name, entry in sorted(manifest.files.items()):
        try:
            check_digest(folder, manifest, name)
            yield Row(f"  {name}", True, f"{_size(entry.bytes)}, {manifest.hash} {entry.digest}")
        except (InvalidCheckpoint, OSError) as error:
            good = False
            yield Row(f"  {name}", False, str(error))
    if not good:
        yield Row(folder.name, False, "some files are not what the manifest says.")
        return
    try:
        count = _check_index(folder)
        yield Row(folder.name, True, f"{_summary(folder)}; {count} boxes found")
    except (InvalidCheckpoint, OSError) as error:
        yield Row(folder.name, False, str(error))


def _check_index(folder: Folder) -> int:
    """Looks for the data of every box where the index says; how many there are."""
    if type(read_json(folder, STATE).get("values")) is not dict:
        raise InvalidCheckpoint.of(STATE, "has no values.")
    count = 0
    for entry in _entries(folder).values():
        for chunk in entry.chunks:
            with folder.open(chunk.file) as file:
                find_data(file, chunk, entry.dtype)
            count += 1
    return count


def _entries(folder: Folder) -> dict[str, metadata.Entry]:
    manifest = read_manifest(folder)
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    check_sizes(folder, manifest)
    return metadata.decode(read_small(folder, METADATA, metadata.size_limit(folder, sizes)), sizes)


def _tensors(folder: Folder) -> Iterator[Row]:
    try:
        entries = [(shown(name), entry) for name, entry in _entries(folder).items()]
        width = min(max((len(name) for name, _ in entries), default=0), WIDEST)
        for name, entry in entries:
            boxes = "1 box" if len(entry.chunks) == 1 else f"{len(entry.chunks)} boxes"
            dtype = str(entry.dtype).removeprefix("torch.")
            yield Row(name, True, f"{dtype} {list(entry.shape)}, {_size(entry.nbytes)} in {boxes}", width)
    except (InvalidCheckpoint, OSError) as error:
        yield Row(folder.name, False, str(error))


def _summary(folder: Folder) -> str:
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    meshes = " ".join(shown(str(m)) for m in manifest.meshes)
    ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size != 1)}"
    parts = [f"{_size(manifest.total_bytes)} in {len(manifest.files)} files", f"{ranks} {meshes}".strip()]
    return ", ".join([*parts, *(shown(d) for d in sorted(manifest.dtypes)), shown(manifest.saved_at)])


def _size(count: int) -> str:
    """
    >>> _size(12_000_000)
    '12.0 MB'
    """
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
