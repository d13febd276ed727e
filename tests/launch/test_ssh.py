"""Machines by ssh. The `ssh` here is a script that runs the command on this machine, under the name of the host; a host whose name
begins with `gone` does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.jobs import (
    attempts,
    children,
    config_file,
    environment,
    lines,
    losses,
    reference,
    resumed_after,
    shorten,
    wait_until,
)
from ottava.cli.main import main

FAKE = """#!/bin/bash
while [[ "$1" == -* ]]; do shift 2; done
if [[ "$1" == gone* ]]; then echo "ssh: connect to host $1: No route to host" >&2; exit 255; fi
host=$1; shift
HOST=$host exec bash -c "$*"
"""
# Two names of this machine.
HOSTS = "localhost,127.0.0.1"


@pytest.fixture
def path(tmp_path: Path) -> dict[str, str]:
    """Variables with which the stand-in is found."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def words(config: Path, *more: str) -> list[str]:
    return [
        "launch",
        str(config),
        "--on",
        "ssh",
        "--device",
        "cpu",
        "--per-node",
        "1",
        "--interface",
        "lo",
        "--grace",
        "60",
        *more,
    ]


def test_nothing_is_started_where_a_machine_does_not_answer_or_lacks_something(tmp_path, path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", path["PATH"])
    config = config_file(tmp_path, "run")
    assert main(words(config, "--hosts", "localhost,gone-1", "--python", "true", "--submit")) == 69
    said = capsys.readouterr().err
    assert "gone-1: No route to host" in said and "Nothing was started" in said
    assert main(words(config, "--hosts", HOSTS, "--python", "/nowhere/python", "--submit")) == 69
    assert "/nowhere/python" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"launch"}


def start(config: Path, path: dict[str, str], *more: str) -> subprocess.Popen[str]:
    call = [sys.executable, "-m", "ottava", *words(config, "--hosts", HOSTS, *more, "--submit")]
    return subprocess.Popen(call, env=environment(path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def script_of(launcher: subprocess.Popen[str]) -> int:
    """The bash that starts and stops everything."""
    (found,) = [pid for pid in children(launcher.pid) if b"ssh.sh" in Path(f"/proc/{pid}/cmdline").read_bytes()][:1]
    return found


@pytest.mark.extra
@pytest.mark.timeout(1800)
def test_stopped_and_started_again_it_has_the_losses_of_one_machine(tmp_path, path):
    config, run = config_file(tmp_path, "run"), tmp_path / "run"
    launcher = start(config, path)
    wait_until(lambda: len(lines(run)) >= 6, "step 6", otherwise=lambda: str(launcher.poll()))
    os.kill(script_of(launcher), signal.SIGTERM)
    said = launcher.communicate(timeout=600)[0]
    assert launcher.returncode == 143 and "stopped by SIGTERM" in said, said
    steps = shorten(config, run)
    again = start(config, path)
    said = again.communicate(timeout=600)[0]
    assert again.returncode == 0 and losses(run) == reference(tmp_path, steps) and attempts(run) == {0, 1}, said


@pytest.mark.extra
@pytest.mark.timeout(1800)
def test_a_lost_machine_leaves_the_other_to_go_on_alone(tmp_path, path):
    config, run = config_file(tmp_path, "run"), tmp_path / "run"
    launcher = start(config, path, "--min-nodes", "1")
    wait_until(lambda: len(lines(run)) >= 6, "step 6", otherwise=lambda: str(launcher.poll()))
    agent = int((run / "launch" / "agent-1.pid").read_text())
    for pid in [agent, *children(agent)]:  # all of the second machine, at once
        os.kill(pid, signal.SIGKILL)
    steps = shorten(run / "launch" / "config.toml", run)
    said = launcher.communicate(timeout=900)[0]
    assert launcher.returncode == 0 and attempts(run) == {0, 1}, said
    assert losses(run) == reference(tmp_path, steps, alone_after=resumed_after(run)), said
