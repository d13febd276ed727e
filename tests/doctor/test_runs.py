"""`ottava status` and `ottava logs`: what a run's folder tells, while it runs and afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ottava.cli.main import main
from ottava.doctor.run_logs import errors, find_logs, first_error
from ottava.doctor.run_status import run_status, spelled

NOW = 1_800_000_000.0


def make_run(folder: Path, steps: int = 20, last_step_ago: float = 3.0, **more) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("[train]\nsteps = 100\n")
    lines = [
        {"step": n, "loss": 5 - n / 10, "tokens": n * 1000, "tokens_per_s": 500.0, "step_s": 2.0, "mfu": 0.4,
         "communication_s": 0.1, "attempt": 1} | more
        for n in range(1, steps + 1)
    ]  # fmt: skip
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (NOW - last_step_ago, NOW - last_step_ago))
    return folder


def test_a_running_run(tmp_path) -> None:
    folder = make_run(tmp_path / "run")
    for step in (10, 20):
        (folder / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    manifest = folder / "checkpoints" / "step-00000010" / "manifest.json"
    manifest.write_text("{}")  # that of 20 is not committed yet
    os.utime(manifest, (NOW - 90, NOW - 90))
    found = run_status(folder, NOW)
    assert (found.state, found.step, found.steps, found.eta_s) == ("running", 20, 100, 160.0)
    assert found.checkpoint == "step-00000010" and found.checkpoint_age_s == pytest.approx(90)
    text = found.as_text()
    assert "20 of 100" in text and "2 min 40 s" in text and "40.0%" in text and "restarts" in text
    assert "step-00000010 1 min 30 s ago" in text


def test_a_run_that_has_ended_or_fallen_silent(tmp_path) -> None:
    folder = make_run(tmp_path / "run", last_step_ago=3600)
    found = run_status(folder, NOW)
    assert found.state.startswith("silent for 1 h") and found.eta_s is None
    (folder / "summary.json").write_text(json.dumps({"outcome": "done", "step": 20}))
    assert run_status(folder, NOW).state == "done"
    (folder / "summary.json").write_text(
        json.dumps({"outcome": "stopped by SIGTERM", "step": 15})
    )  # of an earlier start
    assert run_status(folder, NOW).state.startswith("silent")


def test_a_run_that_is_ahead_of_the_clock_says_so(tmp_path) -> None:
    found = run_status(make_run(tmp_path / "run", last_step_ago=-7200.0), NOW)
    assert found.events[-1].startswith("the last step is 2 h ahead of this machine's clock") and found.silent_s == 0.0
    assert run_status(make_run(tmp_path / "other", last_step_ago=-1.0), NOW).events == ()


def test_a_run_that_has_not_stepped_yet(tmp_path) -> None:
    (tmp_path / "config.toml").write_text("[train]\nsteps = 5\n")
    assert run_status(tmp_path, NOW).state == "starting"
    (tmp_path / "error-rank-0.txt").write_text("Traceback (most recent call last):\nValueError: no such file\n")
    found = run_status(tmp_path, NOW)
    assert found.state == "failed" and found.error == "rank 0: ValueError: no such file"


def test_exposed_communication_is_said_in_words(tmp_path) -> None:
    text = run_status(make_run(tmp_path / "run", communication_s=0.8), NOW).as_text()
    assert "40% of a step is communication that nothing hides" in text
    assert "nothing hides" not in run_status(make_run(tmp_path / "other"), NOW).as_text()


def write(path: Path, text: str, when: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (when, when))


def test_the_first_error_is_the_cause_not_a_consequence(tmp_path, capsys) -> None:
    folder = make_run(tmp_path / "run")
    gone = "Traceback (most recent call last):\n  x\nRuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1\n"
    write(
        folder / "logs" / "id" / "attempt_0" / "2" / "stderr.log",
        "Traceback (most recent call last):\nOSError: old\n",
        NOW - 99,
    )
    write(
        folder / "logs" / "id" / "attempt_1" / "0" / "stderr.log", gone, NOW - 9
    )  # written first: its buffer was shorter
    write(folder / "logs" / "id" / "attempt_1" / "0" / "stdout.log", "step 7\n", NOW - 9)
    cause = "fine\nTraceback (most recent call last):\n  y\nValueError: NaN in sample 7\n"
    write(folder / "logs" / "id" / "attempt_1" / "1" / "stderr.log", cause, NOW - 5)
    first = first_error(folder)
    assert first is not None and first.last_line == "rank 1: ValueError: NaN in sample 7"
    assert [error.log.rank for error in errors(folder)] == [1, 0]
    assert [log.rank for log in find_logs(folder)] == [2, 0, 0, 1]
    assert main(["logs", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("First error: rank 1: ValueError: NaN in sample 7")
    write(folder / "logs" / "rank-3.log", "a\n", NOW - 50)
    write(folder / "logs" / "rank-2.log", "b\n", NOW - 40)
    assert main(["logs", str(folder)]) == 0
    ranks = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("==>")]
    assert ranks == ["2:", "2:", "3:", "0:", "0:", "1:"]  # by start, then by rank
    assert main(["logs", str(folder), "--rank", "0"]) == 0
    text = capsys.readouterr().out
    assert "step 7" in text and "NaN" not in text
    assert main(["status", str(folder)]) == 0 and "NaN in sample 7" in capsys.readouterr().out


def start(rank: int, size: int = 4, when: float = NOW - 60, **more) -> str:
    who = {
        "rank": rank,
        "size": size,
        "host": f"node-{rank // 2}",
        "pid": 40 + rank,
        "time": when,
        "restart": 0,
        "launcher": None,
    }
    return f"--- start {json.dumps(who | more)}\n"


def error(text: str, when: float) -> str:
    return f"--- error {when}\nTraceback (most recent call last):\n  x\n{text}\n--- end\n"


def test_errors_of_the_ranks_own_logs_are_ordered_by_time_not_by_file(tmp_path) -> None:
    folder, logs = make_run(tmp_path / "run"), tmp_path / "run" / "logs"
    write(logs / "rank-0.log", start(0) + error("ValueError: later", NOW - 1), NOW - 9)
    write(
        logs / "rank-1.log",
        start(1, when=NOW - 999) + error("OSError: of the start before", NOW - 900) + start(1),
        NOW - 9,
    )
    write(logs / "rank-2.log", start(2) + error("ValueError: first", NOW - 2), NOW)
    write(logs / "rank-3.log", start(3) + error("RuntimeError: Connection closed by peer", NOW - 3), NOW - 20)
    write(
        logs / "rank-9.log",
        start(9, size=16, when=NOW - 999) + error("OSError: of a larger start", NOW - 900),
        NOW - 20,
    )
    assert [found.last_line for found in errors(folder)] == [
        "rank 2: ValueError: first", "rank 0: ValueError: later", "rank 3: RuntimeError: Connection closed by peer",
    ]  # fmt: skip


def test_a_rank_that_was_killed_is_named_by_the_others_missing_it(tmp_path) -> None:
    folder, logs = make_run(tmp_path / "run"), tmp_path / "run" / "logs"
    write(logs / "rank-0.log", start(0, 2) + error("RuntimeError: Connection closed by peer [10.0.0.2]", NOW - 3), NOW)
    write(logs / "rank-1.log", start(1, 2) + "a warning\n", NOW - 5)
    first = first_error(folder)
    assert first is not None and first.log.rank == 1 and "process 41 on node-0 ended without a word" in first.last_line
    write(logs / "rank-0.log", start(0, 2), NOW)  # a run that goes on misses nobody
    assert errors(folder) == []


def test_what_torchrun_keeps_is_told_by_rank_on_several_machines(tmp_path) -> None:
    folder, logs = make_run(tmp_path / "run"), tmp_path / "run" / "logs"
    for rank, agent in enumerate(
        ("none_ab", "none_cd")
    ):  # one process on each of two machines, so both are number 0 there
        own = start(rank, 2, launcher=f"/elsewhere/run/logs/{agent}/attempt_0/0")
        write(logs / f"rank-{rank}.log", own, NOW)
        write(logs / agent / "attempt_0" / "0" / "stderr.log", f"from rank {rank}\n", NOW)
    assert {(log.rank, log.path.parent.parts[-3]) for log in find_logs(folder) if log.path.name == "stderr.log"} == {
        (0, "none_ab"), (1, "none_cd"),
    }  # fmt: skip
    assert main(["logs", str(folder), "--rank", "1"]) == 0


def test_a_straggler_is_one_that_is_slow_most_times(tmp_path) -> None:
    folder = make_run(tmp_path / "run", steps=40)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def told(slow: dict[int, int]) -> tuple[str, ...]:
        changed = [
            line | ({"slow_rank": slow[line["step"]], "slow_rank_times": 1.62} if line["step"] in slow else {})
            for line in lines
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        return run_status(folder, NOW).stragglers

    assert told({20: 3, 30: 3, 40: 3}) == ("rank 3: 1.6 times the others' work",)
    assert "straggler" in run_status(folder, NOW).as_text()
    assert told({40: 3}) == () and told({10: 1, 20: 2, 30: 3, 40: 0}) == ()


def test_stalls_and_kept_errors_are_shown(tmp_path) -> None:
    folder = make_run(tmp_path / "run")
    for rank in range(2):
        write(
            folder / "stalls" / f"rank-{rank}.txt", "no step for 60 s. Rank 1 is behind: step 7, data.\nstacks\n", NOW
        )
    write(folder / "error-rank-3.txt", "Traceback (most recent call last):\n  z\nValueError: wrong\n", NOW)
    found = run_status(folder, NOW)
    assert found.state == "failed" and found.eta_s is None
    assert found.stalls == ("no step for 60 s. Rank 1 is behind: step 7, data.",)
    assert found.error == "rank 3: ValueError: wrong"


def test_no_run_is_exit_2(tmp_path, capsys) -> None:
    assert main(["status", str(tmp_path)]) == 2 and "is not a run" in capsys.readouterr().err
    assert main(["logs", str(tmp_path)]) == 2 and "--log-dir" in capsys.readouterr().err
    make_run(tmp_path / "run")
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20


def test_times_are_spelled() -> None:
    assert [spelled(s) for s in (0.4, 59, 60, 3700, 90000)] == ["0 s", "59 s", "1 min", "1 h 1 min", "1 d 1 h"]


def test_every_runbook_begins_with_a_command() -> None:
    text = (Path(__file__).parents[2] / "docs" / "runbooks.md").read_text()
    titles = [
        "MFU has dropped",
        "Nothing moves",
        "Ranks die again and again",
        "Out of memory",
        "NCCL talks over sockets",
        "One machine is slow",
        "The loss is not a number",
    ]
    sections = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in text.split("\n## ")[1:]}
    assert list(sections) == titles
    for section in sections.values():
        assert section.startswith("```bash\n") and "ottava" in section.splitlines()[1]
