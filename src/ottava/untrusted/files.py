"""Files that a user names: opened once, without waiting for a pipe, and read only as far as is sensible."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

MOST_TOML_BYTES = 1 << 20
MOST_JSON_BYTES = 16 << 20
MOST_LINES_BYTES = 4 << 30
"""Of a file with a line a step: those of ten million steps."""
MOST_LINE_BYTES = 4 << 20
MOST_LOG_BYTES = 4 << 20
# A key of 64 parts and more. tomllib's time grows with the square of their number: 100,000 take minutes.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?>[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*+){64}""")


def printable(text: str, most: int = 300) -> str:
    """A text that may come from a stranger's file as one printable line.

    >>> printable("a\\nb")
    "'a\\\\nb'"
    """
    line = text if text.isprintable() else ascii(text)
    return line if len(line) <= most else line[:most] + "..."


def shown(text: str) -> str:
    """A text that may come from a stranger's file for a terminal: control characters, but for line ends and tabs, as escapes.

    >>> shown("a\x1b[2J\nb")
    'a\\x1b[2J\nb'
    """
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def open_regular(path: Path, kind: type[ValueError] = ValueError) -> BinaryIO:
    """A regular file, opened for reading, unbuffered. `kind`, with its name, for anything else: a pipe would wait for a writer.

    >>> open_regular(Path("run.toml")).read(100)
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise kind(f"{path} cannot be read: it is not a file.")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(path: Path, most: int, what: str) -> bytes:
    """All bytes of a file that may have at most `most`.

    >>> read_regular(Path("run.toml"), 1 << 20, "a configuration")
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(size + 1)
    if max(size, len(data)) > most:
        raise ValueError(f"{path} has {max(size, len(data))} bytes; {what} has at most {most}.")
    return data


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends, one at a time: ValueError, with its name, if it is none or absurdly long. Of a line that is
    absurdly long the beginning.

        >>> for line in read_lines(Path("runs/debug/metrics.jsonl")): ...
    """
    with open_regular(path) as raw:
        size = os.fstat(raw.fileno()).st_size
        if size > MOST_LINES_BYTES:
            raise ValueError(f"{path} has {size} bytes; such a file has at most {MOST_LINES_BYTES}.")
        file = io.BufferedReader(raw)  # type: ignore[type-var]
        while line := file.readline(MOST_LINE_BYTES):
            rest = line
            while len(rest) == MOST_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MOST_LINE_BYTES)
            yield line


def read_tail(path: Path, most: int = MOST_LOG_BYTES) -> str:
    """The end of a file, of at most `most` bytes, as text. What is no text is replaced.

    >>> read_tail(Path("runs/debug/logs/rank-0.log")).splitlines()[-1]
    """
    with open_regular(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
        return file.read(most).decode(errors="replace")


def open_to_append(path: Path, errors: str = "strict") -> TextIO:
    """A text file to add lines to. A link is not followed: in a folder that a stranger made it may lead to any file of the user's.

    >>> with open_to_append(Path("runs/debug/events.jsonl")) as file: ...
    """
    return os.fdopen(_append(path), "a", encoding="utf-8", errors=errors)


def open_to_append_bytes(path: Path) -> BinaryIO:
    """The same for bytes, unbuffered.

    >>> with open_to_append_bytes(Path("runs/debug/metrics.jsonl")) as file: ...
    """
    return os.fdopen(_append(path), "ab", buffering=0)  # type: ignore[return-value]


def _append(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def open_anew(path: Path) -> TextIO:
    """A text file in the place of what is there, a link too: what that leads to stays as it is.

    >>> with open_anew(Path("runs/debug/error-rank-0.txt")) as file: ...
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w", encoding="utf-8")


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says. ValueError, with its name, if it is none.

    >>> read_toml(Path("run.toml"))["train"]["steps"]
    """
    content = read_regular(path, MOST_TOML_BYTES, "a configuration")
    try:
        text = content.decode()
        if _LONG_KEY.search(text):
            raise ValueError("a key of 64 parts and more")
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path} is not a configuration: it is nested too deep.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {printable(str(error))}.") from error


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads(object_pairs_hook=...): an object whose keys come once each. With two of a name readers disagree on which one counts.

    >>> json.loads('{"a": 1, "a": 2}', object_pairs_hook=once_each)
    Traceback (most recent call last):
    ValueError: the key 'a' comes twice
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {printable(repr(twice), 80)} comes twice")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file with an object says. ValueError, with its name, if it is none.

    >>> read_json(Path("runs/debug/summary.json"))["outcome"]
    """
    content = read_regular(path, MOST_JSON_BYTES, "such a file")
    try:
        found = json.loads(content, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {printable(str(error))}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return found
