"""What is drawn: the same for a seed, every kind and phase in turn, rank 0 and the launcher among the victims."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from ottava.chaos import arm, strike
from ottava.chaos.arm import Armed, struck
from ottava.chaos.plan import FIRST, KINDS, LAUNCHER, PHASES, Fault, draw, read, write
from ottava.chaos.strike import ChaosError, fill, throw_into_thread


def test_300_faults_are_of_all_kinds_phases_and_victims():
    runs = draw(list(KINDS), 300, seed=0, ranks=4, steps=40)
    faults = [fault for run in runs for fault in run]
    assert len(faults) == 300 and len(KINDS) == 16
    assert min(Counter(fault.kind for fault in faults).values()) >= 18
    assert {fault.phase for fault in faults} == set(PHASES)
    assert {fault.rank for fault in faults} == {LAUNCHER, 0, 1, 2, 3}
    assert all(fault.phase in KINDS[fault.kind].phases for fault in faults)
    for run in runs:
        assert [fault.number for fault in run] == list(range(len(run)))
        assert not any(fault.phase in FIRST for fault in run[1:])  # a run starts once
        assert all(a.step < b.step < 40 for a, b in pairwise(run))
    assert (
        runs == draw(list(KINDS), 300, seed=0, ranks=4, steps=40) != draw(list(KINDS), 300, seed=1, ranks=4, steps=40)
    )


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(ValueError, match="no fault 'sigfoo'; there are sigkill"):
        draw(["sigfoo"], 1, 0, 2, 40)
    with pytest.raises(ValueError, match="no phase 'sleep'; there are start, load"):
        draw(["sigkill"], 1, 0, 2, 40, phases=["save", "sleep"])
    with pytest.raises(ValueError, match="None of the faults nan can come"):
        draw(["nan"], 1, 0, 2, 40, phases=["save"])
    with pytest.raises(ValueError, match=r"train.steps \(5\) must be 6 or more, or --per-run smaller"):
        draw(["sigkill"], 4, 0, 2, steps=5)
    for steps in range(6, 40):
        assert all(fault.step < steps for run in draw(["sigkill"], 8, 0, 2, steps) for fault in run)


def test_a_fault_strikes_once_in_its_rank_and_after_the_one_before(tmp_path, monkeypatch):
    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(arm, "strike", lambda fault, *_: seen.append((fault.number, fault.kind)))
    faults = [Fault(0, "sigkill", "save", 1, 4), Fault(1, "slow", "data", 0, 2), Fault(2, "abort", "data", LAUNCHER, 2)]
    write(faults, tmp_path / arm.PLAN)
    assert read(tmp_path / arm.PLAN) == faults
    (tmp_path / arm.LAUNCHER_FILE).write_text("4711")
    ranks = [Armed(tmp_path, tmp_path, rank) for rank in range(2)]
    for step in range(8):
        for phase in ("data", "checkpoint"):
            for rank in ranks:
                rank(step, phase)
    assert seen == [(0, "sigkill"), (1, "slow"), (2, "abort")]
    assert json.loads(struck(tmp_path, 0).read_text())["step"] == 4
    again = Armed(tmp_path, tmp_path, 1)  # the rank that takes its place
    again(4, "checkpoint")
    assert len(seen) == 3


def test_a_fault_of_numbers_that_changed_none_has_not_struck(tmp_path, monkeypatch):
    from ottava.chaos.campaign import Campaign, Outcome, Run

    monkeypatch.setattr(strike, "flip", lambda fault, changed: changed() if fault.number else None)
    faults = [Fault(i, "bit-flip", "forward", 0, step) for i, step in enumerate((2, 3))]
    write(faults, tmp_path / arm.PLAN)
    armed = Armed(tmp_path, tmp_path, 0)
    for step in (2, 3):
        armed(step, "forward")
    run = object.__new__(Run)
    run.marks, run.outcomes = tmp_path, [Outcome(fault, struck=True) for fault in faults]
    run.campaign = object.__new__(Campaign)
    run._judge(code=1)
    assert all(struck(tmp_path, i).exists() for i in (0, 1)) and [one.struck for one in run.outcomes] == [False, True]


def test_signals_go_to_the_rank_or_to_the_launcher(tmp_path, monkeypatch):
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(strike.os, "kill", lambda *what: sent.append(what))
    strike.strike(Fault(0, "sigsegv", "data", 1, 0), tmp_path, 0)
    strike.strike(Fault(0, "sigint", "data", LAUNCHER, 0), tmp_path, 4711)
    assert sent == [(os.getpid(), signal.SIGSEGV), (4711, signal.SIGINT)]
    with pytest.raises(ChaosError):
        strike.strike(Fault(0, "exception", "data", 1, 0), tmp_path, 0)


def test_an_exception_comes_to_a_thread_of_ours():
    over, caught = threading.Event(), threading.Event()

    def work() -> None:
        try:
            while not over.wait(0.01):
                pass
        except ChaosError:
            caught.set()

    thread = threading.Thread(target=work, name="ottava test", daemon=True)
    thread.start()

    class First:
        @staticmethod
        def choice(threads):
            return next(t for t in threads if t is thread)

    assert throw_into_thread(First()) == "ottava test" and caught.wait(20)  # type: ignore[arg-type]


def test_a_job_heeds_signals_that_a_shell_in_the_background_ignores(tmp_path):
    ignoring = f"""
import signal, subprocess, sys
from pathlib import Path
from ottava.chaos.ground import Ground
signal.signal(signal.SIGINT, signal.SIG_IGN)
words = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"]
with Ground(Path({str(tmp_path / "run")!r}), disk=False, network=False) as ground:
    for enter in (None, ground.enter):
        subprocess.run(words, preexec_fn=enter, check=True)
"""
    found = subprocess.run([sys.executable, "-c", ignoring], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/mounts").is_file(), reason="mounts a file system")
def test_a_file_system_of_its_own_fills_and_freezes_and_is_mended(tmp_path):
    from ottava.chaos.ground import Ground, can_make_disks, can_make_networks

    if reason := can_make_disks(tmp_path):
        pytest.skip(reason)
    assert isinstance(can_make_networks(), str)
    with Ground(tmp_path / "run", disk=True, network=False) as ground:
        fill(ground.folder)
        with pytest.raises(OSError, match="No space left"):
            (ground.folder / "more").write_bytes(b"x" * 100_000)
        ground.mend()
        (ground.folder / "more").write_bytes(b"x" * 100_000)
        strike.freeze(ground.folder)
        done = threading.Event()
        writer = threading.Thread(target=lambda: ((ground.folder / "late").write_text("x"), done.set()), daemon=True)
        writer.start()
        assert not done.wait(0.3)
        ground.mend()
        assert done.wait(20)
    assert not (tmp_path / "run").exists()
