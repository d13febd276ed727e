"""`manifest.json`: what a checkpoint consists of. A checkpoint exists if and only if its manifest verifies."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from ottava.checkpoint.digest import digest_of
from ottava.checkpoint.errors import InvalidCheckpoint, shown
from ottava.checkpoint.names import (
    MANIFEST,
    MAX_JSON_BYTES,
    METADATA,
    STATE,
    check_file_name,
    step_of,
)
from ottava.checkpoint.storage import Folder, size_of
from ottava.exchange import travels
from ottava.untrusted.files import once_each
from ottava.untrusted.stamps import Stamp, bytes_held, stamp_of

SCHEMA = "ottava-checkpoint"
VERSION = 1
MOST_HOLES = 1 << 30  # bytes of all files that may be holes but for one in 256


@travels
@dataclass(frozen=True)
class FileEntry:
    """One file: its size and the hexadecimal digest of its content."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Everything that `manifest.json` says."""

    step: int
    world_size: int
    meshes: list[dict[str, int]]
    """Device meshes of the tensors, each as {dimension's name: size}."""
    dtypes: dict[str, dict[str, int]]
    """dtype -> {"tensors": how many, "bytes": of all of them}"""
    hash: str
    """Algorithm of the digests."""
    files: dict[str, FileEntry]
    torch: str
    ottava: str
    config_digest: str
    saved_at: str
    """UTC, ISO 8601."""
    byteorder: str = sys.byteorder

    @property
    def total_bytes(self) -> int:
        """Of all files but the manifest itself."""
        return sum(f.bytes for f in self.files.values())

    def encode(self) -> bytes:
        """The file's content: with a digest of itself, so that a flipped bit anywhere in it shows."""
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "digest": _own_digest(body)}, indent=1, sort_keys=True).encode()


def config_digest(config: Any) -> str:
    """Short digest of a configuration, the same for the same values in any order."""
    return hashlib.blake2b(_canonical(config), digest_size=16).hexdigest()


def read_small(folder: Folder, name: str, most: int) -> bytes:
    """All bytes of a file that may have at most `most`."""
    with folder.open(name) as file:
        return read_at_most(file, name, most)


def read_at_most(file: BinaryIO, name: str, most: int) -> bytes:
    """All bytes of an open file that may have at most `most`."""
    size = size_of(file)
    if size > most:
        raise InvalidCheckpoint.of(name, f"has {size} bytes; at most {most} are read.")
    data = b""
    while len(data) <= most and (block := file.read(most + 1 - len(data))):
        data += block
    if len(data) > most:
        raise InvalidCheckpoint.of(name, f"grows while it is read; at most {most} bytes are.")
    return data


def read_json(folder: Folder, name: str) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint, of at most `MAX_JSON_BYTES`."""
    return json_object(read_small(folder, name, MAX_JSON_BYTES), name)


def json_object(text: bytes, name: str) -> dict[str, Any]:
    """What the text of the file `name` says."""
    try:
        value = json.loads(text, object_pairs_hook=once_each)
    # Not JSON, not UTF-8, a number of thousands of digits; nested too deep.
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint.of(name, f"is not valid JSON (truncated or damaged): {str(error)[:120]}") from error
    if type(value) is not dict:
        raise InvalidCheckpoint.of(name, "is not a JSON object.")
    return value


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint, checked against itself; its files are not looked at."""
    folder.check_kind()
    body = read_json(folder, MANIFEST)
    if body.get("schema") != SCHEMA or body.get("version") != VERSION:
        found = f"{body.get('schema')!r:.40} version {body.get('version')!r:.20}"
        raise InvalidCheckpoint.of(MANIFEST, f"expected {SCHEMA!r} version {VERSION}, found {found}.")
    digest = body.pop("digest", None)
    if digest != _own_digest(body):
        raise InvalidCheckpoint.of(MANIFEST, "does not match its own digest: it was damaged or changed.")
    manifest = _checked(body)
    if manifest.byteorder != sys.byteorder:
        raise InvalidCheckpoint.of(
            MANIFEST, f"was written on a {manifest.byteorder}-endian machine; this one is {sys.byteorder}."
        )
    if (step := step_of(folder.name)) is not None and step != manifest.step:
        raise InvalidCheckpoint.of(MANIFEST, f"is of step {manifest.step}, in a directory of step {step}.")
    return manifest


