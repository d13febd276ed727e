"""torchrun with the exit codes of its ranks, a time to save, and no restarts that cannot help. The ranks here are a few words of shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from launch.jobs import environment, wait_until

CASES = """
import json, sys
from ottava.launch.agent import main
print(json.dumps([main(words) for words in json.load(sys.stdin)]))
"""


def agent(command: str, ranks: int = 1, restarts: int = 0, grace: float = 5.0) -> list[str]:
    """Words for the agent, whose ranks run `command` in a shell."""
    shape = [f"--grace={grace}", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return [*shape, "--no-python", "bash", "-c", command]


def test_its_exit_code_is_the_ranks_and_a_final_one_is_not_tried_again(tmp_path):
    def rank(code: int) -> str:
        return f"echo x >> {tmp_path}/{code}; exit {code}"

    killed = f'echo x >> {tmp_path}/137; if [ "$RANK" = 1 ]; then kill -9 $BASHPID; fi; sleep 20; exit 143'
    once_more = f"if [ -e {tmp_path}/once ]; then exit 0; fi; touch {tmp_path}/once; exit 6"
    cases = [
        agent(rank(0)),
        agent(rank(2), restarts=2),
        agent(rank(6), restarts=1),
        agent(rank(143), restarts=1),  # another node was stopped: this one's ranks start again and wait for it
        agent(killed, ranks=2),
        agent(once_more, restarts=1),
    ]
    done = subprocess.run(
        [sys.executable, "-c", CASES],
        input=json.dumps(cases),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 2, 6, 143, 137, 0], done.stderr
    starts = {path.name: len(path.read_text().splitlines()) for path in tmp_path.iterdir()}
    assert starts == {"0": 1, "2": 1, "6": 2, "143": 2, "137": 2, "once": 0}


def signalled(folder: Path, command: str, *numbers: signal.Signals, grace: float = 30.0) -> subprocess.Popen[str]:
    """The agent, when its rank has said that it is ready and the signals were sent."""
    ready = folder / "ready"
    words = [
        sys.executable,
        "-m",
        "ottava.launch.agent",
        *agent(f"{command} touch {ready}; while true; do sleep 0.1; done", grace=grace),
    ]
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_until(ready.exists, "the rank", otherwise=lambda: str(process.poll()))
    for number in numbers:
        os.kill(process.pid, number)
        if number != numbers[-1]:
            wait_until((folder / "saving").exists, "the save")
    return process


def test_a_signal_gives_the_ranks_time_to_save_and_a_second_one_does_not_take_it(tmp_path):
    saves = f"trap 'touch {tmp_path}/saving; sleep 3; touch {tmp_path}/saved; exit 143' USR1 TERM;"
    process = signalled(tmp_path, saves, signal.SIGUSR1, signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143 and (tmp_path / "saved").exists(), said
    assert "SIGUSR1: the ranks have ended" in said


def test_a_rank_that_does_not_save_in_time_is_killed_and_said(tmp_path):
    process = signalled(tmp_path, "trap '' TERM;", signal.SIGTERM, grace=1.0)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 137 and "1 ranks did not save in time" in said, said
