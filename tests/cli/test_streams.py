"""Consoles that are closed, or that nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from ottava.cli import streams
from ottava.cli.main import main


def test_nobody_reads_any_more(monkeypatch, capfd, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for words in (["--help"], ["train", "--help"], ["explain", str(tmp_path)], ["status", str(tmp_path)]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as console:
            monkeypatch.setattr(sys, "stdout", console)
            assert main(words) == streams.NOT_READ == 141
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        assert main(["train", "--dry-run", "--parallel.ranks", "1"]) == 0
    assert capfd.readouterr().err == ""


def test_a_console_that_is_full_is_one_sentence(monkeypatch, capsys):
    with open("/dev/full", "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        assert main(["--help"]) == 2
    assert capsys.readouterr().err == "ottava: [Errno 28] No space left on device\n"


def test_closed_streams_are_nobodys_file():
    """The next file that is opened must not become the console that messages go to."""
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        sys.stdin = sys.stdout = sys.stderr = None
        try:
            streams.complete()
            print("to nobody", file=sys.stderr, flush=True)
            os._exit(os.open(os.devnull, os.O_RDONLY) < 3 or sys.stdin.read() != "")
        finally:
            os._exit(9)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["export", "x", "y", "--max-shard-gib", "inf"],
        ["import", "x", "y", "--step", "-1"],
        ["import", "x", "y", "--pad-vocab-to", "1000000000000"],
    ],
)
def test_absurd_numbers_are_refused_by_their_option(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["checkpoint", *words])
    assert stopped.value.code == 2 and f"argument {words[3]}: " in capsys.readouterr().err


@pytest.mark.parametrize("when, code", [("before", 130), ("after", 143)])
def test_ctrl_c_before_a_run_has_no_traceback_and_after_it_changes_no_exit_code(when, code):
    script = textwrap.dedent(
        f"""
        import atexit, os, signal, sys
        from ottava.cli import train
        from ottava.cli.main import main

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored

        def run(words):
            if words == ["before"]:
                signal.raise_signal(signal.SIGINT)
            return 143

        train.run, sys.argv = run, ["ottava", "train", {when!r}]
        code = main()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as Python does it on its way out
        atexit.register(os.kill, os.getpid(), signal.SIGINT)
        sys.exit(code)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == code and done.stderr == "", done
