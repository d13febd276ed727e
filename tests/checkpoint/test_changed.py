"""What is read is what was verified: a file that is written to or replaced in between is an error with its name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.hostile import METADATA, SHARD, STATE
from ottava.checkpoint import CheckpointError, Checkpoints, InvalidCheckpoint, Reader
from ottava.models.safetensors_file import File, Spec, Writer

load = importlib.import_module("ottava.checkpoint.load")


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(700)
        file.write(b"\1\2\3\4")


def _overwrite_and_set_the_time_back(path: Path) -> None:
    before = path.stat()
    _overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


CHANGES = [_overwrite, _overwrite_and_set_the_time_back, _replace]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Checkpoints(tmp_path).save(1, {"w": torch.arange(4096.0).view(64, 64), "step": 1})  # type: ignore[return-value]


@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_refuses_a_shard_that_is_another_than_it_verified(
    folder: Path, change: Callable[[Path], None]
) -> None:
    reader = Reader(folder)
    assert torch.equal(reader.read("w"), torch.arange(4096.0).view(64, 64))
    change(folder / SHARD)
    with pytest.raises(InvalidCheckpoint, match=SHARD):
        reader.read("w")


@pytest.mark.parametrize("change", CHANGES)
def test_loading_refuses_a_shard_that_changes_after_its_hash(
    folder: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = load.plan_reads

    def then_changed(*given: Any) -> Any:
        reads = planned(*given)
        change(folder / SHARD)
        return reads

    monkeypatch.setattr(load, "plan_reads", then_changed)
    with pytest.raises(CheckpointError, match=f"{SHARD}: was changed or replaced while it was read"):
        Checkpoints(folder.parent).load({"w": torch.zeros(64, 64), "step": 0})


@pytest.mark.parametrize("name", [METADATA, STATE])
def test_small_files_are_read_once(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    before = load.read_verified

    def then_changed(folder_: Any, manifest: Any, name_: str, most: int) -> bytes:
        opened.append(name_)
        data = before(folder_, manifest, name_, most)
        (folder / name_).write_bytes(b"evil")
        return data

    monkeypatch.setattr(load, "read_verified", then_changed)
    reader = Reader(folder)  # what was hashed is what was understood
    assert (
        opened.count(name) == 1 and reader.values["step"] == 1 and torch.equal(reader.read("w")[0], torch.arange(64.0))
    )


def test_a_hugging_face_file_that_changes_after_its_header_was_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with Writer(path, {"w": Spec(torch.float32, (512,))}) as writer:
        writer.add("w", torch.ones(512))
    file = File(path)
    assert torch.equal(file.read("w"), torch.ones(512))
    _overwrite(path)
    with pytest.raises(InvalidCheckpoint, match=r"model.safetensors: was changed or replaced"):
        file.read("w")
