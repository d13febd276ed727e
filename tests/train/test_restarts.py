"""What restarts cost, and the share of the time that goes into steps that count."""

from __future__ import annotations

import json
import math
import os
import time

import pytest

from ottava.train.restarts import FILE, effective_ratio, modelled_ratio, note_restart, read_restarts


def write(folder, steps: int, ago: float) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "step_s": 2.0}) + "\n" for step in range(1, steps + 1)))
    then = time.time() - ago
    os.utime(path, (then, then))


def test_a_restart_costs_the_time_without_steps_and_the_steps_that_are_done_again(tmp_path):
    write(tmp_path, 10, ago=30.0)
    assert note_restart(tmp_path, 0, 0) is None  # the first start is none
    found = note_restart(tmp_path, 1, done=7, cause="rank 1 ended (SIGKILL)", in_place=True)
    assert found.redone_s == 6.0 and 29.0 < found.down_s < 60.0 and found.step_before == 10 and found.step == 7
    assert read_restarts(tmp_path) == [found]
    lines = [{"step": step, "step_s": 2.0} for step in range(1, 51)]
    assert effective_ratio(lines, [found]) == pytest.approx(100.0 / (100.0 + found.lost_s))
    assert effective_ratio([], []) is None


@pytest.mark.parametrize("hours", [-10, 10])
def test_seconds_without_a_step_are_counted_by_the_clock_that_stamps_the_files(tmp_path, monkeypatch, hours):
    write(tmp_path, 10, ago=30.0)
    now = time.time()
    monkeypatch.setattr("ottava.train.restarts.time.time", lambda: now + 3600 * hours)  # not the file server's
    assert 29.0 < note_restart(tmp_path, 1, done=10).down_s < 60.0
    future = now + 7200  # a clock that was set back
    os.utime(tmp_path / "metrics.jsonl", (future, future))
    assert note_restart(tmp_path, 2, done=10).lost_s == 0.0


def test_a_run_that_was_stopped_on_purpose_has_lost_nothing(tmp_path):
    write(tmp_path, 10, ago=3600.0)
    (tmp_path / "summary.json").write_text(json.dumps({"outcome": "stopped by SIGTERM"}))
    found = note_restart(tmp_path, 1, done=10)
    assert found.planned and found.lost_s == 0.0
    write(tmp_path, 12, ago=0.0)
    os.utime(tmp_path / "summary.json", (1, 1))  # of an earlier attempt
    assert not note_restart(tmp_path, 2, done=12).planned


def test_a_summary_that_is_damaged_does_not_keep_a_run_from_going_on(tmp_path):
    write(tmp_path, 2, ago=0.0)
    for content in ("[]", '"done"', "{", "[" * 100_000, '{"outcome": 3}'):
        (tmp_path / "summary.json").write_text(content)
        assert not note_restart(tmp_path, 1, done=2).planned
    (tmp_path / "summary.json").unlink()
    os.mkfifo(tmp_path / "summary.json")
    assert not note_restart(tmp_path, 1, done=2).planned


def test_damaged_lines_are_passed_over(tmp_path):
    (tmp_path / FILE).write_text('{"attempt": 1}\n[]\nnonsense\n')
    assert read_restarts(tmp_path) == [] and read_restarts(tmp_path / "nowhere") == []
    good = {"attempt": 1, "cause": "x", "in_place": True, "planned": False, "step_before": 2, "step": 1}
    lines = [{**good, "down_s": 1.0, "redone_s": math.inf}, {**good, "down_s": "<b>", "redone_s": 1.0}]
    (tmp_path / FILE).write_text(
        "\n".join(json.dumps(line) for line in [*lines, {**good, "down_s": 1.0, "redone_s": 0.5}])
    )
    assert [restart.lost_s for restart in read_restarts(tmp_path)] == [1.5]
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    assert read_restarts(tmp_path) == []


def test_the_model_of_16384_ranks_reaches_98_percent_with_copies_and_not_without():
    """One interruption in 3 hours, steps of 60 s, a checkpoint every 10 minutes. Recovery: 3 s measured on 4 ranks, and 60 s assumed for
    making the groups of so many."""
    hours3, step, checkpoint = 3 * 3600.0, 60.0, 600.0
    assert modelled_ratio(hours3, step, state_every_s=step, recovery_s=63.0, overhead=0.01) >= 0.98
    assert modelled_ratio(hours3, step, state_every_s=checkpoint, recovery_s=63.0) < 0.97
    assert modelled_ratio(hours3, step, step, recovery_s=0.0) == pytest.approx(1 - 30 / hours3)
    assert modelled_ratio(100.0, step, step, recovery_s=1000.0) == 0.0
