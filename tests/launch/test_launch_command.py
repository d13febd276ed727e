"""`ottava launch` as a user types it: what it writes, what it shows, what it refuses, and that nothing is half submitted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from launch.jobs import config_file, lines, ottava
from ottava.cli.main import main
from ottava.doctor.run_logs import find_logs
from ottava.launch.environment import variables
from ottava.launch.slurm import seconds_of
from ottava.train.arguments import parse

BATCH = ("--set", "train.global_batch=128")


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words, "--print"]) == 0
    return capsys.readouterr().out


def check_bash(text: str, folder: Path) -> None:
    path = folder / "script.sh"
    path.write_text(text)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "on", [("slurm",), ("ssh", "--hosts", "a,b,c,d"), ("torchrun",), ("local", "--nodes", "1", "--per-node", "2")]
)
def test_scripts_are_bash_and_print_writes_nothing(capsys, tmp_path, monkeypatch, on):
    monkeypatch.chdir(tmp_path)
    text = show(
        capsys,
        "debug",
        "--nodes",
        "4",
        "--per-node",
        "1",
        "--device",
        "cpu",
        "--set",
        "train.global_batch=32",
        "--on",
        *on,
    )
    assert list(tmp_path.iterdir()) == []
    check_bash(text, tmp_path)
    assert "-m ottava.launch.agent --grace=180" in text and "-m ottava train" in text


def test_an_sbatch_script_has_what_the_job_needs(capsys, tmp_path):
    given = [
        "--nodes",
        "4",
        "--min-nodes",
        "1",
        "--time",
        "2-00:00:00",
        "--grace",
        "300",
        "--cpus",
        "96",
        "--interface",
        "ib0",
    ]
    text = show(
        capsys,
        "debug",
        "--on",
        "slurm",
        *BATCH,
        "--per-node",
        "4",
        *given,
        "--sbatch=--partition=gpu",
        "--env",
        "NCCL_DEBUG=INFO",
    )
    for line in (
        "#SBATCH --nodes=1-4", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=96", "#SBATCH --time=2-00:00:00",
        "#SBATCH --signal=USR1@300", "#SBATCH --requeue", "#SBATCH --partition=gpu", "for count in 1 2 4; do",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert "export NCCL_DEBUG=INFO" in text and "export NCCL_SOCKET_IFNAME=ib0" in text and "--bind-cpus" in text
    assert "2|3|4|5|7|130) " in text and "  143) " in text
    assert (
        text.count("--nproc-per-node=4") == 1 and "--ntasks-per-node=1" in text
    )  # one torchrun a node, one rank a GPU
    check_bash(text, tmp_path)


def test_a_mesh_that_is_given_whole_says_how_many_nodes(capsys):
    mesh = "parallel.dp_replicate=2,parallel.dp_shard=8,train.global_batch=128"
    assert "#SBATCH --nodes=2\n" in show(capsys, "debug", "--on", "slurm", "--set", mesh, "--cpus", "8")


def test_the_scheduler_may_come_first(capsys):
    assert show(capsys, "slurm", "debug", *BATCH, "--cpus", "8") == show(
        capsys, "debug", "--on", "slurm", *BATCH, "--cpus", "8"
    )


def test_paths_with_spaces_and_dollars_stay_paths(capsys, tmp_path):
    folder = tmp_path / "a b'c $HOME"
    folder.mkdir()
    text = show(
        capsys, str(config_file(folder, "run")), "--on", "slurm", "--device", "cpu", "--nodes", "2", "--per-node", "1"
    )
    line = next(line for line in text.splitlines() if line.startswith("export CONFIG="))
    done = subprocess.run(["bash", "-c", f'{line}; echo "$CONFIG"'], capture_output=True, text=True)
    assert done.stdout.strip() == str(folder / "run" / "launch" / "config.toml")
    check_bash(text, tmp_path)


def test_skypilot_gets_a_task(capsys):
    words = [
        "--accelerator",
        "H200",
        "--volume",
        "s3://bucket:/runs",
        "--set",
        "train.run=/runs/a,train.global_batch=128",
    ]
    task = yaml.safe_load(show(capsys, "debug", "--on", "skypilot", "--nodes", "2", *words))
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H200:8"
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [143]}
    assert task["file_mounts"]["/runs"] == {"source": "s3://bucket", "mode": "MOUNT"}
    assert "--nnodes=$SKYPILOT_NUM_NODES" in task["run"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--on", "slurm", "--nodes", "3"], "3 nodes x 8 ranks cannot run this configuration"),
        (["--on", "slurm", "--nodes", "0"], "--nodes must be at least 1"),
        (["--on", "slurm", "--nodes", "2", "--min-nodes", "4"], "--min-nodes must be from 1 to --nodes (2)"),
        (["--on", "slurm", "--time", "soon"], "--time 'soon'"),
        (["--on", "slurm", "--time", "3:00"], "--grace 180 is all of --time 3:00 (180 s)"),
        (["--on", "slurm", "--sbatch=--nodes=3"], "has its own --nodes"),
        (["--on", "slurm", "--sbatch=-N 3"], "has its own --nodes"),
        (["--on", "slurm", "--sbatch=partition"], "one option of sbatch"),
        (["--on", "slurm", "--concurrent", "2"], "is for a --sweep"),
        (["--on", "ray", "--sweep", "train.seed=1,2"], "--sweep is for --on slurm"),
        (["--on", "ssh"], "needs --hosts"),
        (["--on", "ssh", "--hosts", "a,a"], "a machine twice"),
        (["--on", "ssh", "--hosts", "a,,b,c"], "'' is not the name of a machine"),
        (["--on", "ray", "--address", "head"], "--address 'head': write host:port"),
        (["--on", "ray", "--address", "head:port"], "--address 'head:port': write host:port"),
        (["--on", "slurm", "--interface", ""], "--interface '': write the name of a card"),
        (["--on", "slurm", "--interface", "ib0; true"], "write the name of a card"),
        (["--on", "slurm", "--python", ""], "--python ''"),
        (["--on", "local", "--per-node", "8", "--output", "/dev/null"], "the folder /dev/null cannot be made: File exists"),
        (["--on", "ssh", "--hosts", "a,-b"], "'-b' is not the name of a machine"),
        (["--on", "ssh", "--hosts", "a,b", "--nodes", "1"], "--nodes is 1, but --hosts names 2 machines"),
        (["--on", "local", "--nodes", "2", "--per-node", "1"], "this machine alone"),
        (["--on", "torchrun", "--submit"], "started by hand"),
        (["--on", "slurm", "--print", "--submit"], "choose one"),
        (["--on", "slurm", "--env", "RANK=1"], "sets RANK itself"),
        (["--on", "slurm", "--set", "parallel.tp=3"], "multiple of parallel.tp"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_exit_2_and_nothing_is_written(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "debug", *BATCH, *words]) == 2
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_scheduler_without_a_configuration_is_asked_for_one(capsys):
    assert main(["launch", "slurm"]) == 2
    assert "which one? ottava launch slurm run.toml" in capsys.readouterr().err


def test_times_are_read_as_slurm_does():
    known = {"0": 0, "90": 5400, "1:30": 90, "12:00:00": 43200, "2-12": 216000, "2-12:30": 217800, "1-00:00:05": 86405}
    assert {text: seconds_of(text) for text in known} == known


@pytest.mark.parametrize("given", ["eth0", "=mlx5_0:1,mlx5_1:1", "^docker0,lo", "bond0.12"])
def test_cards_are_named_as_nccl_takes_them(given):
    assert variables("cuda", interface=given, hca=given)["NCCL_IB_HCA"] == given


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, does: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


def test_a_slurm_that_refuses_or_is_not_there_is_shown(capsys, tmp_path, monkeypatch):
    words = [
        "launch",
        str(config_file(tmp_path, "run")),
        "--on",
        "slurm",
        "--device",
        "cpu",
        "--nodes",
        "2",
        "--per-node",
        "1",
        "--submit",
    ]
    fake(
        tmp_path,
        monkeypatch,
        "sbatch",
        "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1",
    )
    assert main(words) == 69 and "Invalid account" in capsys.readouterr().err
    fake(tmp_path, monkeypatch, "sbatch", 'echo "42;cluster"')
    assert main(words) == 0 and "Submitted Slurm job 42:" in capsys.readouterr().out
    config, _ = parse([str(tmp_path / "run" / "launch" / "config.toml")])
    assert config.run_folder == tmp_path / "run"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 69 and "there is no `sbatch`" in capsys.readouterr().err


def test_a_sweep_writes_a_configuration_for_each_run(capsys, tmp_path):
    words = [
        "--on",
        "slurm",
        "--device",
        "cpu",
        "--per-node",
        "1",
        "--sweep",
        "optimizer.lr=1e-3,2e-3",
        "--sweep",
        "train.seed=1,2",
    ]
    assert main(["launch", str(config_file(tmp_path, "run")), *words, "--concurrent", "2"]) == 0
    folder = tmp_path / "run" / "launch"
    found = [parse([str(folder / f"config-{number}.toml")])[0] for number in range(4)]
    assert [(c.optimizer.lr, c.train.seed) for c in found] == [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)]
    text = (folder / "job.sbatch").read_text()
    assert "#SBATCH --array=0-3%2" in text and "# 3: optimizer.lr=2e-3 train.seed=2" in text
    line = next(line for line in text.splitlines() if line.startswith("export CONFIG="))
    done = subprocess.run(
        ["bash", "-c", f'{line}; echo "$CONFIG $RUN"'],
        env=os.environ | {"SLURM_ARRAY_TASK_ID": "2"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(folder / "config-2.toml"), str(tmp_path / "run" / "sweep-2")]


@pytest.mark.extra
def test_on_this_machine_it_trains_and_ends_as_the_run_does(tmp_path):
    config = config_file(tmp_path, "run", steps=6)
    done = ottava("launch", str(config), "--per-node", "2", "--submit")
    assert done.returncode == 0 and len(lines(tmp_path / "run")) == 6, done.stdout + done.stderr
    assert {log.rank for log in find_logs(tmp_path / "run")} == {0, 1}
    assert "[rank 0]: step 6/6" in done.stdout
