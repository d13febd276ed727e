"""What may lie where any file is expected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], str]
"""Gets a folder with a good example in it, spoils that, and returns the name that the error has to contain (several, with "|" between
them, where any of them will do)."""
CONFIG_JSON, INDEX_JSON = "config.json", "model.safetensors.index.json"
TOKENS, TOKENIZER, TOML = "corpus.tokens", "tokenizer.json", "run.toml"
DEEP = 100_000  # brackets in a row


def replaced(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def make_holes(path: Path, size: int = 1 << 40) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def anything(find: Callable[[Path], Path], name: str | None = None) -> Iterator[tuple[str, Spoil]]:
    """What may lie where any file is expected."""
    ways: dict[str, Callable[[Path], Any]] = {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "empty": lambda path: path.write_bytes(b""),
        "zeros": lambda path: path.write_bytes(bytes(5000)),
        "not text": lambda path: path.write_bytes(bytes(range(255, -1, -1)) * 20),
        "a terabyte of holes": make_holes,
        "brackets": lambda path: path.write_text("[" * DEEP),
        "braces": lambda path: path.write_text('{"a":' * DEEP),
    }
    for way, make in ways.items():

        def spoil(folder: Path, make: Callable[[Path], Any] = make) -> str:
            path = find(folder)
            replaced(path, make)
            return name or path.name

        yield way, spoil
