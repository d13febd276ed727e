"""Checkpoints that a stranger might send: each a good one, changed, and signed again so that its hashes are right."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ottava.checkpoint import Checkpoints, NoUsableCheckpoint
from ottava.checkpoint.digest import digest_of
from ottava.checkpoint.manifest import FileEntry, Manifest

SHARD, METADATA, MANIFEST, STATE = "__0_0.distcp", ".metadata", "manifest.json", "state.json"


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.marker}'",)


def sign(folder: Path, sizes: dict[str, int] | None = None) -> None:
    """A manifest that fits what is in the folder. sizes: files that are not hashed, and only said to have so many bytes."""
    old = json.loads((folder / MANIFEST).read_text())
    files = {}
    for name in [SHARD, METADATA, STATE]:
        if sizes and name in sizes:
            files[name] = FileEntry(sizes[name], "0" * 32)
        else:
            with open(folder / name, "rb") as file:
                files[name] = FileEntry(*digest_of(file, "blake2b"))
    fields = {
        k: old[k] for k in ("step", "world_size", "meshes", "dtypes", "torch", "ottava", "config_digest", "saved_at")
    }
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_bytes(Manifest(hash="blake2b", files=files, **fields).encode())


def change_index(folder: Path, change: Callable[[Any], Any]) -> None:
    """Writes DCP's metadata anew. Unpickles: the folder is still ours."""
    index = pickle.loads((folder / METADATA).read_bytes())
    index = change(index) or index
    (folder / METADATA).write_bytes(pickle.dumps(index))
    sign(folder)


def _raw_index(folder: Path, data: bytes) -> None:
    (folder / METADATA).write_bytes(data)
    sign(folder)


def _change_place(folder: Path, **fields: Any) -> None:
    def change(index: Any) -> None:
        for name, value in fields.items():
            setattr(next(iter(index.storage_data.values())), name, value)

    change_index(folder, change)


def _change_shape(folder: Path, shape: tuple[int, ...]) -> None:
    def change(index: Any) -> None:
        entry = index.state_dict_metadata["w"]
        entry.size, entry.chunks[0].sizes = torch.Size(shape), torch.Size(shape)

    change_index(folder, change)


def _change_shard(folder: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    change(data)
    (folder / SHARD).write_bytes(data)
    sign(folder)


def _replace_by_link(folder: Path, name: str, target: Path) -> None:
    os.rename(folder / name, target)
    (folder / name).symlink_to(target)


def _sparse(folder: Path, name: str, size: int) -> None:
    with open(folder / name, "r+b") as file:
        file.truncate(size)


# ---------------------------------------------------------------------------------------- name -> (file of the error, what is done)


def payload_in_metadata(folder: Path, outside: Path) -> str:
    _raw_index(folder, pickle.dumps(Payload(outside / "ran")))
    return METADATA


def payload_by_a_torch_function(folder: Path, outside: Path) -> str:
    _raw_index(folder, b"ctorch\nload\n(X\x01\x00\x00\x00xtR.")
    return METADATA


def payload_beside_good_metadata(folder: Path, outside: Path) -> str:
    def change(index: Any) -> None:
        index.planner_data = Payload(outside / "ran")

    change_index(folder, change)
    return METADATA


def a_class_is_changed(folder: Path, outside: Path) -> str:
    """BUILD with a slot state sets attributes of whatever object it is given: here of a class."""
    _raw_index(
        folder,
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x94\x8c\x08Metadata\x94\x93N}\x8c\x07hackedK\x01s\x86b.",
    )
    return METADATA


def memo_bomb(folder: Path, outside: Path) -> str:
    """One instruction that makes Python's C unpickler fill 64 GiB."""
    _raw_index(folder, b"\x80\x04Nr" + struct.pack("<I", 2**32 - 2) + b".")
    return METADATA


def bytes_bomb(folder: Path, outside: Path) -> str:
    _raw_index(folder, b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".")
    return METADATA


def pickled_entry(folder: Path, outside: Path) -> str:
    def change(index: Any) -> None:
        index.state_dict_metadata["evil"] = BytesStorageMetadata()

    change_index(folder, change)
    return METADATA


def path_upwards(folder: Path, outside: Path) -> str:
    _change_place(folder, relative_path="../secret")
    return METADATA


def path_absolute(folder: Path, outside: Path) -> str:
    _change_place(folder, relative_path=str(outside / "secret"))
    return METADATA


def path_in_manifest(folder: Path, outside: Path) -> str:
    body = json.loads((folder / MANIFEST).read_text())
    del body["digest"], body["schema"], body["version"]
    body["files"] = {n: FileEntry(**e) for n, e in body["files"].items()} | {"../secret": FileEntry(1, "0")}
    (folder / MANIFEST).write_bytes(Manifest(**body).encode())
    return MANIFEST


