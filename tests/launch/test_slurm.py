"""A real Slurm with two nodes: submit, save and requeue, lose a node, sweep; the losses are those of one machine, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.jobs import (
    attempts,
    config_file,
    lines,
    losses,
    ottava,
    ranks_of,
    reference,
    resumed_after,
    shorten,
    wait_until,
)
from launch.slurm_cluster import Slurm, missing

pytestmark = [
    pytest.mark.extra,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SHAPE = ("--on", "slurm", "--device", "cpu", "--per-node", "1", "--interface", "lo", "--grace", "60")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as cluster:
        yield cluster


def submit(slurm: Slurm, config: Path, *words: str) -> str:
    """Number of the job."""
    done = ottava("launch", str(config), *SHAPE, *words, "--submit", env=slurm.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("Submitted Slurm job ")[1].partition(":")[0]


def log(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run / "logs").glob("slurm-*.out")))


def at_step(run: Path, step: int) -> bool:
    return any(line["step"] >= step for line in lines(run))


def wait_for(slurm: Slurm, job: str, run: Path, *states: str) -> None:
    """Until the job is in one of the states."""
    wait_until(lambda: slurm.state(job) in states, f"job {job} in {states}", otherwise=lambda: log(run) + slurm.logs())


def test_stopped_and_requeued_it_has_the_losses_of_one_machine(slurm, tmp_path):
    config, run = config_file(tmp_path, "run"), tmp_path / "run"
    job = submit(slurm, config, "--nodes", "2")
    wait_until(lambda: at_step(run, 6), "step 6", otherwise=lambda: log(run) + slurm.logs())
    slurm.call("scancel", "--signal=TERM", job)
    wait_until(lambda: "requeued" in log(run), "the requeue", otherwise=lambda: log(run))
    saved = max(losses(run))
    assert (run / "checkpoints" / f"step-{saved:08d}").is_dir(), log(run)
    steps = shorten(run / "launch" / "config.toml", run)  # Slurm holds the job back for a while
    wait_for(slurm, job, run, "COMPLETED")
    assert losses(run) == reference(tmp_path, steps), log(run)
    assert attempts(run) == {0, 1} and "stopped by SIGTERM" in log(run) and "Resuming from" in log(run)


def test_a_killed_rank_is_started_again_without_a_requeue(slurm, tmp_path):
    config, run = config_file(tmp_path, "run"), tmp_path / "run"
    job = submit(slurm, config, "--nodes", "2")
    wait_until(lambda: at_step(run, 6), "step 6", otherwise=lambda: log(run) + slurm.logs())
    os.kill(ranks_of(run / "launch" / "config.toml")[1], signal.SIGKILL)
    steps = shorten(run / "launch" / "config.toml", run)
    wait_for(slurm, job, run, "COMPLETED")
    assert list(losses(run)) == list(range(1, steps + 1)) and attempts(run) == {0, 1}
    assert "requeued" not in log(run)


def test_a_lost_node_leads_to_a_run_on_the_one_that_is_left(slurm, tmp_path):
    config, run = config_file(tmp_path, "run"), tmp_path / "run"
    job = submit(slurm, config, "--nodes", "2", "--min-nodes", "1")
    wait_until(lambda: at_step(run, 6), "step 6", otherwise=lambda: log(run) + slurm.logs())
    slurm.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        wait_until(lambda: slurm.state(job) == "PENDING", "the requeue", otherwise=slurm.logs)
        steps = shorten(run / "launch" / "config.toml", run)
        wait_for(slurm, job, run, "COMPLETED")
    finally:
        slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert "NumNodes=1 " in slurm.call("scontrol", "show", "job", job)
    # As on one machine that goes on with one rank of two: another number of ranks adds in another order.
    assert losses(run) == reference(tmp_path, steps, alone_after=resumed_after(run)), log(run)


def test_out_of_time_it_saves_and_is_requeued(slurm, tmp_path):  # Slurm counts in minutes, and may signal one too early
    config, run = config_file(tmp_path, "run", checkpoint={"every": 0}), tmp_path / "run"
    job = submit(slurm, config, "--nodes", "2", "--time", "3", "--grace", "60")
    try:
        wait_until(lambda: "requeued" in log(run), "the requeue", otherwise=lambda: log(run) + slurm.logs())
    finally:
        slurm.call("scancel", job)
    assert "stopped by SIGUSR1" in log(run), log(run)
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{max(losses(run)):08d}"]


def test_a_sweep_is_an_array_with_a_folder_for_each_run(slurm, tmp_path):
    config, run = config_file(tmp_path, "run", steps=6), tmp_path / "run"
    job = submit(slurm, config, "--nodes", "1", "--sweep", "optimizer.lr=1e-3,2e-3", "--concurrent", "1")
    for number in (0, 1):
        wait_for(slurm, f"{job}_{number}", run, "COMPLETED")
    rates = [max(line["lr"] for line in lines(run / f"sweep-{number}")) for number in (0, 1)]
    assert rates == [1e-3, 2e-3]


def test_what_slurm_refuses_is_shown_and_nothing_is_queued(slurm, tmp_path):
    config = config_file(tmp_path, "run")
    refused = ottava(
        "launch", str(config), *SHAPE, "--nodes", "2", "--sbatch=--partition=nowhere", "--submit", env=slurm.environment
    )
    assert refused.returncode == 69 and "invalid partition" in refused.stderr
    refused = ottava("launch", str(config), *SHAPE, "--nodes", "3", "--submit", env=slurm.environment)
    assert refused.returncode == 2 and "train.global_batch" in refused.stderr  # 8 sequences over 3 ranks
    large = ottava("launch", str(config), *SHAPE, "--nodes", "4", "--submit", env=slurm.environment)
    assert large.returncode == 69 and "Node count" in large.stderr
    assert slurm.call("squeue", "-h") == ""


def test_a_final_exit_code_is_not_requeued(slurm, tmp_path):
    config, run = config_file(tmp_path, "run", data={"files": (str(tmp_path / "gone.tokens"),)}), tmp_path / "run"
    job = submit(slurm, config, "--nodes", "2")
    wait_for(slurm, job, run, "FAILED")
    assert "ExitCode=2:0" in slurm.call("scontrol", "show", "job", job) and "would end the same way" in log(run), log(
        run
    )
    assert log(run).count("gone.tokens cannot be") <= 4  # once a rank, in its log and on the console
