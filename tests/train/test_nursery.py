"""Ranks that are forked: they are the launcher's own children, they end as they say, and a killed nursery takes nobody with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from ottava.train.sever import sever

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="forks, and looks into /proc")

LAUNCHER = textwrap.dedent(
    """
    import os, signal, sys, time
    from multiprocessing.connection import wait
    from pathlib import Path
    from ottava.train.nursery import Nursery

    def end(code):
        sys.exit(code)

    def parent(path):
        while os.getppid() != int(sys.argv[1]) and os.getppid() != LAUNCHER:
            time.sleep(0.001)
        Path(path).write_text(f"{os.getppid()} {Path('/proc/self/comm').read_text().strip()} {sys.modules.get('wave') is not None}")

    LAUNCHER = os.getpid()
    if __name__ == "__main__":
        sys.argv[1:] = [str(LAUNCHER)] + sys.argv[1:]
        nursery = Nursery("wave")
        children = [nursery.fork(f"rank {code}", end, code) for code in (0, 3)]
        for child in children:
            wait([child.sentinel])
        assert [child.exitcode for child in children] == [0, 3]
        child = nursery.fork("rank 7", parent, sys.argv[2])
        wait([child.sentinel])
        sleeper = nursery.fork("rank 1", time.sleep, 60)
        sleeper.kill()
        wait([sleeper.sentinel])
        assert sleeper.exitcode == -signal.SIGKILL and not sleeper.is_alive()
        line = nursery._line
        for pid in Path(f"/proc/{LAUNCHER}/task/{LAUNCHER}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # the nursery
        again = nursery.fork("rank 2", end, 5)
        wait([again.sentinel])
        assert again.exitcode == 5
        stopped = nursery._pid
        os.kill(stopped, signal.SIGSTOP)
        nursery._line.settimeout(0.5)
        third = nursery.fork("rank 4", end, 6)
        wait([third.sentinel])
        assert third.exitcode == 6 and Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        os.kill(LAUNCHER, signal.SIGTERM)
    """
)


def test_children_of_the_nursery_are_the_launchers(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "said")], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == -signal.SIGTERM, done.stderr  # came to its last line
    assert "has not answered for 0 s: killed." in done.stdout + done.stderr
    pid, *name, imported = (tmp_path / "said").read_text().split()
    assert int(pid) > 1 and " ".join(name) == "ottava rank 7" and imported == "True"


def test_severing_lets_both_ends_go_and_leaves_pythons_own_and_the_store_alone():
    server = socket.create_server(("127.0.0.1", 0))
    kept = socket.create_server(("127.0.0.1", 0))
    ours, theirs = socket.create_connection(server.getsockname()), server.accept()[0]
    stored, stored_there = socket.create_connection(kept.getsockname()), kept.accept()[0]
    native, kept_native = os.dup(ours.detach()), os.dup(stored.detach())  # as native code holds them
    heard: list[bytes] = []
    waiting = threading.Thread(target=lambda: heard.append(os.read(native, 1)))
    waiting.start()
    try:
        assert sever(kept=[kept.getsockname()[1]]) >= 1
        waiting.join(20)
        assert heard == [b""] and theirs.recv(1) == b""  # the end, here and there
        stored_there.sendall(b"x")
        assert os.read(kept_native, 1) == b"x"
    finally:
        os.close(native)
        os.close(kept_native)
        for one in (server, kept, theirs, stored_there):
            one.close()


def test_wait_is_told_of_an_end_by_its_handle():
    child = os.fork()
    if child == 0:
        os._exit(4)
    from ottava.train.nursery import Child

    found = Child(child, "rank 0")
    assert wait([found.sentinel], timeout=30) and found.exitcode == 4 and found.exitcode == 4
