"""Checkpoints where nothing can be renamed: the manifest is the commit. fsspec's memory and local file systems."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from checkpoint.forked_ranks import Forge
from checkpoint.interrupted_saves import state_of
from ottava.checkpoint import CheckpointError, Checkpoints, NoUsableCheckpoint, ls, reshard, verify
from ottava.checkpoint.remote import RemoteStorage


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    yield f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/run"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/", recursive=True)


def values(checkpoints: Checkpoints, **options: Any) -> tuple[Any, Any]:
    state = state_of(0)
    loaded = checkpoints.load(state, **options)
    assert loaded is not None and torch.equal(state["w"], state_of(state["step"])["w"])
    return loaded, state["step"]


def test_saved_verified_loaded_pruned(url: str) -> None:
    with Checkpoints(url, keep_last=2) as checkpoints:
        assert checkpoints.load(state_of(0)) is None
        for step in (1, 2):
            path = checkpoints.save(step, state_of(step))
        checkpoints.save_async(3, state_of(3))
        checkpoints.wait()
        assert path == f"{url}/step-00000002".replace("memory://", "memory:///") or path.endswith("step-00000002")
        assert values(checkpoints)[1] == 3 and values(checkpoints, which=2)[1] == 2
        assert values(checkpoints, which=path)[1] == 2
    assert [row.name for row in ls(url)] == ["step-00000003", "step-00000002"]
    assert all(row.good for row in verify(url)) and all(row.good for row in verify(path))


def test_a_folder_without_a_manifest_is_no_checkpoint(url: str) -> None:
    system, root = fsspec.core.url_to_fs(url)
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.save(2, state_of(2))
        system.rm_file(f"{root}/step-00000002/manifest.json")  # as if the writer had died before its last object
        loaded, step = values(checkpoints)
        assert step == 1 and loaded.rejected == ()
        checkpoints.save(3, state_of(3))
        assert not system.exists(f"{root}/step-00000002")  # swept
        assert {row.name for row in ls(url)} == {"step-00000001", "step-00000003"}


def test_damage_is_found(url: str) -> None:
    system, root = fsspec.core.url_to_fs(url)
    with Checkpoints(url) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step))
        shard = f"{root}/step-00000002/__0_0.distcp"
        data = bytearray(system.cat_file(shard))
        data[len(data) // 2] ^= 1
        system.pipe_file(shard, bytes(data))
        loaded, step = values(checkpoints)
        assert step == 1 and "__0_0.distcp" in loaded.rejected[0].reason
        assert [row.good for row in verify(f"{url}/step-00000002")].count(False) == 2
        system.rm_file(f"{root}/step-00000001/state.json")
        with pytest.raises(NoUsableCheckpoint, match=r"state.json: the file is missing"):
            checkpoints.load(state_of(0))


def test_a_failing_store_commits_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system, _ = fsspec.core.url_to_fs(url)
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, state_of(1))
        ordinary = type(system).open

        def refuse(self: Any, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
            if mode == "wb" and path.endswith(".metadata"):
                raise OSError("the store is full")
            return ordinary(self, path, mode, *args, **options)

        monkeypatch.setattr(type(system), "open", refuse)
        with pytest.raises(CheckpointError, match=r"\.metadata: the store is full"):
            checkpoints.save(2, state_of(2))
        monkeypatch.undo()
        assert values(checkpoints)[1] == 1
        checkpoints.save(1, {**state_of(5)})  # a step that is there is replaced
        assert values(checkpoints)[1] == 5


@pytest.mark.parametrize("local", [True, False])
def test_what_fails_after_the_commit_takes_no_checkpoint_away(url: str, tmp_path: Path, local: bool) -> None:
    def fails_late(phase: str) -> None:
        if phase == "prune":
            raise RuntimeError("a rank was lost")

    where = tmp_path / "local" if local else url
    with Checkpoints(where, keep_last=1, hook=fails_late) as checkpoints, pytest.raises(CheckpointError, match="lost"):
        checkpoints.save(1, state_of(1))
    with Checkpoints(where) as checkpoints:
        assert values(checkpoints)[1] == 1


def test_old_checkpoints_that_cannot_be_removed_fail_no_save(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise LookupError("the store has an error of its own")  # as gcsfs has: no OSError

    with Checkpoints(url, keep_last=1) as checkpoints:
        checkpoints.save(1, state_of(1))
        monkeypatch.setattr(RemoteStorage, "remove", refused)
        checkpoints.save(2, state_of(2))
        assert values(checkpoints)[1] == 2 and "were not removed: the store has" in caplog.text


def test_a_replaced_checkpoint_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1))
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", lambda path: os.rmdir(path))  # "directory not empty", as over NFS
            checkpoints.save(1, state_of(1))
        assert values(checkpoints)[1] == 1
        checkpoints.save(2, state_of(2))
        assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_from_one_storage_to_another(url: str, tmp_path: Path) -> None:
    path = Checkpoints(url).save(4, state_of(4))
    copied = reshard(path, tmp_path / "local", shards=2)
    assert values(Checkpoints(tmp_path / "local"))[1] == 4
    assert copied == tmp_path / "local" / "step-00000004"


def save_on_two_ranks(rank: int, url: str) -> str:
    with Checkpoints(url) as checkpoints:
        return str(checkpoints.save(6, state_of(6)))


def test_two_ranks_write_to_one_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    with Forge() as forge:
        paths = forge.run(save_on_two_ranks, 2, url)
    assert paths[0] == paths[1]
    assert values(Checkpoints(url))[1] == 6
    assert values(Checkpoints(tmp_path / "run"))[1] == 6  # the same files, by the local storage


def test_a_url_of_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        Checkpoints("nosuch://bucket/run")
