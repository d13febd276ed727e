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
from unittest.mock import Mock

import pytest

from ottava.train import exits, launch
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.lock import RunLock
from ottava.train.signals import LauncherSignals
from ottava.train.world import Place
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
    """Process ids, in order of rank: those that are called "ottava rank N" among the descendants of the launcher."""
    found, seen = {}, [launcher.pid]
    while seen:
        pid = seen.pop()
        try:
            seen += [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:  # it has just ended
            continue
        if name.startswith("ottava rank "):
            found[int(name.split()[-1])] = pid
    return [found[rank] for rank in sorted(found)]


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
    ranks = {0: Late(60.0, 0), 1: Late(0.2, 3)}
    began = time.monotonic()
    assert launch.wait_for(ranks) == (1, 3) and time.monotonic() - began < 20
    assert ranks[0].process.exitcode == -signal.SIGKILL


def test_a_run_whose_name_is_too_long_is_refused_and_not_a_failure(tmp_path, monkeypatch):
    """It was exit code 1, and tried again three times, because its traceback was to be kept in the folder that cannot be."""
    refused = ValueError("train.run is too long")
    monkeypatch.setattr("ottava.train.world.World.__init__", Mock(side_effect=refused))
    config = tiny(tmp_path, "a" * 256, health={"watchdog_s": 0.0})
    assert launch.run_rank(config, Place(0, 1, 0, 1, "localhost", 1)) == (exits.WRONG_USAGE, str(refused))


@pytest.mark.parametrize(
    "limits, wanted, after",
    [
        ((20, 1000), 64, (64, 1000)),
        ((64, 64), 64, None),
        ((-1, -1), 64, None),
        ((20, -1), 64, (64, -1)),
        ((20, 32), 64, OSError),
    ],
)
def test_ranks_may_open_as_many_files_as_they_need_or_are_not_started(monkeypatch, limits, wanted, after):
    allowed = Mock()
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)  # -1: no limit
    monkeypatch.setattr("resource.setrlimit", lambda _, both: allowed(both))
    if after is OSError:
        with pytest.raises(OSError, match=r"^32 files may be open here at a time, and 64 are needed: raise the limit"):
            launch.allow_open_files(wanted)
    else:
        launch.allow_open_files(wanted)
    assert [call.args[0] for call in allowed.call_args_list] == ([after] if isinstance(after, tuple) else [])


@pytest.mark.parametrize(
    "limit, said", [("ulimit -n 40", "64 are needed"), ("TMPDIR=/x", "No usable temporary directory")]
)
def test_what_no_rank_could_live_with_is_exit_2_at_the_start(tmp_path, capfd, monkeypatch, limit, said):
    failing = {"ulimit -n 40": "resource.getrlimit", "TMPDIR=/x": "tempfile.gettempdir"}[limit]
    gives = {"return_value": (40, 40)} if "ulimit" in limit else {"side_effect": FileNotFoundError(2, said)}
    config = tiny(tmp_path, parallel={"ranks": 2})
    with monkeypatch.context() as patch:
        patch.setattr(failing, Mock(**gives))
        patch.setattr("ottava.train.nursery.Nursery", Mock())
        assert launch.launch(config) == exits.WRONG_USAGE
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    "steps, told", [(28, "steps 21 to 28 are lost, and the next start goes on from step 20."), (20, "")]
)
def test_steps_that_a_save_after_a_signal_has_lost_are_named(tmp_path, capfd, steps, told):
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000028.tmp-1234abcd").mkdir()  # under way when a rank died
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, steps + 1))
    )
    ended: Any = object.__new__(launch.Launcher)
    ended._config, ended.ranks, ended._places, ended._folder = tiny(tmp_path, "."), {}, {}, tmp_path
    ended._frozen = ended._keeper = ended._child = ended._parent = None
    ended._signals = LauncherSignals([])
    ended._signals.number = signal.SIGTERM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "wait_for", lambda *_: (1, 137))
        patch.setattr(LauncherSignals, "__enter__", lambda self: self)
        assert ended.run() == 137
    said = capfd.readouterr().err
    assert "rank 1 ended with exit code 137." in said and (
        "is not complete: " + told in said if told else "lost" not in said
    )


def test_a_launcher_that_waits_for_a_cut_network_is_ended_later():
    waits = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(60)"]
    )
    ends = subprocess.Popen([sys.executable, "-c", "pass"])
    for process in (waits, ends):
        launch.end_later(process.pid, 1.0)
    assert waits.wait(timeout=50) == -signal.SIGKILL and ends.wait(timeout=50) in (0, -signal.SIGTERM)


def by_step(found: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {line["step"]: tuple(line[key] for key in EXACT) for line in found}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the ranks' processes in /proc")
def test_killed_then_stopped_then_finished(tmp_path):
    alone = {"restarts": 0, "watchdog_s": 100.0}
    config = tiny(
        tmp_path,
        train={"steps": 400, "evaluate_every": 0},
        checkpoint={"every": 5, "background": True},
        health=alone,
    )
    launcher = start(config)
    wait_for_step(config, 13, launcher)
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    code, output = end(launcher)
    assert code not in (0, 143), output
    assert "Training a llama of " in output and " parameters on 2 x cpu, 400 steps of " in output
    before = by_step(lines(config))

    launcher = start(config)
    wait_for_step(config, max(before) + 3, launcher)
    launcher.send_signal(signal.SIGTERM)
    code, output = end(launcher)
    assert code == 143, output
    assert "Training a" not in output and "Resuming from" in output and "stopped by SIGTERM" in output
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
    config = tiny(tmp_path, train={"steps": 30, "evaluate_every": 0}, checkpoint={"every": 5}, health={"restarts": 0})
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
        tmp_path,
        train={"steps": 100_000, "evaluate_every": 0},
        health={"watchdog_s": 8.0, "restarts": 0},
        checkpoint={"every": 0},
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


def refuse(config: Config) -> None:
    try:
        raise ValueError("refused")
    except ValueError:
        launch._keep_traceback(config, 0)


def test_the_traceback_of_a_refused_start_lies_beside_a_run_that_nobody_is_at(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    kept = config.run_folder / "error-rank-0.txt"
    refuse(config)  # there is no folder, and none is made
    assert not config.run_folder.exists()
    lock = RunLock(config.run_folder).take()
    refuse(config)  # another process is at it, and this error is not its own
    assert not kept.exists()
    lock.release()
    (tmp_path / "mine").write_text("precious")
    kept.symlink_to(tmp_path / "mine")
    refuse(config)
    assert "ValueError: refused" in kept.read_text() and (tmp_path / "mine").read_text() == "precious"
