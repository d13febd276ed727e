"""A nested state as flat names: tensors on one side, plain values on the other.

>>> flat = flatten({"model": {"w": torch.zeros(2)}, "optimizer": {"groups": [{"lr": 0.1}]}})
>>> sorted(flat.tensors), flat.values
(['model.w'], {'optimizer.groups.0.lr': 0.1})
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ottava.checkpoint.boxes import Part

Path = tuple[str | int, ...]


@dataclass
class Flat:
    """What `flatten` found. Names are the path's parts joined by dots, as DCP joins them."""

    tensors: dict[str, Tensor | Part]
    values: dict[str, Any]
    paths: dict[str, Path]


def flatten(state: Mapping[str, Any]) -> Flat:
    """ValueError for two entries with one name and for values that JSON cannot hold exactly."""
    flat = Flat({}, {}, {})
    for path, leaf in _leaves((), state):
        name = ".".join(str(part) for part in path)
        if name in flat.paths:
            raise ValueError(
                f"Two entries of the state are called {name!r}: {flat.paths[name]} and {path}. Rename one."
            )
        flat.paths[name] = path
        if isinstance(leaf, Tensor | Part):
            flat.tensors[name] = leaf
        else:
            flat.values[name] = _plain(name, leaf)
    return flat


def assign(state: Any, path: Path, value: Any) -> None:
    """state[path[0]][path[1]]... = value; a tuple stays a tuple, which JSON does not know."""
    for part in path[:-1]:
        state = state[part]
    try:
        state[path[-1]] = tuple(value) if isinstance(state[path[-1]], tuple) else value
    except TypeError as error:
        name = ".".join(str(part) for part in path)
        raise ValueError(f"{name} cannot be restored into a {type(state).__name__}: use a dict or a list.") from error


def _leaves(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, Mapping) and (node or not path):
        for key, child in node.items():
            if type(key) not in (str, int):
                raise ValueError(
                    f"Key {key!r} in {'.'.join(map(str, path)) or 'the state'}: expected a string or an integer."
                )
            yield from _leaves((*path, key), child)
    elif isinstance(node, list | tuple) and any(isinstance(n, Mapping | list | tuple | Tensor | Part) for n in node):
        for i, child in enumerate(node):
            yield from _leaves((*path, i), child)
    else:
        yield path, node


def _plain(name: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, v) for v in value]
    if isinstance(value, Mapping) and not value:
        return {}
    raise ValueError(
        f"{name} is {value!r:.60} ({type(value).__name__}): expected a tensor, or None, bool, int, finite float, str and lists or "
        f"dicts of them. Save it as a tensor, or as its settings."
    )
