"""`Ground`: a file system and a network of a job's own, so that they can fail without anybody else. As root; else those faults are
skipped, by name."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from ottava.chaos.strike import FILLER, loopback, thaw
from ottava.checkpoint.stop import SIGNALS

MEGABYTES = 192
"""Of the file system: some checkpoints of a small model."""
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of <sched.h>."""


class Ground:
    """The folder of a run, on a file system of its own, as far as that is allowed. Use it in a `with` block.

    >>> with Ground(Path("/tmp/chaos/run-3")) as ground:
    ...     subprocess.Popen(words, preexec_fn=ground.enter)
    """

    def __init__(self, folder: Path, disk: bool, network: bool) -> None:
        self.folder, self._disk, self.network = folder, disk, network
        self._image = folder.with_name(f"{folder.name}.image")

    def __enter__(self) -> Ground:
        self.folder.mkdir(parents=True)
        if self._disk:
            with self._image.open("wb") as file:
                file.truncate(MEGABYTES << 20)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(self._image)], check=True)
            subprocess.run(["mount", "-o", "loop", str(self._image), str(self.folder)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._disk:
            self.mend()
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
            self._image.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def enter(self) -> None:
        """In the process of the job, before it begins. Signals are heeded, though a shell's background ignores Ctrl-C, and nohup SIGHUP:
        such a fault would not strike. If the network is to be cut: a namespace with nothing but a loopback interface."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if self.network:
            unshare(NEW_NETWORK)
            loopback(up=True)

    def mend(self) -> None:
        """What a full or frozen file system needs to go on."""
        with suppress(OSError):
            thaw(self.folder)
        with suppress(OSError):
            (self.folder / FILLER).unlink()

    def mend_later(self, seconds: float) -> None:
        """The same in a while."""
        threading.Timer(seconds, self.mend).start()


def unshare(what: int) -> None:
    """A new namespace for this process. OSError if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def can_make_disks(folder: Path) -> str:
    """Empty, or why no file system can be made and frozen here."""
    if os.geteuid():
        return "needs root"
    if not (shutil.which("mkfs.ext4") and shutil.which("mount")):
        return "needs mkfs.ext4 and mount"
    try:
        with Ground(folder / "probe", disk=True, network=False):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no file system can be mounted here ({error})"


def can_make_networks() -> str:
    """Empty, or why no network namespace can be made here."""
    child = os.fork()
    if child == 0:
        try:
            unshare(NEW_NETWORK)
            loopback(up=True)
        except OSError:
            os._exit(1)
        os._exit(0)
    return "" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else "no network namespace can be made here"
