"""`ottava train` as processes: killed, asked to stop, stopped in the middle; and started again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ottava.train import launch
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from train.runs import lines, tiny

EXACT = ("loss", "grad_norm", "lr", "tokens")


def start(config: Config, *launcher: str) -> subprocess.Popen[str]:
    """`ottava train`, by itself or by another launcher."""
    config.run_folder.parent.mkdir(parents=True, exist_ok=True)
    path = config.run_folder.parent / f"{config.run_folder.name}.toml"
    path.write_text(to_toml(config))
    words = [sys.executable, *launcher, "-m", "ottava", "train", str(path)]
    options: dict[str, Any] = {"env": os.environ | {"PYTHONFAULTHANDLER": "1"}, "text": True}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Process ids, in order of rank."""
    children = [int(n) for n in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return sorted(pid for pid in children if b"spawn_main" in words[pid] or b"\0train\0" in words[pid])


def wait_for_step(config: Config, step: int, launcher: subprocess.Popen[str]) -> None:
    path, deadline = config.run_folder / "metrics.jsonl", time.monotonic() + 150
    while time.monotonic() < deadline:
        if path.is_file() and (found := path.read_text().splitlines()) and json.loads(found[-1])["step"] >= step:
            return
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come in 150 s")


def end(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = launcher.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        ranks = ranks_of(launcher)
        for process in (*ranks, launcher.pid):
            os.kill(process, signal.SIGABRT)  # it writes its stacks
        time.sleep(2)
        for process in (*ranks, launcher.pid):  # they hold the pipe open
            os.kill(process, signal.SIGKILL)
        raise AssertionError(f"it did not end in 150 s:\n{launcher.communicate()[0]}") from None
    finally:
        launcher.kill()
    return launcher.returncode, output


class Late:
    """A process whose exit code comes a moment after its sentinel, as the system may do it."""

    def __init__(self, seconds: float, code: int) -> None:
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=lambda: (time.sleep(seconds), os._exit(code)))
        self.process.start()
        self.sentinel, self.kill, self.asked = self.process.sentinel, self.process.kill, 0

    @property
    def exitcode(self) -> int | None:
        found = self.process.exitcode
        self.asked += found is not None
        return found if self.asked > 1 else None


def test_a_failed_rank_is_seen_however_late_its_exit_code_comes(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    ranks = [Late(60.0, 0), Late(0.2, 3)]
    began = time.monotonic()
    assert launch._wait(ranks) == 1 and time.monotonic() - began < 20
    assert ranks[0].process.exitcode == -signal.SIGKILL


def by_step(found: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {line["step"]: tuple(line[key] for key in EXACT) for line in found}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the ranks' processes in /proc")
def test_killed_then_stopped_then_finished(tmp_path):
    config = tiny(tmp_path, train={"steps": 400, "evaluate_every": 0}, checkpoint={"every": 5, "background": True})
    launcher = start(config)
    wait_for_step(config, 13, launcher)
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    code, output = end(launcher)
    assert code not in (0, 143), output
    before = by_step(lines(config))

    launcher = start(config)
    wait_for_step(config, max(before) + 3, launcher)
    launcher.send_signal(signal.SIGTERM)
    code, output = end(launcher)
    assert code == 143, output
    assert "Resuming from" in output and "stopped by SIGTERM" in output
    after = by_step(lines(config))
    assert list(after) == list(range(1, len(after) + 1))
    assert {step: after[step] for step in before} == before  # done again after the checkpoint, bit for bit
    assert lines(config)[max(before) - 1]["attempt"] == 1
    newest = sorted((config.run_folder / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{len(after):08d}"

    shorter = tiny(tmp_path, train={"steps": len(after) + 2, "evaluate_every": 0})
    code, output = end(start(shorter))
    assert code == 0, output
    assert by_step(lines(config))[len(after)] == after[len(after)] and len(lines(config)) == len(after) + 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the ranks' processes in /proc")
def test_torchrun_starts_it_again_where_it_was(tmp_path):
    config = tiny(tmp_path, train={"steps": 30, "evaluate_every": 0}, checkpoint={"every": 5})
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    launcher = start(config, *torchrun)
    wait_for_step(config, 13, launcher)
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    code, output = end(launcher)
    assert code == 0 and "Resuming from" in output, output
    found = lines(config)
    assert [line["step"] for line in found] == list(range(1, 31))
    restarted = [line["step"] for line in found if line["attempt"] == 1]
    assert restarted == list(range(restarted[0], 31)) and restarted[0] % 5 == 1  # behind a checkpoint


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the ranks' processes in /proc")
def test_a_rank_that_stands_still_is_named_and_stacks_are_written(tmp_path):
    config = tiny(
        tmp_path, train={"steps": 100_000, "evaluate_every": 0}, health={"watchdog_s": 8.0}, checkpoint={"every": 0}
    )
    launcher = start(config)
    wait_for_step(config, 3, launcher)
    os.kill(ranks_of(launcher)[1], signal.SIGSTOP)
    code, output = end(launcher)
    assert code == 6, output
    assert "Silent, so stopped or dead: rank 1" in output, output
    stacks = (config.run_folder / "stalls" / "rank-0.txt").read_text()
    assert "Silent, so stopped or dead: rank 1" in stacks and "loop.py" in stacks
    json.loads((config.run_folder / "stalls" / "rank-0-collectives.json").read_text())


def test_ranks_that_hide_communication_ask_for_many_hardware_queues(tmp_path: Path) -> None:
    plain = tiny(tmp_path, parallel={"tp": 2, "sequence_parallel": True})
    hiding = tiny(tmp_path, parallel={"tp": 2, "sequence_parallel": True, "overlap": "ring"})
    for config, environment, wanted in (
        (plain, {}, None),
        (hiding, {}, "32"),
        (hiding, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1"),
    ):
        launch._prepare(environment, config)
        assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == wanted
