"""Every file of the corpus is refused by name, soon and in little memory; the good examples that they were made of are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hostile.attempts import OPEN, run
from hostile.corpus import cases, make_good

WORST = {
    "50 MB of braces beside a shard of holes",
    "9,000 boxes, in rows and in columns, of which two overlap",
    "a file's name is nested tuples",
    "the index is nested tuples",
    "a table that cannot be parsed, which panics",
    "documents of holes",
    "a name of a hundred thousand parts",
}
"""Which took minutes, gigabytes or a traceback once."""


def test_the_good_examples_are_taken(tmp_path):
    for kind in dict.fromkeys(case.kind for case in cases()):
        folder = tmp_path / kind
        folder.mkdir()
        make_good(kind, folder)
        if kind == "checkpoint":
            with pytest.raises(AssertionError, match="it was loaded"):
                OPEN[kind](folder)
        else:
            OPEN[kind](folder)


def test_there_are_enough_of_each_kind():
    counts = Counter(case.kind for case in cases())
    assert sum(counts.values()) >= 350 and min(counts.values()) >= 30
    assert len({(case.kind, case.name) for case in cases()}) == sum(counts.values())


def test_one_in_sixteen_and_the_worst_are_refused():
    chosen = [case for i, case in enumerate(cases()) if i % 16 == 0 or case.name in WORST]
    assert {case.name for case in chosen} >= WORST
    wrong = [(o.case.kind, o.case.name, o.wrong, o.said[:200]) for o in run(chosen) if o.wrong]
    assert wrong == []


@pytest.mark.extra
def test_all_are_refused():
    """In a process of its own, whose memory nobody else has filled before."""
    done = subprocess.run(
        [sys.executable, "-m", "hostile.attempts"], capture_output=True, text=True, timeout=1500, env=_environment()
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def _environment() -> dict[str, str]:
    tests = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))}
