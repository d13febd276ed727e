"""What the ranks of the kill matrix do."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ottava.checkpoint import CheckpointError, Checkpoints, NoUsableCheckpoint
from ottava.checkpoint.directory import LocalFolder

TIMEOUT = 6.0  # seconds: what a rank waits for one that does not answer
ROWS = 64


def state_of(step: int) -> dict[str, Any]:
    """The state of a step, on two ranks or in one process."""
    full = torch.arange(ROWS * 4, dtype=torch.float32).view(ROWS, 4) + step
    if not dist.is_initialized():
        return {"w": full, "b": torch.full((5,), step), "step": step}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return {
        "w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
        "b": torch.full((5,), step),
        "step": step,
    }


class Killer:
    """Kills when a phase begins for the second time (the first save, of step 1, has to succeed)."""

    def __init__(self, rank: int, phase: str, victims: tuple[int, ...], folder: str) -> None:
        self.rank, self.phase, self.victims, self.folder = rank, phase, victims, Path(folder)
        self.armed = False
        (self.folder / f"pid-{rank}").write_text(str(os.getpid()))

    def __call__(self, phase: str) -> None:
        if not self.armed or phase != self.phase:
            return
        # Rank 0 passes every phase, so it kills where it takes part; elsewhere the victim ends itself.
        if phase in ("manifest", "rename", "prune"):
            victims = sorted(self.victims, key=lambda v: v == self.rank)  # itself last
        else:
            victims = [self.rank] if self.rank in self.victims else []
        for victim in victims:
            os.kill(int((self.folder / f"pid-{victim}").read_text()), signal.SIGKILL)
            if victim == self.rank:
                time.sleep(60)


def save_and_be_killed(
    rank: int, root: str, folder: str, phase: str, victims: tuple[int, ...], in_background: bool
) -> str:
    """Step 1 is saved, step 2 is interrupted. "saved", or the error of a rank that survives."""
    killer = Killer(rank, phase, victims, folder)
    checkpoints = Checkpoints(root, keep_last=1, timeout=TIMEOUT, hook=killer)
    if in_background:
        checkpoints.save_async(1, state_of(1))
        checkpoints.wait()
    else:
        checkpoints.save(1, state_of(1))
    killer.armed = True
    try:
        if in_background:
            checkpoints.save_async(2, state_of(2))
            checkpoints.wait()
        else:
            checkpoints.save(2, state_of(2))
    except CheckpointError as error:
        return str(error)
    return "saved"


def save_without_room(rank: int, root: str, poor: int, in_background: bool) -> tuple[str, str]:
    """Rank `poor` can write no file beyond a few bytes in its second save; then it can again."""
    limits, armed = resource.getrlimit(resource.RLIMIT_FSIZE), False

    def hook(phase: str) -> None:
        if armed and phase == "writing" and rank == poor:
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))

    checkpoints = Checkpoints(root, timeout=TIMEOUT, keep_last=0, hook=hook)
    checkpoints.save(1, state_of(1))
    armed, error = True, ""
    try:
        if in_background:
            checkpoints.save_async(2, state_of(2))
            checkpoints.wait()
        else:
            checkpoints.save(2, state_of(2))
    except CheckpointError as failed:
        error = str(failed)
    armed = False
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.save_async(3, state_of(3))  # after an error: in this thread
    checkpoints.wait()
    return error, ",".join(sorted(os.listdir(root)))


def save_as_nobody(rank: int, root: str) -> str:
    """Saves into a directory that this user may not write."""
    user = os.geteuid()
    checkpoints = Checkpoints(root, timeout=TIMEOUT)
    checkpoints.team.connect("")
    state = state_of(2)
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        checkpoints.save(2, state)
    except CheckpointError as error:
        return str(error)
    finally:
        os.seteuid(user)
    return "saved"


BIG = {"w": torch.zeros(1 << 18), "v": torch.ones(1 << 17)}  # 1.5 MB


def save_on_full_disk(rank: int, root: str, state: dict[str, Any] = BIG) -> str:
    """One save."""
    try:
        Checkpoints(root, timeout=TIMEOUT).save(2, state)
    except CheckpointError as error:
        return str(error)
    return "saved"


class SmallDisk:
    """In this process new files of checkpoints share `room` bytes. Beyond, they do what the kernel does: the last write is cut short,
    and the next one fails with ENOSPC."""

    def __init__(self, room: int) -> None:
        disk = self
        self.room, self.full = room, False

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                fits = memoryview(data).cast("B")[: disk.room]
                if not fits and len(memoryview(data)):
                    disk.full = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written = super().write(fits)
                disk.room -= written
                return written

        self.file = File

    def __enter__(self) -> SmallDisk:
        self._create = LocalFolder.create
        LocalFolder.create = lambda folder, file: self.file(folder.path / file, "xb")  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        LocalFolder.create = self._create  # type: ignore[method-assign]


class FullDisk(NamedTuple):
    """What saves on a disk that ran full did."""

    said: list[str]
    """By each of them."""
    full: bool
    left: list[str]
    """In the directory of checkpoints, by all of them."""
    then: list[str]
    """The same, after a save with room again."""


def save_on_small_disks(rank: int, root: str) -> dict[str, FullDisk]:
    """By file: saves on disks that are full at the first byte of it, in the middle, and one byte before its end."""
    state = {"w": torch.zeros(1 << 14), "v": torch.ones(1 << 13)}
    roomy = Path(Checkpoints(f"{root}/roomy", timeout=TIMEOUT).save(2, state))
    sizes = {file.name: file.stat().st_size for file in sorted(roomy.iterdir(), key=lambda f: f.stat().st_mtime_ns)}
    found, before = {}, 0
    for name, size in sizes.items():
        folder, said, full, left = f"{root}/{name}", [], True, []
        for room in (before, before + size // 2, before + size - 1):
            with SmallDisk(room) as disk:
                said.append(save_on_full_disk(rank, folder, state))
            full, left = full and disk.full, left + os.listdir(folder)
        Checkpoints(folder, timeout=TIMEOUT).save(3, state)
        found[name] = FullDisk(said, full, left, os.listdir(folder))
        before += size
    return found


def stop_answering(rank: int, root: str) -> str:
    """Rank 1 stops (it is not dead) in its second save."""
    checkpoints = Checkpoints(root, timeout=2.0)
    checkpoints.save(1, state_of(1))
    if rank == 1:
        time.sleep(5)
        return "late"
    try:
        checkpoints.save(2, state_of(2))
    except CheckpointError as error:
        return str(error)
    return "saved"


def resume(rank: int, root: str) -> tuple[int, list[str], bool, str]:
    """One process: (step, reasons of rejection, whether the state is that of the step, directories after one more save)."""
    checkpoints = Checkpoints(root, keep_last=0)
    state = state_of(0)
    try:
        loaded = checkpoints.load(state)
    except NoUsableCheckpoint as error:
        return -1, [str(error)], False, ""
    if loaded is None:
        return -2, [], False, ""
    wanted = state_of(loaded.step)
    same = (
        torch.equal(state["w"], wanted["w"]) and torch.equal(state["b"], wanted["b"]) and state["step"] == loaded.step
    )
    checkpoints.save(9, state_of(9))
    return loaded.step, [f"{r.path}: {r.reason}" for r in loaded.rejected], same, ",".join(sorted(os.listdir(root)))
