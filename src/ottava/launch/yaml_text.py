"""Plain data as YAML for people: enough of it for manifests, so that nobody needs a package to write one."""

from __future__ import annotations

import json
import re
from typing import Any

PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@-]*")
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""What YAML would take for something else than text."""


def to_yaml(value: Any, indent: int = 0) -> str:
    """Dicts, lists, texts, numbers and truth values, without the end of the last line.

    >>> print(to_yaml({"name": "a", "list": [1, {"b": "2"}]}))
    name: a
    list:
      - 1
      - b: "2"
    """
    space = "  " * indent
    if isinstance(value, dict) and value:
        return "\n".join(f"{space}{_scalar(str(key))}:{_below(item, indent)}" for key, item in value.items())
    if isinstance(value, list | tuple) and value:
        return "\n".join(_item(item, indent) for item in value)
    return space + _scalar(value)


def _below(value: Any, indent: int) -> str:
    if isinstance(value, dict | list | tuple) and value:
        return "\n" + to_yaml(value, indent + 1)
    if isinstance(value, str) and _is_block(value):
        pad = "  " * (indent + 1)
        return " |\n" + "\n".join(pad + line if line else "" for line in value[:-1].split("\n"))
    return " " + _scalar(value)


def _item(value: Any, indent: int) -> str:
    space = "  " * indent
    if isinstance(value, dict | list | tuple) and value:
        return space + "- " + to_yaml(value, indent + 1)[len(space) + 2 :]
    return f"{space}- {_scalar(value)}"


def _is_block(text: str) -> bool:
    """Whether a text can stand as lines. What could be misread is written as JSON instead."""
    lines = text.split("\n")
    readable = all(line.isprintable() and line.isascii() and not line.endswith(" ") for line in lines)
    return (
        len(lines) > 2
        and lines[-1] == ""
        and lines[-2] != ""
        and not lines[0].startswith(" ")
        and lines[0] != ""
        and readable
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return _quoted(value) if isinstance(value, str) else json.dumps(list(value) if isinstance(value, tuple) else value)


def _quoted(text: str) -> str:
    """Not JSON's: that writes what lies beyond 16 bits as two characters."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(c, c if " " <= c <= "~" else f"\\U{ord(c):08x}") for c in text) + '"'


def documents(values: list[Any]) -> str:
    """Several in one file."""
    return "\n---\n".join(to_yaml(value) for value in values) + "\n"
