"""Signals to a whole run, as terminals, systemd and Slurm send them: saved once, whoever passes them on; and terminals that go away."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ottava.checkpoint import stop
from ottava.train import exits
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.signals import LauncherSignals, RankSignals, held_back, let_through
from train.runs import lines, tiny
from train.test_launch import wait_for_step

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FOREVER = {"steps": 100_000, "evaluate_every": 0}


def start(config: Config, *launcher: str, **options: Any) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts it."""
    path = config.run_folder.parent / f"{config.run_folder.name}.toml"
    path.write_text(to_toml(config))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
    words = [sys.executable, *launcher, "-m", "ottava", "train", str(path)]
    return subprocess.Popen(words, start_new_session=True, preexec_fn=as_in_a_terminal, **options)


def as_in_a_terminal() -> None:
    """What a shell starts behind `&` ignores Ctrl-C, behind nohup a lost terminal, and so do we then; a test may have been started so."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _in_a_terminal() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    as_in_a_terminal()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=120)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"it did not end:\n{process.communicate()[0]}") from None


def saved(config: Config) -> int:
    """The step of the newest checkpoint. Nothing unfinished lies beside it."""
    names = sorted(p.name for p in (config.run_folder / "checkpoints").iterdir())
    assert all(len(name) == len("step-00000001") for name in names), names
    return int(names[-1].removeprefix("step-"))


@pytest.mark.slow
def test_a_closed_pipe_does_not_stop_training_and_sigterm_to_the_group_saves(tmp_path):
    config = tiny(tmp_path, train=FOREVER, checkpoint={"every": 0}, metrics={"console_every": 1})
    process = start(config, stderr=subprocess.PIPE)
    for _ in range(2):  # | head -2
        process.stdout.readline()
    process.stdout.close()
    wait_for_step(config, 8, process)
    os.killpg(process.pid, signal.SIGTERM)  # systemd's default
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == exits.STOPPED, errors
    assert errors.count("the console is gone") == 1 and "Traceback" not in errors, errors
    assert "SIGTERM: saving." in errors
    assert saved(config) == lines(config)[-1]["step"] >= 8
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"] == "stopped by SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [pytest.param((), id="ottava train", marks=pytest.mark.extra), pytest.param(TORCHRUN, id="torchrun")]
)
def test_ctrl_c_saves_also_when_pressed_twice_in_a_hurry(tmp_path, launcher):
    config = tiny(tmp_path, train=FOREVER, checkpoint={"every": 0})
    process = start(config, *launcher)
    wait_for_step(config, 3, process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.2)
    if not launcher:  # a second one makes torchrun's own process leave
        os.killpg(process.pid, signal.SIGINT)
    code, output = end(process)
    assert code == (exits.STOPPED if not launcher else 1), output
    assert output.count("SIGINT: saving; press Ctrl-C again to abandon.") == 1 and "stopped by SIGINT" in output, output
    assert saved(config) == lines(config)[-1]["step"] >= 3


@pytest.mark.extra
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("group", [True, False], ids=["group", "launcher"])
def test_other_signals_save_however_they_come(tmp_path, number, group):
    config = tiny(tmp_path, train=FOREVER, checkpoint={"every": 0})
    process = start(config)
    wait_for_step(config, 3, process)
    os.killpg(process.pid, number) if group else process.send_signal(number)
    code, output = end(process)
    assert code == exits.STOPPED and f"stopped by {number.name}" in output, output
    assert saved(config) == lines(config)[-1]["step"] >= 3


@pytest.mark.extra
@pytest.mark.parametrize("seconds", [0.5, 2.0, 4.0, 6.0])
def test_a_signal_while_ranks_start_ends_them_all(tmp_path, seconds):
    config = tiny(tmp_path, train=FOREVER, checkpoint={"every": 0})
    process = start(config)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGTERM)
    code, output = end(process)
    assert code in (exits.STOPPED, -signal.SIGTERM), output  # before the launcher itself is there, the system answers


class Rank:
    """Stands for a process that has been started."""

    def __init__(self) -> None:
        self.pid, self.killed = os.getpid(), False

    def is_alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True


def test_the_launcher_passes_a_signal_on_once_and_gives_up_when_ctrl_c_is_pressed_again(monkeypatch, capfd):
    monkeypatch.setattr(stop, "AGAIN_S", 0.1)
    sent: list[tuple[int, int]] = []
    ranks = [Rank(), Rank()]
    signals = LauncherSignals(ranks)
    with signals, monkeypatch.context() as patch:
        kill = os.kill
        patch.setattr(os, "kill", lambda *what: sent.append(what))
        kill(os.getpid(), signal.SIGINT)
        kill(os.getpid(), signal.SIGINT)
        assert sent == [(os.getpid(), signal.SIGINT)] * 2 and not signals.abandoned  # one for each rank
        time.sleep(0.2)
        kill(os.getpid(), signal.SIGTERM)
        assert not signals.abandoned
        kill(os.getpid(), signal.SIGINT)
    assert signals.abandoned and all(rank.killed for rank in ranks)
    said = capfd.readouterr().err
    assert said == "ottava train: SIGINT: saving; press Ctrl-C again to abandon.\nottava train: abandoned.\n"
    late = LauncherSignals(ranks)
    late.abandon()  # all have saved and ended
    assert not late.abandoned and capfd.readouterr().err == ""


def _wait_for_ctrl_c(asked: Any) -> None:
    stop.AGAIN_S = 0.1
    signals = RankSignals(alone=True).__enter__()
    let_through()
    while not signals.requested:
        time.sleep(0.01)
    asked.set()
    time.sleep(60)  # saves


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="forks")
def test_a_rank_of_torchrun_gives_up_when_ctrl_c_is_pressed_again_and_no_signal_comes_too_early():
    context = multiprocessing.get_context("fork")
    asked = context.Event()
    process = context.Process(target=_wait_for_ctrl_c, args=(asked,))
    with held_back():
        process.start()
    os.kill(process.pid, signal.SIGINT)  # perhaps before it can handle it
    assert asked.wait(20)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode == exits.ABANDONED
