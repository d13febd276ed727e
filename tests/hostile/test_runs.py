"""Whatever lies in a run's folder, those who tell about it tell what they can, or refuse: soon, in little memory, without a traceback,
and without a byte that a terminal or a browser would obey."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import re
import shutil
import time
import traceback
from pathlib import Path

import pytest

from hostile.attempts import HANGS_S, MOST_MB, MOST_S, _forget_peak, _resident
from hostile.runs import make_run, runs
from ottava.cli.main import main

COMMANDS = (("report",), ("explain",), ("explain", "--step", "4"), ("status",), ("status", "--json"), ("logs",))
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def ask(folder: Path, *command: str) -> str:
    """What is wrong with the answer; empty: nothing."""
    said = io.StringIO()
    _forget_peak()
    before, began = _resident("VmRSS"), time.process_time()
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([command[0], str(folder), *command[1:]])
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    except BaseException:
        return traceback.format_exc()[-600:]
    finally:
        faulthandler.cancel_dump_traceback_later()
    megabytes, seconds = (_resident("VmHWM") - before) / 1024, time.process_time() - began
    if code not in (0, 2):
        return f"exit code {code}"
    if FORBIDDEN.search(said.getvalue()):
        return f"control characters: {said.getvalue()[:300]!r}"
    if code == 2 and str(folder) not in said.getvalue():
        return f"the run is not named: {said.getvalue()[:300]!r}"
    if seconds > MOST_S or megabytes > MOST_MB:
        return f"{seconds:.1f} s, {megabytes:.0f} MB"
    return ""


def test_a_good_run_is_told(tmp_path):
    make_run(tmp_path / "run")
    assert [ask(tmp_path / "run", *command) for command in COMMANDS] == [""] * len(COMMANDS)
    assert "done" in (tmp_path / "run" / "report.html").read_text()


WORST = ("holes", "escapes", "a pipe", "half a line", "20 MB", "twice", "not begun", "link", "nothing")
"""In the names of those that hung, took gigabytes or reached a terminal once."""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.extra)], ids=["some", "all"])
def test_damaged_and_hostile_runs_are_told_or_refused(tmp_path, whole):
    wrong, cases = [], list(runs())
    assert len(cases) >= 150
    for number, (name, spoil) in enumerate(cases):
        if not (whole or number % 8 == 0 or (number % 3 == 0 and any(word in name for word in WORST))):
            continue
        folder = tmp_path / str(number) / "run"
        make_run(folder)
        spoil(folder)
        wrong += [(name, command, why) for command in COMMANDS if (why := ask(folder, *command))]
        page = folder / "report.html"
        if page.exists() and re.search(r"<script|<img", page.read_text(), re.IGNORECASE):
            wrong.append((name, "report", "the page has a stranger's elements"))
        if (folder.parent / "precious").exists() and (folder.parent / "precious").read_text() != "mine":
            wrong.append((name, "report", "another file was written"))
        shutil.rmtree(folder.parent)
    assert wrong == [], wrong[:5]
