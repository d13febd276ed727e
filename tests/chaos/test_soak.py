"""A short soak: 20 faults on real jobs, and what comes of them has the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ottava.chaos.campaign import Campaign, describe
from ottava.chaos.plan import KINDS, Fault, draw
from ottava.chaos.result import failures, result
from ottava.cli.main import main
from ottava.train.arguments import parse, to_toml
from ottava.train.config import Config
from train.runs import tiny

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
CHEAP = ["sigkill", "sigsegv", "abort", "exception", "slow", "memory"]
"""Of those that a core is not busy with for long."""
SEED = 7
"""One of those that send a single fault to the launcher, after which everything is imported again."""
LATE = ["data", "forward", "backward", "optimizer", "save", "evaluation"]


def job(folder: Path, steps: int) -> Config:
    return tiny(
        folder,
        data={"validation_fraction": 0.02},
        train={"steps": steps, "evaluate_every": 10, "evaluate_batches": 1, "micro_batch": 4},
        precision={"recipe": "none"},
        checkpoint={"every": 8, "background": True},
        metrics={"fp8_every": 0, "console_every": 20},
        health={"restarts": 20, "watchdog_s": 60.0},
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_faults_leave_no_trace(tmp_path):
    config = job(tmp_path, steps=60)
    first = [Fault(0, "sigkill", "start", 1, 0), Fault(1, "sigterm", "data", 0, 2)]
    (drawn,) = draw(CHEAP, 18, seed=SEED, ranks=2, steps=60, phases=LATE, per_run=18)
    faults = [*first, *(replace(fault, number=2 + i, step=4 + 2 * i) for i, fault in enumerate(drawn))]
    said: list[str] = []
    campaign = Campaign(config, 2, "ottava", tmp_path / "work", said.append)
    outcomes = campaign.run([faults])
    found = result([(campaign, outcomes)], seed=SEED, command="")
    assert len(outcomes) == 20 and all(outcome.struck for outcome in outcomes), said
    assert failures(found) == [], said
    rank_died = [one for one in outcomes if one.fault.kind in CHEAP[:-2] and one.fault.rank >= 0]
    assert [describe(one) for one in rank_died if not one.survived] == []
    assert 0.0 < found["effective_training_time_ratio"] < 1.0
    json.dumps(found)


@pytest.mark.extra
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("launcher", ["ottava", "torchrun"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_fault(tmp_path, launcher, ranks):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(parse([str(Path(__file__).parents[2] / "benchmarks" / "chaos.toml")])[0]))
    words = [
        "chaos",
        str(path),
        "--count",
        str(len(KINDS)),
        "--seed",
        "1",
        "--ranks",
        str(ranks),
        "--launcher",
        launcher,
    ]
    assert main([*words, "--work", str(tmp_path / "work")]) == 0


def test_wrong_usage_is_said(tmp_path, capsys):
    config = job(tmp_path, steps=20)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert main(["chaos", str(path), "--faults", "sigfoo"]) == 2
    said = capsys.readouterr().err
    assert "There is no fault 'sigfoo'" in said and "Did you mean 'sig" in said
    assert main(["chaos", str(path), "--launcher", "mpirun"]) == 2
    assert "expected ottava or torchrun" in capsys.readouterr().err
    assert main(["chaos", str(path), "--ranks", "2,two"]) == 2
    assert "ottava chaos: --ranks two: expected numbers of ranks" in capsys.readouterr().err
    for words in (["chaos", str(path), "--count", "0"], ["chaos", str(tmp_path / "none.toml")]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "must be at least 1, got 0" in said and "ottava chaos: " in said and "none.toml cannot be read" in said


def test_faults_that_need_root_are_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said: list[str] = []
    campaign = Campaign(job(tmp_path, steps=20), 2, "ottava", tmp_path, said.append)
    assert campaign._impossible({"disk-full", "sigkill"}) == {"disk-full": "needs root"}
    assert said == ["disk-full: skipped: needs root."]
