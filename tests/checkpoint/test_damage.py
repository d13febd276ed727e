"""A damaged checkpoint is rejected by name, and the one before it is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava.checkpoint import Checkpoints, NoUsableCheckpoint, ls, verify

SHARD, METADATA, MANIFEST, STATE = "__0_0.distcp", ".metadata", "manifest.json", "state.json"


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((40, 5), float(step)), "step": step}


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def cut(path: Path, to: float) -> None:
    os.truncate(path, int(to * path.stat().st_size))


Damage = Callable[[Path, Path], Any]
"""(directory of step 2, directory of step 1)"""

EVERY = (SHARD, METADATA, STATE, MANIFEST)
DAMAGES: dict[str, tuple[str, Damage]] = {
    **{f"bit at {p} of {n}": (n, lambda d, _, n=n, p=p: flip(d / n, p)) for n in EVERY for p in (0.0, 0.3, 0.7, 1.0)},
    **{f"{n} cut to {p}": (n, lambda d, _, n=n, p=p: cut(d / n, p)) for n in EVERY for p in (0.0, 0.5, 0.99)},
    **{f"no {n}": (n, lambda d, _, n=n: (d / n).unlink()) for n in EVERY},
    **{f"{n} of another step": (n, lambda d, e, n=n: shutil.copy(e / n, d / n)) for n in (SHARD, STATE, MANIFEST)},
    "shard longer": (SHARD, lambda d, _: open(d / SHARD, "ab").write(b"x")),  # noqa: SIM115
    "a copy of another step": (MANIFEST, lambda d, e: (shutil.rmtree(d), shutil.copytree(e, d))),
    "an empty directory": (MANIFEST, lambda d, _: (shutil.rmtree(d), d.mkdir())),
    "a file": ("step-00000002", lambda d, _: (shutil.rmtree(d), d.write_text("x"))),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage(tmp_path: Path, case: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    before, damaged = (checkpoints.save(step, state_of(step)) for step in (1, 2))
    name, damage = DAMAGES[case]
    damage(damaged, before)
    state = state_of(0)
    loaded = checkpoints.load(state)
    assert loaded is not None and loaded.step == 1 and torch.equal(state["w"], state_of(1)["w"]) and state["step"] == 1
    assert [r.path for r in loaded.rejected] == [str(damaged)]
    assert loaded.rejected[0].reason.startswith(f"{name}: ")
    with pytest.raises(NoUsableCheckpoint, match="step-00000002"):
        checkpoints.load(state_of(0), 2)
    assert not all(row.good for row in verify(tmp_path)) and len(list(ls(tmp_path))) == 2


def test_nothing_usable_is_an_error_with_every_reason(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        flip(checkpoints.save(step, state_of(step)) / SHARD, 0.5)
    with pytest.raises(NoUsableCheckpoint) as caught:
        checkpoints.load(state_of(0))
    assert [r.path[-1] for r in caught.value.rejected] == ["2", "1"]
    assert str(caught.value).count(f"{SHARD}: its") == 2


def test_no_checkpoint_is_none_and_one_that_is_asked_for_is_an_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.load(state_of(0)) is None
    for which in (3, tmp_path / "elsewhere"):
        with pytest.raises(NoUsableCheckpoint, match="there is no such directory"):
            checkpoints.load(state_of(0), which)
    with pytest.raises(ValueError, match="which='latest'"):
        checkpoints.load(state_of(0), "latest")


def test_a_failed_load_leaves_the_tensors_as_they_were(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    flip(checkpoints.save(1, state_of(1)) / SHARD, 0.5)
    state = state_of(0)
    with pytest.raises(NoUsableCheckpoint):
        checkpoints.load(state)
    assert not state["w"].any() and state["step"] == 0
