"""A real Ray: a worker is killed midway, Ray starts all again, and the losses are those of one machine, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.jobs import attempts, children, config_file, environment, lines, losses, ottava, reference, wait_until
from ottava.cli.main import main
from ottava.launch.ray import POINTER, Reports, exit_code
from ottava.train.config import CheckpointSection, Config, TrainSection
from ottava.train.metrics import StepMetrics

SHAPE = ("--on", "ray", "--device", "cpu", "--nodes", "2", "--per-node", "1", "--interface", "lo")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray (make test-launch installs it)"
)
START = "import sys; from ray.scripts.scripts import main; sys.argv = ['ray', *sys.argv[1:]]; main()"
STEPS = 40


class Cluster:
    """One node of Ray, with 4 cores to give away."""

    def __init__(self, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        words = [
            "start",
            "--head",
            f"--port={port}",
            "--node-ip-address=127.0.0.1",
            "--num-cpus=4",
            "--block",
            f"--temp-dir={folder}",
        ]
        words += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
        self.log = Path(folder) / "head.log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *words],
            env=environment(),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )
        wait_until(lambda: "runtime started" in self.log.read_text(), "Ray", otherwise=self.log.read_text)

    def workers(self) -> list[int]:
        """Processes that train."""
        names = {pid: Path(f"/proc/{pid}/cmdline") for pid in children(self.process.pid)}
        return [pid for pid, path in names.items() if path.exists() and b"RayTrainWorker" in path.read_bytes()]

    def stop(self) -> None:
        """Ray drains for half a minute first."""
        mine = children(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in mine:
            if Path(f"/proc/{pid}/cmdline").exists() and b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as folder:  # a short path, for Ray's sockets
        found = Cluster(folder)
        try:
            yield found
        finally:
            found.stop()


@needs_ray
@pytest.mark.extra
@pytest.mark.timeout(1800)
def test_a_killed_worker_is_started_again_and_losses_are_those_of_one_machine(cluster, tmp_path):
    expected = reference(tmp_path, steps=STEPS)
    config, run = config_file(tmp_path, "run", steps=STEPS), tmp_path / "run"
    words = [sys.executable, "-m", "ottava", "launch", str(config), *SHAPE, "--address", cluster.address, "--submit"]
    with (tmp_path / "driver.log").open("w") as log:
        driver = subprocess.Popen(words, env=environment(), stdout=log, stderr=subprocess.STDOUT)

    def said() -> str:
        return (tmp_path / "driver.log").read_text()

    try:
        wait_until(lambda: len(lines(run)) >= 6, "step 6", otherwise=said)
        leading = json.loads((run / "lock").read_text())["pid"]
        (other,) = [pid for pid in cluster.workers() if pid != leading]
        os.kill(other, signal.SIGKILL)
        assert driver.wait(timeout=900) == 0, said()
    finally:
        for pid in [driver.pid, *children(driver.pid)] if driver.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
    assert losses(run) == expected and attempts(run) == {0, 1}, said()
    pointers = [json.loads(path.read_text()) for path in (run / "ray").rglob(POINTER)]
    newest = max(pointers, key=lambda pointer: pointer["step"])
    assert newest["step"] == STEPS and (Path(newest["path"]) / "manifest.json").is_file()


@needs_ray
@pytest.mark.extra
@pytest.mark.timeout(1800)
def test_an_exit_code_that_is_final_is_the_drivers_and_is_not_tried_again(cluster, tmp_path):
    config = config_file(tmp_path, "run", data={"files": (str(tmp_path / "gone.tokens"),)})
    done = ottava("launch", str(config), *SHAPE, "--address", cluster.address, "--submit")
    assert done.returncode == 2 and "gone.tokens" in done.stderr, done.stdout + done.stderr


@needs_ray
@pytest.mark.extra
def test_a_ray_that_does_not_answer_is_said_and_nothing_runs(tmp_path):
    config = config_file(tmp_path, "run")
    done = ottava("launch", str(config), *SHAPE, "--address", "127.0.0.1:1", "--submit")
    assert done.returncode == 69 and "no Ray cluster answers at '127.0.0.1:1'" in done.stderr, done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_ray_it_says_what_to_install(tmp_path, capsys):
    config = config_file(tmp_path, "run")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    assert main(["launch", str(config), *SHAPE, "--python", str(python), "--submit"]) == 69
    assert "has no Ray: pip install 'ottava[ray]'" in capsys.readouterr().err


def test_the_driver_is_one_that_ray_users_know(tmp_path, capsys):
    config = config_file(tmp_path, "run", train={"global_batch": 24})
    assert main(["launch", str(config), *SHAPE, "--min-nodes", "1", "--restarts", "5", "--print"]) == 0
    text = capsys.readouterr().out
    compile(text, "ray_train.py", "exec")
    for part in (
        "TorchTrainer(",
        "ScalingConfig(num_workers=(1, 2), use_gpu=False",
        "FailureConfig(max_failures=5)",
        "trainer.fit()",
    ):
        assert part in text
    four = [
        "launch",
        str(config_file(tmp_path, "four")),
        "--on",
        "ray",
        "--device",
        "cpu",
        "--nodes",
        "4",
        "--min-nodes",
        "1",
    ]
    assert (
        main([*four, "--print"]) == 2 and "any number of workers from 1 to 4, but not with 3" in capsys.readouterr().err
    )


def test_all_ranks_report_at_the_same_steps_and_checkpoints_once(tmp_path):
    config = Config(train=TrainSection(run=str(tmp_path)), checkpoint=CheckpointSection(every=5))
    told: dict[int, list[tuple[dict, dict | None]]] = {0: [], 1: []}
    ranks = [Reports(config, every=4, report=lambda m, p, rank=rank: told[rank].append((m, p))) for rank in (0, 1)]
    for step in range(1, 13):
        if step == 4:
            (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)  # not committed
        if step == 6:
            (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
            (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").write_text("{}")
        ranks[0].step(step, StepMetrics(step, 2.0, 1.0, 1e-3, 100, 10.0, 0.1))
        ranks[1].step(step, None)
    for rank in ranks:
        rank.end(0, "")
    assert [m.get("step") for m, _ in told[0]] == [4, 6, 8, 11, 12, 12] and len(told[1]) == len(told[0])
    assert [p and p["step"] for _, p in told[0]] == [None, 5, None, None, None, None]
    assert told[0][1][1] == {"step": 5, "path": str(tmp_path / "checkpoints" / "step-00000005")}
    assert told[0][-1][0]["exit_code"] == 0 and all(p is None for _, p in told[1])


def test_the_drivers_exit_code_is_the_runs(capsys):
    class Result:
        """As Ray has it: the metrics are those of the last checkpoint."""

        metrics = {"exit_code": 0, "step": 5}
        return_value = {"exit_code": 4, "message": "no usable checkpoint"}

    assert exit_code(Result) == 4 and "no usable checkpoint" in capsys.readouterr().err
    Result.return_value = {"exit_code": 0, "message": ""}
    assert exit_code(Result) == 0 and capsys.readouterr().err == ""


def test_an_end_that_nobody_tells_is_not_a_good_one(capsys):
    class Result:
        """Of a Ray that does not pass on what workers return."""

        metrics = {"step": 5}

    assert exit_code(Result) == 1 and "does not say how the run ended" in capsys.readouterr().err
