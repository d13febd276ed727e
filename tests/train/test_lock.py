"""One run, one writer: who holds a run's folder, and when that is over."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ottava.checkpoint import Checkpoints
from ottava.cli.main import main
from ottava.train import exits, lock
from ottava.train.lock import FILE, Holder, RunLock, read
from train.runs import lines, tiny
from train.test_launch import ranks_of, wait_for_step
from train.test_signals import FOREVER, TORCHRUN, end, start

pytestmark = pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="looks for processes in /proc")


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    monkeypatch.setattr(lock, "STALE_S", 0.6)


def hold(folder: Path, taken: Any = None) -> None:
    """In another process: takes the lock and keeps it."""
    RunLock(folder).take()
    if taken is not None:
        taken.set()
    time.sleep(60)


def holding(folder: Path) -> Any:
    context = multiprocessing.get_context("fork")
    taken = context.Event()
    process = context.Process(target=hold, args=(folder, taken))
    process.start()
    assert taken.wait(20)
    return process


def put(folder: Path, holder: Holder) -> None:
    (folder / FILE).write_bytes(holder.encode())


def test_a_second_one_is_told_who_holds_it_and_gets_it_after(tmp_path):
    first = RunLock(tmp_path).take()
    with pytest.raises(
        ValueError, match=rf"is in use by process {os.getpid()} on \S+, started \S+: end that one first"
    ):
        RunLock(tmp_path).take()
    first.release()
    second = RunLock(tmp_path).take()
    first.release()  # not its own any more
    assert read(tmp_path / FILE).token == second._mine.token
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_dead_process_is_taken_over_also_of_one_that_nobody_has_buried(tmp_path, capfd):
    process = holding(tmp_path)
    with pytest.raises(ValueError, match=f"process {process.pid}"):
        RunLock(tmp_path).take()
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while lock.born(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    RunLock(tmp_path).take().release()  # a zombie: this process has not waited for it
    assert f"from process {process.pid}" in capfd.readouterr().err
    process.join()
    # The number belongs to another process by now.
    put(tmp_path, replace(Holder.myself(), born="1"))
    RunLock(tmp_path).take().release()


def test_a_lock_of_another_machine_is_watched_not_compared_by_clocks(tmp_path, quick):
    far = replace(Holder.myself(), machine="elsewhere", host="node-7", started="2150-01-01T00:00:00+00:00")
    put(tmp_path, far)
    began = time.monotonic()
    RunLock(tmp_path).take().release()  # it did not move
    assert time.monotonic() - began >= 0.6
    process = holding(tmp_path)  # renews it
    moving = lock.machine
    try:
        lock.machine = lambda: "here"  # to whom that process runs elsewhere
        with pytest.raises(ValueError, match=f"process {process.pid}"):
            RunLock(tmp_path).take()
    finally:
        lock.machine = moving
        process.kill()
        process.join()


def test_a_damaged_lock_is_taken_over_when_nobody_renews_it(tmp_path, quick):
    for content in (b"", b"{" * 5000, b'{"pid": 1}', Holder.myself().encode().replace(b'"pid": ', b'"pid": -1, "x": ')):
        (tmp_path / FILE).write_bytes(content)
        RunLock(tmp_path).take().release()


def test_what_no_run_has_made_is_named_at_once(tmp_path):
    path = tmp_path / FILE
    for make in (path.mkdir, lambda: path.symlink_to("nowhere"), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(ValueError, match="lock is no lock that a run has made"):
            RunLock(tmp_path).take()
        path.rmdir() if path.is_dir() else path.unlink()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_nothing_is_named_and_left_as_it_was(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="cannot be written to .No space left on device.: make room"):
        RunLock(tmp_path).take()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="which cannot be made .File name too long.: choose another folder"):
        RunLock(tmp_path / ("x" * 300)).take()


def test_a_dead_ones_lock_is_taken_over_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for content in (replace(Holder.myself(), born="1").encode(), b"damaged" * 500):
        (tmp_path / FILE).write_bytes(content)
        with monkeypatch.context() as patched:
            patched.setattr(lock, "STALE_S", 0.1)
            patched.setattr(lock, "_write_new", full)  # a new file would need room
            held = RunLock(tmp_path).take()
        assert read(tmp_path / FILE).pid == os.getpid() and [path.name for path in tmp_path.iterdir()] == [FILE]
        held.release()


def test_whoever_waits_says_so(tmp_path, quick, capfd):
    put(tmp_path, replace(Holder.myself(), machine="another", host="node\x1b[2J"))
    RunLock(tmp_path).take().release()
    said = capfd.readouterr().err
    assert "is in use by process" in said and "Waiting for 1 s" in said and "\x1b" not in said


def test_of_many_who_find_it_stale_one_gets_it(tmp_path):
    put(tmp_path, replace(Holder.myself(), born="1"))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def try_it() -> None:
        try:
            RunLock(tmp_path).take()
            queue.put("mine")
            time.sleep(3)
        except ValueError as error:
            queue.put(str(error))

    processes = [context.Process(target=try_it) for _ in range(6)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=20) for _ in processes]
    for process in processes:
        process.join()
    assert answers.count("mine") == 1 and sum("is in use by process" in a for a in answers) == 5, answers


def test_without_hard_links_it_is_made_exclusively(tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    taken = RunLock(tmp_path).take()
    with pytest.raises(ValueError, match="is in use"):
        RunLock(tmp_path).take()
    taken.release()


def lose(folder: Path) -> None:
    lock.RENEW_S = 0.05
    RunLock(folder).take()
    put(folder, replace(Holder.myself(), token="another", host="node-9"))
    time.sleep(20)


def test_a_holder_that_was_thought_dead_ends_itself(tmp_path, capfd):
    process = multiprocessing.get_context("fork").Process(target=lose, args=(tmp_path,))
    process.start()
    process.join(15)
    assert process.exitcode == exits.FAILED and "was taken over by process" in capfd.readouterr().err
    assert read(tmp_path / FILE).host == "node-9"


def test_a_lock_that_is_removed_under_a_run_is_made_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "RENEW_S", 0.02)
    held = RunLock(tmp_path).take()
    try:
        mine = read(tmp_path / FILE)
        (tmp_path / FILE).unlink()
        deadline = time.monotonic() + 20
        while (found := read(tmp_path / FILE)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found is not None and mine is not None and found.token == mine.token
        assert "was removed, but process" in caplog.text
        with pytest.raises(ValueError, match="is in use by process"):
            RunLock(tmp_path).take()
    finally:
        held.release()
    assert not (tmp_path / FILE).exists()


def test_an_exception_in_its_thread_does_not_end_the_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_S", 0.02)
    held = RunLock(tmp_path).take()
    try:
        *_, thread = (t for t in threading.enumerate() if t.name == "ottava lock" and t.is_alive())
        beat = ctypes.c_ulong(thread.ident or 0)
        for _ in range(5):  # wherever it is
            ctypes.pythonapi.PyThreadState_SetAsyncExc(beat, ctypes.py_object(MemoryError))
            time.sleep(0.05)
        before, deadline = read(tmp_path / FILE), time.monotonic() + 20
        while (now := read(tmp_path / FILE)) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert now is not None and before is not None and now.beat > before.beat and now.token == before.token
    finally:
        held.release()


def test_tools_leave_the_checkpoints_of_a_running_job_alone(tmp_path, capsys):
    import torch

    source = Checkpoints(tmp_path / "source").save(1, {"w": torch.ones(4)})
    unfinished = tmp_path / "run" / "checkpoints" / "step-00000002.tmp-00000000"
    unfinished.mkdir(parents=True)
    held = RunLock(tmp_path / "run").take()
    assert main(["checkpoint", "reshard", str(source), str(tmp_path / "run" / "checkpoints")]) == 2
    assert unfinished.is_dir() and f"is in use by process {os.getpid()}" in capsys.readouterr().err
    held.release()
    assert main(["checkpoint", "reshard", str(source), str(tmp_path / "run" / "checkpoints")]) == 0


@pytest.mark.slow
def test_the_same_command_twice_and_orphans_of_torchrun(tmp_path):
    config = tiny(tmp_path, train=FOREVER, checkpoint={"every": 0}, parallel={"ranks": 1})
    first = start(config, *TORCHRUN[:-1], "1")
    wait_for_step(config, 3, first)
    (rank,) = ranks_of(first)
    os.kill(rank, signal.SIGSTOP)
    first.kill()  # torchrun alone
    code, output = end(start(config))
    assert code == exits.WRONG_USAGE and f"is in use by process {rank}" in output, output
    os.kill(rank, signal.SIGCONT)
    output, _ = first.communicate(timeout=60)  # the rank ends by itself, and leaves what it has done
    assert "the launcher is gone: saving." in output, output
    done = lines(config)[-1]["step"]
    code, output = end(start(replace(config, train=replace(config.train, steps=done + 1))))
    assert code == exits.DONE and f"{done} of {done + 1} steps are done" in output, output
    assert not (config.run_folder / FILE).exists()


def test_a_link_that_leads_nowhere_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ValueError, match="but there is a link that leads nowhere in its place"):
        RunLock(tmp_path / "run").take()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, below):
    (tmp_path / "run").write_text("a note")
    with pytest.raises(
        ValueError, match="train.run is .*run.*, but there is a file in its place: choose another folder"
    ):
        RunLock(tmp_path / "run" / below).take()
