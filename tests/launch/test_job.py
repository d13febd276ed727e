"""What can run where, before anything is written: numbers of nodes, sweeps, environment, and what follows from exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ottava.launch import environment, policy
from ottava.launch.job import Job, absolute, check_on, why_not
from ottava.launch.sweep import sweep
from ottava.train import exits
from ottava.train.config import Config, DataSection, ParallelSection, TrainSection


def config(batch: int = 16, micro: int = 2, **parallel: object) -> Config:
    train = TrainSection(global_batch=batch, micro_batch=micro, run="/runs/a")
    return Config(train=train, parallel=ParallelSection(**parallel))  # type: ignore[arg-type]


def test_counts_are_those_that_plan_and_batch_allow():
    assert Job(config(), "a", nodes=4, per_node=2, least_nodes=1).counts == (
        1,
        2,
        4,
    )  # 6 ranks cannot share 16 sequences
    assert Job(config(), "a", nodes=4, per_node=2).counts == (4,)
    assert Job(config(tp=2), "a", nodes=4, per_node=2, least_nodes=1).counts == (1, 2, 4)
    with pytest.raises(ValueError, match="not with 3: train.global_batch .* Choose --min-nodes 4"):
        Job(config(), "a", nodes=4, per_node=2, least_nodes=1).elastic()
    assert Job(config(batch=24), "a", nodes=4, per_node=1, least_nodes=1).elastic() == "1:4"
    assert Job(config(), "a", nodes=4, per_node=2).elastic() == "4"


@pytest.mark.parametrize(
    "given, said",
    [
        ({"nodes": 0}, "--nodes must be at least 1"),
        ({"per_node": 0}, "--per-node must be at least 1"),
        ({"nodes": 3, "per_node": 1}, "3 nodes x 1 ranks cannot run .* train.global_batch"),
        ({"nodes": 2, "least_nodes": 3}, "--min-nodes must be from 1 to --nodes"),
        ({"name": "A job"}, "a job's name"),
        ({"restarts": -1}, "--restarts must be 0 or more"),
    ],
)
def test_what_cannot_be_is_said_with_what_was_given(given, said):
    with pytest.raises(ValueError, match=said):
        Job(**{"config": config(), "name": "a", "nodes": 2, "per_node": 2} | given)


def test_a_mesh_that_does_not_fit_is_named():
    assert "tp=4" in str(why_not(config(tp=4), 6))
    assert why_not(config(), 8) is None
    assert "reduces no gradients" in str(why_not(config(strategy="none"), 2))


def test_the_runs_of_a_sweep_differ_in_what_is_swept_and_lie_apart():
    found = sweep(config(), ["optimizer.lr=1e-3,3e-3", "train.seed=1,2"])
    assert [what for what, _ in found][1] == "optimizer.lr=1e-3 train.seed=2"
    assert [(c.optimizer.lr, c.train.seed) for _, c in found] == [(1e-3, 1), (1e-3, 2), (3e-3, 1), (3e-3, 2)]
    assert [c.train.run for _, c in found] == [f"/runs/a/sweep-{n}" for n in range(4)]
    assert sweep(config(), []) == ()
    for text, said in (
        ("optimizer.lr", "not of the form"),
        ("train.run=a,b", "a folder of its own"),
        ("optimizer.rate=1", "no key"),
        ("train.seed=" + ",".join(map(str, range(2000))), "2000 runs"),
    ):
        with pytest.raises(ValueError, match=said):
            sweep(config(), [text])
    with pytest.raises(ValueError, match="cannot run this configuration"):  # every run of it has to be possible
        Job(config(), "a", nodes=2, per_node=2, sweep=sweep(config(), ["train.global_batch=8,6"]))


def test_paths_mean_the_same_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = replace(config(), data=DataSection(files=("a.tokens", "s3://b/c.tokens"), tokenizer="t.json"))
    found = absolute(given)
    assert found.data.files == (str(tmp_path / "a.tokens"), "s3://b/c.tokens")
    assert found.data.tokenizer == str(tmp_path / "t.json") and absolute(config()).data.tokenizer == "byte"
    assert absolute(found) == found and Path(found.data.cache).is_absolute()
    with pytest.raises(ValueError, match="a.tokens, which means nothing there"):
        check_on("/runs", given, "a")
    with pytest.raises(ValueError, match="--set train.run=/mnt/runs/a"):
        check_on("/mnt", config(), "a")


def test_variables_are_those_of_the_device():
    assert environment.variables("cpu", "eth0") == {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    found = environment.variables("cuda", "eth0", "mlx5_0", {"NCCL_DEBUG": "INFO"})
    assert found["NCCL_SOCKET_IFNAME"] == "eth0" and found["NCCL_IB_HCA"] == "mlx5_0" and found["NCCL_DEBUG"] == "INFO"
    assert set(environment.WHY) >= set(found)
    with pytest.raises(ValueError, match="do not use"):
        environment.variables("cpu", hca="mlx5_0")
    for word, said in (
        ("A", "NAME=VALUE"),
        ("RANK=1", "sets RANK itself"),
        ("1A=2", "NAME=VALUE"),
        ("A=b\nc", "one line"),
    ):
        with pytest.raises(ValueError, match=said):
            environment.assignments([word])


def test_every_exit_code_has_a_consequence():
    known = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    again = {exits.FAILED, exits.STALLED}
    assert known == {*policy.FINAL, policy.SAVED, exits.DONE, *again}, (
        "a new exit code: say in launch/policy.py what follows"
    )
    assert policy.exit_code([0, 1, 139]) == 139 and policy.exit_code([143, 143]) == 143 and policy.exit_code([]) == 0
    assert policy.exit_code([143, 1]) == 1 and policy.exit_code([137, 4]) == 4