def linked_shard(folder: Path, outside: Path) -> str:
    _replace_by_link(folder, SHARD, outside / "moved")
    return SHARD


def linked_manifest(folder: Path, outside: Path) -> str:
    _replace_by_link(folder, MANIFEST, outside / "moved")
    return MANIFEST


def linked_directory(folder: Path, outside: Path) -> str:
    os.rename(folder, outside / "moved")
    folder.symlink_to(outside / "moved")
    return folder.name


def pipe_for_a_shard(folder: Path, outside: Path) -> str:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    return SHARD


def absurd_tensor(folder: Path, outside: Path) -> str:
    _change_shape(folder, (1 << 40, 1 << 10))
    return METADATA


def absurd_dimensions(folder: Path, outside: Path) -> str:
    _change_shape(folder, (1,) * 5000)
    return METADATA


def place_beyond_the_file(folder: Path, outside: Path) -> str:
    _change_place(folder, offset=1 << 50)
    return METADATA


def place_before_the_file(folder: Path, outside: Path) -> str:
    _change_place(folder, offset=-64)
    return METADATA


def boxes_with_a_gap(folder: Path, outside: Path) -> str:
    def change(index: Any) -> None:
        index.state_dict_metadata["w"].size = torch.Size((17, 4))

    change_index(folder, change)
    return METADATA


def wrong_magic(folder: Path, outside: Path) -> str:
    def change(data: bytearray) -> None:
        data[-22:-18] = b"XXXX"

    _change_shard(folder, change)
    return SHARD


def archive_directory_bomb(folder: Path, outside: Path) -> str:
    def change(data: bytearray) -> None:
        data[-58:-42] = struct.pack("<QQ", 1 << 40, 0)  # the directory's bytes and offset, in the 64-bit end

    _change_shard(folder, change)
    return SHARD


def archive_says_more_than_it_has(folder: Path, outside: Path) -> str:
    def change(data: bytearray) -> None:
        at = data.rfind(b"archive/data/0") - 46  # its record in the directory
        data[at + 20 : at + 28] = struct.pack("<II", 1 << 30, 1 << 30)

    _change_shard(folder, change)
    return SHARD


def huge_manifest(folder: Path, outside: Path) -> str:
    _sparse(folder, MANIFEST, 20 << 30)
    return MANIFEST


def nested_manifest(folder: Path, outside: Path) -> str:
    (folder / MANIFEST).write_text("[" * 1_000_000)
    return MANIFEST


def huge_state(folder: Path, outside: Path) -> str:
    (folder / STATE).write_bytes(b'{"values":[' + b"[]," * (8 << 20) + b"[]]}")
    sign(folder)
    return STATE


def huge_metadata(folder: Path, outside: Path) -> str:
    (folder / METADATA).write_bytes(b"\x80\x04" + b"]" * (32 << 20))
    sign(folder)
    return METADATA


def key_that_is_hashed_for_ever(folder: Path, outside: Path) -> str:
    """A tuple of the same tuple twice, 60 deep: 2^60 hashes."""
    _raw_index(folder, b"\x80\x04})\x94" + b"".join(b"h%c\x86\x94" % i for i in range(60)) + b"K\x01s.")
    return METADATA


def key_that_is_too_deep(folder: Path, outside: Path) -> str:
    """Hashing it would need more stack than there is."""
    _raw_index(folder, b"\x80\x04})" + b"\x85" * 900_000 + b"K\x01s.")
    return METADATA


CASES = [
    *(key_that_is_hashed_for_ever, key_that_is_too_deep),
    *(
        payload_in_metadata,
        payload_by_a_torch_function,
        payload_beside_good_metadata,
        a_class_is_changed,
        memo_bomb,
        bytes_bomb,
    ),
    *(
        pickled_entry,
        path_upwards,
        path_absolute,
        path_in_manifest,
        linked_shard,
        linked_manifest,
        linked_directory,
        pipe_for_a_shard,
    ),
    *(absurd_tensor, absurd_dimensions, place_beyond_the_file, place_before_the_file, boxes_with_a_gap, wrong_magic),
    *(archive_directory_bomb, archive_says_more_than_it_has, huge_manifest, nested_manifest, huge_state, huge_metadata),
]


def open_hostile(rank: int, root: str) -> tuple[str, float, list[str]]:
    """In a process of its own: (the error, MB that it took, names of attributes that appeared in DCP's class)."""
    from torch.distributed.checkpoint.metadata import Metadata

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = ""
    try:
        Checkpoints(root).load({"w": torch.zeros(16, 4), "step": 0}, 1)
    except NoUsableCheckpoint as error:
        text = str(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return text, grown, [n for n in vars(Metadata) if n == "hacked"]
