"""Whatever is killed, whenever: what is left is a checkpoint that verifies, and nothing that looks like one and is none."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import interrupted_saves as cases
from checkpoint.forked_ranks import Ended, Forge
from ottava.checkpoint import verify
from ottava.checkpoint.save import PHASES

VICTIMS = {"one": (1,), "rank 0": (0,), "all": (0, 1)}
CASES = [
    pytest.param(phase, victims, in_background, id=f"{phase}, {victims}, {'save_async' if in_background else 'save'}")
    for phase, victims, in_background in itertools.product(PHASES, VICTIMS, (False, True))
    if in_background or phase != "staging"  # synchronous saves do not stage
]


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as started:
        yield started


def committed(phase: str, victims: tuple[int, ...]) -> bool:
    """Whether step 2 is there after the kill. A rank that has done its part is not needed for the commit."""
    return phase == "prune" or (victims == (1,) and phase in ("manifest", "rename"))


@pytest.mark.parametrize("phase, victims, in_background", CASES)
def test_kill(forge: Forge, tmp_path: Path, phase: str, victims: str, in_background: bool) -> None:
    root, killed = tmp_path / "checkpoints", VICTIMS[victims]
    results = forge.run(cases.save_and_be_killed, 2, str(root), str(tmp_path), phase, killed, in_background)
    for rank, result in enumerate(results):
        if rank in killed:
            assert result == Ended(signal.SIGKILL)
        else:
            assert "a rank was lost" in result
    step, rejected, same, left = forge.run(cases.resume, 1, str(root))[0]
    assert (step, rejected, same) == (2 if committed(phase, killed) else 1, [], True)
    steps = left.split(",")
    assert set(steps) <= {"step-00000001", "step-00000002", "step-00000009"}  # nothing temporary is left
    assert all(row.good for row in verify(root))


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("poor", [0, 1])
def test_no_room_for_one_rank(forge: Forge, tmp_path: Path, poor: int, in_background: bool) -> None:
    results = forge.run(cases.save_without_room, 2, str(tmp_path / "c"), poor, in_background)
    error, left = results[0]
    assert results == [(error, left)] * 2
    assert f"step 2 was not saved: rank {poor}, __{poor}_0.distcp: File too large" in error
    assert left == "step-00000001,step-00000003"
    assert forge.run(cases.resume, 1, str(tmp_path / "c"))[0][:3] == (3, [], True)


def test_a_full_disk(forge: Forge, tmp_path: Path) -> None:
    results = forge.run(cases.save_on_small_disks, 1, str(tmp_path))[0]
    assert set(results) == {"__0_0.distcp", ".metadata", "state.json", "manifest.json"}
    for file, result in results.items():
        assert result.said == [f"step 2 was not saved: {file}: No space left on device"] * 3, result
        assert result.full and result.left == [] and result.then == ["step-00000003"], result


def test_a_full_disk_of_the_kernel(forge: Forge, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk; test_a_full_disk has the same error from the file itself")
    try:
        assert "__0_0.distcp: No space left on device" in forge.run(cases.save_on_full_disk, 1, str(disk / "c"))[0]
        assert list((disk / "c").iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_directory_that_may_not_be_written(forge: Forge) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o555)
        for result in forge.run(cases.save_as_nobody, 2, str(root)):
            assert result.startswith("step 2 was not saved: step-00000002.tmp-") and result.endswith(
                "Permission denied"
            )
        assert list(root.iterdir()) == []
    finally:
        shutil.rmtree(root)


def test_a_rank_that_stops_answering_is_not_waited_for_longer_than_the_timeout(forge: Forge, tmp_path: Path) -> None:
    error, late = forge.run(cases.stop_answering, 2, str(tmp_path))
    assert "did not answer in 2 s" in error and late == "late"
    assert forge.run(cases.resume, 1, str(tmp_path))[0][:3] == (1, [], True)
