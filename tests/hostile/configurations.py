"""Configurations: what a TOML file may say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hostile.spoil import DEEP, TOML, Spoil, anything


def configurations() -> Iterator[tuple[str, Spoil]]:
    yield from ((way, spoil) for way, spoil in anything(lambda folder: folder / TOML) if way != "empty")
    for name, text in _tomls().items():
        yield name, partial(_toml, text=text)


def _tomls() -> dict[str, str]:
    return {
        "lists in lists": "a = " + "[" * DEEP,
        "tables in tables": "a = " + "{b = " * 50_000,
        "a name of a hundred thousand parts": "a" + ".a" * DEEP + " = 1",
        "a table's name of a hundred thousand parts": "[a" + ".a" * DEEP + "]",
        "2 MB of spaces": " " * (2 << 20),
        "cut short": "[train\nsteps = 1",
        "twice the same key": "[train]\nsteps = 1\nsteps = 2",
        "a number of 5,000 digits": "[train]\nsteps = " + "9" * 5000,
        "an unknown section": "[evil]\na = 1",
        "an unknown key": "[train]\nevil = 1",
        "a section of text": 'train = "steps"',
        "a section in a list": "[[train]]\nsteps = 1",
        "a section named by an escape": '["\\u001b[2J"]\na = 1',
        "steps of text": '[train]\nsteps = "many"',
        "steps of dates": "[train]\nsteps = 2020-01-01",
        "steps in a table": "[train]\nsteps = {a = 1}",
        "steps in a list": "[train]\nsteps = [1, 2]",
        "half a step": "[train]\nsteps = 1.5",
        "steps that are no number": "[train]\nsteps = nan",
        "files that are options": '[data]\nfiles = ["--train.steps=1"]',
        "a preset that is a list": 'preset = ["gpt2"]',
        "a preset that nobody knows": 'preset = "../../etc/passwd"',
        "an endless learning rate": "[optimizer]\nlr = inf",
        "a learning rate that is no number": "[optimizer]\nlr = nan",
        "a learning rate of a time of day": "[optimizer]\nlr = 07:32:00",
        "an eps that is no number": "[optimizer]\neps = nan",
        "betas that are no numbers": "[optimizer]\nbetas = [nan, 0.9]",
        "a mixture that is no number": '[data]\nfiles = ["x"]\nweights = [nan]',
        "a section that is a date": "train = 2020-01-01T00:00:00Z",
        "2^70 steps": "[train]\nsteps = 1180591620717411303424",
        "a batch of 2^62": "[train]\nglobal_batch = 4611686018427387904",
        "a hidden size of 2^40": "[model]\nhidden_size = 1099511627776",
        "a billion layers": "[model]\nlayers = 1000000000",
        "sequences of 2^62": "[data]\nlength = 4611686018427387904",
        "2^40 batches ahead": "[data]\nprefetch = 1099511627776",
        "a million ranks": "[parallel]\nranks = 1000000",
        "a port of a million": "[metrics]\nprometheus_port = 1000000",
        "an address with a line end": '[metrics]\nprometheus_port = 1\nprometheus_address = "evil\\n"',
        "a run that clears the screen": '[train]\nrun = "a\\u001b[2J"',
        "a run of two lines": '[train]\nrun = "a\\nb"',
        "a run with a zero": '[train]\nrun = "a\\u0000b"',
        "a project that clears the screen": '[metrics]\nwandb_project = "a\\u001b[2J"',
        "a prompt that clears the screen": '[train]\nsample_prompt = "a\\u001b[2J"',
        "a learning rate of text": '[optimizer]\nlr = "fast"',
    }


def _toml(folder: Path, text: str) -> str:
    (folder / TOML).write_text(text)
    return TOML
