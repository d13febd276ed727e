"""A configuration with keys changed by words such as `optimizer.lr=1e-3`, as `--set` and `--sweep` take them."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ottava.notices import did_you_mean
from ottava.train.config import Config


def override(config: Config, text: str) -> Config:
    """`config` with keys changed: "precision.recipe=DelayedScaling,train.compile=true".

    >>> override(Config(), "optimizer.lr=0.1").optimizer.lr
    0.1
    """
    changes: dict[str, dict[str, Any]] = {}
    for word in filter(None, text.split(",")):
        path, equals, value = word.partition("=")
        section, _, key = path.strip().partition(".")
        if not equals or not is_dataclass(getattr(config, section, None)):
            meant = did_you_mean(section, [field.name for field in fields(config)])
            raise ValueError(f"{word!r} is not of the form section.key=value, with a section of `ottava train`.{meant}")
        part: Any = getattr(config, section)
        known = [field.name for field in fields(part)]
        if key not in known:
            meant = did_you_mean(key, known) or f" There are: {', '.join(known)}."
            raise ValueError(f"{word!r}: the section {section} has no key {key!r}.{meant}")
        changes.setdefault(section, {})[key] = _value(typing.get_type_hints(type(part))[key], value.strip(), word)
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in changes.items()})


def _value(kind: Any, text: str, word: str) -> Any:
    """`text` as a field of type `kind` takes it."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if text not in choices:
            meant = did_you_mean(text, map(str, choices))
            raise ValueError(f"{word!r}: expected one of {', '.join(map(str, choices))}.{meant}")
        return text
    if origin in (typing.Union, types.UnionType):
        kinds = [choice for choice in choices if choice is not type(None)]
        return None if text == "none" and len(kinds) < len(choices) else _value(kinds[0], text, word)
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{word!r}: expected true or false.")
        return text == "true"
    if kind not in (int, float, str):
        raise ValueError(f"{word!r}: a value of several parts cannot be given here.")
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{word!r}: expected a value of type {kind.__name__}.") from error
