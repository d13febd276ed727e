"""Opening a stranger's checkpoint: no code runs, no other file is touched, little memory is taken, the error names the file."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint import hostile
from checkpoint.forked_ranks import Forge
from ottava.checkpoint import Checkpoints, ls, verify


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as started:
        yield started


def good(root: Path) -> Path:
    return Checkpoints(root, hash="blake2b").save(1, {"w": torch.arange(64.0).view(16, 4), "step": 1})


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda c: c.__name__)
def test_hostile(forge: Forge, tmp_path: Path, case: object) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    folder = good(root)
    name = case(folder, outside)  # type: ignore[operator]
    before = sorted((p.name, p.lstat().st_mtime_ns) for p in outside.iterdir())
    text, megabytes, changed = forge.run(hostile.open_hostile, 1, str(root))[0]
    assert f": {name}: " in text, text
    assert megabytes < 200 and not changed and not (outside / "ran").exists()
    assert sorted((p.name, p.lstat().st_mtime_ns) for p in outside.iterdir()) == before
    assert not all(row.good for row in verify(root))
    assert not (outside / "ran").exists() and list(ls(root))


def test_the_pickle_beside_the_tensor_is_never_opened(tmp_path: Path) -> None:
    """torch.save's archives have one; it is for torch."""
    folder = good(tmp_path)
    data = (folder / hostile.SHARD).read_bytes()
    archive = zipfile.ZipFile(io.BytesIO(data))
    pickled = archive.getinfo("archive/data.pkl")  # not `read`: its CRC is left out, the file has a better hash
    start = pickled.header_offset + data[pickled.header_offset :].index(b"\x80\x02")
    content = data[start : start + pickled.file_size]
    assert content.endswith(b".") and b"_rebuild_tensor_v2" in content
    evil = pickle.dumps(hostile.Payload(tmp_path / "ran"))
    changed = data.replace(content, (evil + b"\0" * len(content))[: len(content)])
    assert changed != data
    (folder / hostile.SHARD).write_bytes(changed)
    hostile.sign(folder)
    state = {"w": torch.zeros(16, 4), "step": 0}
    Checkpoints(tmp_path).load(state)
    assert torch.equal(state["w"], torch.arange(64.0).view(16, 4)) and not (tmp_path / "ran").exists()
