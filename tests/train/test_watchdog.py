"""Hangs end: whatever stands still, with its store, its disk or its interpreter, in the time that was given and 30 s more."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ottava.train import exits, watchdog
from ottava.train.config import Config, HealthSection, TrainSection
from ottava.train.data import Batch
from ottava.train.evaluate import evaluate
from ottava.train.watchdog import FrozenRanks, Watchdog, describe, limit_of, within
from train.runs import tiny
from train.test_launch import ranks_of, wait_for_step
from train.test_signals import FOREVER, TORCHRUN, end, start

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
LIMIT = 1.0
ALONE = {"watchdog_s": 8.0, "restarts": 0}


class Store:
    """One that hangs or fails, by the word it is made with."""

    def __init__(self, how: str) -> None:
        self.how = how

    def clone(self) -> Store:
        if self.how == "hangs":
            time.sleep(1000)
        raise RuntimeError("the store is gone")


def rank(folder: Path, how: str, stuck: str) -> None:
    """A process that stands still. how: what its store does; stuck: in what it stands."""
    watchdog.HARD_S = 1.0
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
    config = Config(train=TrainSection(run=str(folder)), health=HealthSection(watchdog_s=LIMIT, watchdog_start_s=LIMIT))
    dog = Watchdog(config, 0, 2).__enter__()
    if how != "none":
        dog.connect(Store(how))  # type: ignore[arg-type]
    if stuck != "start":
        dog.beat(3, "forward")
    if stuck == "interpreter":
        time.sleep(0.5)
        ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock
    time.sleep(60)


def hang(folder: Path, how: str, stuck: str) -> tuple[int, float, str]:
    """(exit code, seconds, what was said)"""
    process = multiprocessing.get_context("fork").Process(target=rank, args=(folder, how, stuck))
    began = time.monotonic()
    process.start()
    process.join(40)
    process.kill()
    return process.exitcode, time.monotonic() - began, (folder / "stderr").read_text()


@pytest.mark.parametrize("how", ["hangs", "fails", "none"])
def test_a_process_ends_whatever_its_store_does(tmp_path, how):
    code, seconds, said = hang(tmp_path, how, "forward")
    assert code == exits.STALLED and seconds < LIMIT + 10
    assert "rank 0: no progress for" in said and "Silent, so stopped or dead: rank 1." in said
    assert ("The store has not answered" in said) == (how != "none")
    assert "in rank" in (tmp_path / "stalls" / "rank-0.txt").read_text()  # its stack
    json.loads((tmp_path / "stalls" / "rank-0-collectives.json").read_text())


def test_the_start_is_watched_and_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "stalls").write_text("in the way")
    code, seconds, said = hang(tmp_path, "none", "start")
    assert code == exits.STALLED and seconds < LIMIT + 10
    assert "FileExistsError" in said and "in rank" in said  # the stacks are on the console instead


def test_a_frozen_file_system_keeps_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "KEEP_S", 0.5)
    (tmp_path / "stalls").mkdir()
    os.mkfifo(tmp_path / "stalls" / "rank-0.txt")  # opening it waits for a reader
    code, seconds, said = hang(tmp_path, "hangs", "forward")
    assert code == exits.STALLED and seconds < LIMIT + 10 and "in rank" in said


def test_an_interpreter_that_stands_still_is_ended_from_outside(tmp_path):
    code, seconds, said = hang(tmp_path, "none", "interpreter")
    assert code == exits.FAILED and seconds < LIMIT + 10 and "in rank" in said  # stacks


def test_a_silent_rank_is_blamed_first_then_the_one_behind():
    at = {"step": 7, "phase": "agreement", "age": 1.0, "beats": 40}
    assert "Rank 1 is behind: step 7, data" in describe(
        {0: at, 1: {**at, "phase": "data", "beats": 35}}, range(2), 60, 10
    )
    earlier = {0: {**at, "step": 6, "phase": "optimizer", "beats": 33}, 1: at}
    assert "Rank 0 is behind: step 6, optimizer; the others are at step 7" in describe(earlier, range(2), 60, 10)
    silent = describe({0: at, 1: {**at, "age": 50.0}}, range(3), 60, 10)
    assert "rank 1, 2" in silent and "rank 1 was at step 7, agreement" in silent
    assert "All ranks are at step 7" in describe({0: at, 1: at}, range(2), 60, 10)


def test_each_section_has_its_limit_and_none_is_watched_without_the_first():
    section = HealthSection(watchdog_s=10.0, watchdog_start_s=20.0, watchdog_save_s=0.0)
    limits = {phase: limit_of(section, phase) for phase in ("start", "load", "checkpoint", "forward", "evaluation")}
    assert limits == {"start": 20.0, "load": 20.0, "checkpoint": 0.0, "forward": 10.0, "evaluation": 10.0}
    assert limit_of(replace(section, watchdog_s=0.0), "start") == 0.0


def test_every_batch_of_an_evaluation_is_a_beat():
    batch = Batch(torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, 3, dtype=torch.long), None)
    scope: Callable[[], Any] = nullcontext
    model = SimpleNamespace(
        meshes=SimpleNamespace(dp_rank=0, dp_size=1),
        eval_scope=scope,
        precision=scope,
        module=lambda *_, **__: torch.tensor(6.0),
    )
    config = Config(train=TrainSection(global_batch=4, micro_batch=2))
    world = SimpleNamespace(device=torch.device("cpu"), sum=lambda values: values)
    beats = []
    data = SimpleNamespace(sweep=lambda *_: iter([batch] * 3))
    assert evaluate(model, data, config, world, lambda: beats.append(1)) == 1.0  # type: ignore[arg-type]
    assert len(beats) == 6


def test_the_launcher_kills_a_rank_that_says_nothing_any_more(capfd, monkeypatch):
    store = torch.distributed.HashStore()
    told = torch.distributed.PrefixStore(watchdog.PREFIX, store)
    frozen = FrozenRanks(HealthSection(watchdog_s=0.4), store, range(2))
    ranks = [SimpleNamespace(dead=False, exitcode=None, pid=10 + i) for i in range(2)]
    for each in ranks:
        each.kill = lambda each=each: setattr(each, "dead", True)
    deadline, tick = time.monotonic() + 10, 0
    told.set("1", json.dumps({"step": 5, "phase": "data", "tick": 1}))
    while not frozen.kill(ranks) and time.monotonic() < deadline:
        tick += 1
        told.set("0", json.dumps({"step": 5, "phase": "agreement", "tick": tick}))
        time.sleep(0.02)
    assert [each.dead for each in ranks] == [False, True]
    assert "rank 1 stands still as a whole process, since step 5, data: killed." in capfd.readouterr().err
    monkeypatch.setattr(watchdog, "UNKILLABLE_S", 0.1)
    told.set("0", json.dumps({"step": 5, "phase": "agreement", "tick": -1, "ended": 9}))  # the one before
    frozen.kill(ranks)
    time.sleep(0.2)
    assert frozen.unkillable(ranks) == [1]
    told.set("0", json.dumps({"step": 5, "phase": "agreement", "tick": -2, "ended": 10}))  # its watchdog has ended it
    frozen.kill(ranks)
    time.sleep(0.2)
    assert frozen.unkillable(ranks) == [1, 0]  # the kernel waits in both
    ranks[1].exitcode = -9
    assert frozen.unkillable(ranks) == [0]
    frozen.forget(0)
    assert frozen.unkillable(ranks) == []


def test_the_launcher_kills_a_rank_that_others_waited_for_and_that_never_said_anything(tmp_path, capfd):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    section = HealthSection(watchdog_s=100.0, watchdog_start_s=0.2)
    frozen = FrozenRanks(section, store, range(2))
    ranks = [SimpleNamespace(dead=False, exitcode=None, pid=10 + i) for i in range(2)]
    for each in ranks:
        each.kill = lambda each=each: setattr(each, "dead", True)
    assert frozen.kill(ranks) == []  # nobody has complained: it may be starting
    dog = Watchdog(Config(train=TrainSection(run=str(tmp_path)), health=section), 0, 2, kept=True)
    dog.connect(store)
    deadline = time.monotonic() + 10
    while 0 not in dog._heard and time.monotonic() < deadline:
        time.sleep(0.01)
    dog._end(0.3)
    assert dog._last[2] == "stalled"  # the other one is to blame
    dog.came(range(2))
    assert dog._last[2] == "start"
    dog._over.set()
    assert frozen.kill(ranks) == [1] and [each.dead for each in ranks] == [False, True]
    assert "rank 1 stands still as a whole process, since it was started: killed." in capfd.readouterr().err
    frozen.forget(1)
    assert frozen.kill(ranks) == []  # the new one has not been complained of


def test_a_watchdog_goes_on_after_an_exception_in_its_thread(tmp_path, capfd):
    config = Config(train=TrainSection(run=str(tmp_path)), health=HealthSection(watchdog_s=100.0))
    with Watchdog(config, 0, 2):
        (thread,) = [t for t in threading.enumerate() if t.name == "ottava watchdog"]
        deadline = time.monotonic() + 60
        said = ""
        while "goes on after" not in said and time.monotonic() < deadline:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(RuntimeError)
            )
            time.sleep(0.3)
            said += capfd.readouterr().err
        assert "rank 0: the watchdog goes on after RuntimeError" in said and thread.is_alive()


def test_within_says_whether_it_came_to_its_end(capfd):
    assert within(5.0, lambda: None)
    assert not within(0.1, lambda: time.sleep(2))
    assert not within(5.0, lambda: 1 / 0) and "ZeroDivisionError" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_torchrun_ends_when_the_rank_that_serves_the_store_is_stopped(tmp_path):
    config = tiny(tmp_path, train=FOREVER, health=ALONE, checkpoint={"every": 0})
    process = start(config, *TORCHRUN)
    wait_for_step(config, 3, process)
    (config.run_folder / "stalls").write_text("in the way")
    began = time.monotonic()
    os.kill(ranks_of(process)[0], signal.SIGSTOP)
    code, output = end(process)
    assert code != 0 and time.monotonic() - began < 8 + 30, output
    assert "rank 1: no progress for" in output and "Silent, so stopped or dead: rank 0" in output, output
    assert "The store has not answered" in output


@pytest.mark.extra
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["ottava train", "torchrun"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path, launcher, victim):
    config = tiny(tmp_path, train=FOREVER, health=ALONE, checkpoint={"every": 0})
    process = start(config, *launcher)
    wait_for_step(config, 3, process)
    began = time.monotonic()
    os.kill(ranks_of(process)[victim], signal.SIGSTOP)
    code, output = end(process)
    assert time.monotonic() - began < 8 + 30, output
    assert f"Silent, so stopped or dead: rank {victim}" in output and code == (1 if launcher else exits.STALLED), output


@pytest.mark.extra
def test_a_rank_that_is_stopped_while_it_starts_is_named(tmp_path):
    config = tiny(tmp_path, train=FOREVER, health={**ALONE, "watchdog_start_s": 15.0}, checkpoint={"every": 0})
    process = start(config)
    while len(ranks_of(process)) < 2:
        time.sleep(0.05)
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    code, output = end(process)
    assert code == exits.STALLED and "Silent, so stopped or dead: rank 1" in output, output


@pytest.mark.extra
def test_a_single_rank_that_is_stopped_is_named_by_the_launcher(tmp_path):
    config = tiny(
        tmp_path, train=FOREVER, health={**ALONE, "watchdog_s": 5.0}, checkpoint={"every": 0}, parallel={"ranks": 1}
    )
    process = start(config)
    wait_for_step(config, 3, process)
    began = time.monotonic()
    os.kill(ranks_of(process)[0], signal.SIGSTOP)
    code, output = end(process)
    assert code == exits.STALLED and time.monotonic() - began < 5 + 30
    assert "rank 0 stands still as a whole process" in output


@pytest.mark.extra
def test_a_run_whose_disk_freezes_ends(tmp_path):
    config = tiny(
        tmp_path, train=FOREVER, health={**ALONE, "watchdog_s": 6.0}, checkpoint={"every": 0}, metrics={"fp8_every": 50}
    )
    process = start(config)
    wait_for_step(config, 3, process)
    (config.run_folder / "stalls").mkdir()
    for name in ("fp8.jsonl", "stalls/rank-0.txt", "stalls/rank-1.txt"):
        (config.run_folder / name).unlink(missing_ok=True)
        os.mkfifo(config.run_folder / name)
    code, output = end(process)
    assert code == exits.STALLED and "no progress for" in output and "fp8_health.py" in output, output