def check_sizes(folder: Folder, manifest: Manifest) -> dict[str, Stamp]:
    """InvalidCheckpoint unless every file is there, a plain file, and as long as the manifest says. What each is known by."""
    check_holes(folder, manifest)
    stamps = {}
    for name, entry in manifest.files.items():
        with folder.open(name) as file:
            size, stamps[name] = size_of(file), stamp_of(file)
        if size != entry.bytes:
            raise InvalidCheckpoint.of(name, f"has {size} bytes, the manifest says {entry.bytes}.")
    return stamps


def check_holes(folder: Folder, manifest: Manifest) -> None:
    """Reading terabytes of holes takes as long as reading data, and costs who sent them nothing: InvalidCheckpoint."""
    found = {}  # (bytes, bytes that are no holes)
    for name in manifest.files:
        with suppress(InvalidCheckpoint), folder.open(name) as file:
            found[name] = size_of(file), bytes_held(file)
    total, held = (sum(numbers) for numbers in zip((0, 0), *found.values()))
    if total > max(MOST_HOLES, 256 * held):
        name = max(found, key=lambda n: found[n][0] - found[n][1])
        reason = f"of its {found[name][0]} bytes {found[name][1]} are there, the rest are holes"
        raise InvalidCheckpoint.of(name, f"{reason}: if it is yours, copy it with `cp --sparse=never`.")


def read_verified(folder: Folder, manifest: Manifest, name: str, most: int) -> bytes:
    """All bytes of a file that may have at most `most`, if they are what the manifest says."""
    data = read_small(folder, name, most)
    _compare_digest(manifest, name, *digest_of(io.BytesIO(data), manifest.hash))
    return data


def check_digest(folder: Folder, manifest: Manifest, name: str, stamp: Stamp | None = None) -> None:
    """InvalidCheckpoint unless the content of a file is what the manifest says. stamp: what it has to be known by still."""
    with folder.open(name) as file:
        if (size := size_of(file)) != manifest.files[name].bytes:
            raise InvalidCheckpoint.of(name, f"has {size} bytes, the manifest says {manifest.files[name].bytes}.")
        found = digest_of(file, manifest.hash)
        check_stamp(name, file, stamp)
    _compare_digest(manifest, name, *found)


def check_stamp(name: str, file: BinaryIO, stamp: Stamp | None) -> None:
    """InvalidCheckpoint if an open file is not the one, in the state, that was verified."""
    if stamp is not None and stamp_of(file) != stamp:
        raise InvalidCheckpoint.of(name, "was changed or replaced while it was read.")


def _compare_digest(manifest: Manifest, name: str, size: int, digest: str) -> None:
    if (size, digest) != (manifest.files[name].bytes, manifest.files[name].digest):
        raise InvalidCheckpoint.of(
            name, f"its {manifest.hash} is {digest}, the manifest says {shown(manifest.files[name].digest)}."
        )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _own_digest(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(_canonical(body), digest_size=16).hexdigest()


def _checked(body: dict[str, Any]) -> Manifest:
    """A manifest with every field of the right type."""

    def take(name: str, kind: type) -> Any:
        if type(body.get(name)) is not kind:
            raise InvalidCheckpoint.of(
                MANIFEST, f"{name} is a {type(body.get(name)).__name__}, expected a {kind.__name__}."
            )
        return body[name]

    files = {}
    for name, entry in take("files", dict).items():
        check_file_name(name, MANIFEST)
        size, digest = (entry.get("bytes"), entry.get("digest")) if type(entry) is dict else (None, None)
        if type(size) is not int or size < 0 or type(digest) is not str:
            raise InvalidCheckpoint.of(MANIFEST, f"the entry of {name} has no size and digest.")
        files[name] = FileEntry(size, digest)
    for name in (METADATA, STATE):
        if name not in files:
            raise InvalidCheckpoint.of(MANIFEST, f"does not list {name}.")
    texts = {name: take(name, str) for name in ("hash", "torch", "ottava", "config_digest", "saved_at", "byteorder")}
    numbers = {name: take(name, int) for name in ("step", "world_size")}
    return Manifest(files=files, meshes=take("meshes", list), dtypes=take("dtypes", dict), **texts, **numbers)
