"""A sweep: one run for each combination of some keys' values, each in a folder of its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ottava.train.config import Config
from ottava.train.override import override

MOST = 1000
"""Runs of a sweep."""


def sweep(config: Config, texts: list[str]) -> tuple[tuple[str, Config], ...]:
    """(what differs, configuration) of every run; none without texts such as "optimizer.lr=1e-3,3e-3".

    >>> [what for what, _ in sweep(Config(), ["optimizer.lr=1e-3,3e-3", "train.seed=1,2"])]
    ['optimizer.lr=1e-3 train.seed=1', 'optimizer.lr=1e-3 train.seed=2', 'optimizer.lr=3e-3 train.seed=1', 'optimizer.lr=3e-3 train.seed=2']
    """
    choices: list[tuple[str, list[str]]] = []
    for text in texts:
        key, equals, values = text.partition("=")
        words = values.split(",")
        if not equals or not all(words):
            raise ValueError(f"--sweep {text!r} is not of the form section.key=VALUE,VALUE,...")
        if key in ("train.run", *(other for other, _ in choices)):
            raise ValueError(f"--sweep {key}: each key once, and not train.run: every run gets a folder of its own.")
        choices.append((key, [f"{key}={word}" for word in words]))
    combinations = list(itertools.product(*(words for _, words in choices))) if choices else []
    if len(combinations) > MOST:
        raise ValueError(f"--sweep makes {len(combinations)} runs; at most {MOST} are started at a time.")
    found = []
    for number, chosen in enumerate(combinations):
        changed = override(config, ",".join(chosen))
        folder = f"{config.train.run}/sweep-{number}"
        found.append((" ".join(chosen), replace(changed, train=replace(changed.train, run=folder))))
    return tuple(found)
