"""What ranks tell each other beside tensors: plain values, as JSON in a tensor of bytes.

torch's `all_gather_object` and its kin send pickles: whoever can write to a connection between ranks runs code in the other one. Here a
message can be a number, a text, a list, a dict with texts for keys, a dtype, a Path, or a class that was marked with `travels`; and
nothing that is received is called, but such a class with its fields. Lists arrive as tuples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Class = TypeVar("Class", bound=type)
Group = Any  # a dist.ProcessGroup; None: all ranks

_CLASSES: dict[str, type] = {}
_KIND, _VALUE = "~", "v"


def travels(cls: Class) -> Class:
    """Marks a dataclass whose objects ranks may send each other.

    >>> @travels
    ... @dataclass(frozen=True)
    ... class Report:
    ...     written: int
    """
    assert is_dataclass(cls) and _CLASSES.get(cls.__name__, cls) is cls, cls
    _CLASSES[cls.__name__] = cls
    return cls


def encode(value: Any) -> bytes:
    """
    >>> encode((1, torch.float32))
    b'[1, {"~": "dtype", "v": "float32"}]'
    """
    return json.dumps(value, default=_described).encode()


def decode(data: bytes) -> Any:
    """What `encode` was given, with tuples for lists. ValueError for what no rank of this program sends.

    >>> decode(encode([1, {"a": torch.float32}]))
    (1, {'a': torch.float32})
    """
    try:
        return _tuples(json.loads(data, object_hook=_made))
    except (ValueError, RecursionError, TypeError) as error:
        raise ValueError(f"A message of another rank cannot be understood: {str(error)[:120]}") from error


def _described(value: Any) -> dict[str, Any]:
    """What JSON has no form for."""
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        return {_KIND: name, _VALUE: [getattr(value, field) for field in _names_of(type(value))]}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", _VALUE: str(value).removeprefix("torch.")}
    if isinstance(value, Path):
        return {_KIND: "Path", _VALUE: str(value)}
    raise ValueError(f"Ranks do not send each other a {type(value).__name__}: use numbers, texts, lists and dicts.")


def _names_of(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


def _made(found: dict[str, Any]) -> Any:
    if found.keys() != {_KIND, _VALUE}:
        return {key: _tuples(value) for key, value in found.items()}
    kind, value = found[_KIND], found[_VALUE]
    if kind == "dtype" and isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if kind == "Path" and isinstance(value, str):
        return Path(value)
    if isinstance(kind, str) and kind in _CLASSES and isinstance(value, list):
        return _CLASSES[kind](*map(_tuples, value))
    raise ValueError(f"there is no {str(kind)[:40]!r} with {str(value)[:40]!r}.")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------------- collectives


def broadcast(value: Any, group: Group = None) -> Any:
    """Rank 0's value, in every rank.

    >>> broadcast({"step": 3} if rank == 0 else None)
    {'step': 3}
    """
    data = _tensor(encode(value)) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    data = data if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return decode(_bytes(data))


def gather(value: Any, group: Group = None) -> list[Any]:
    """Every rank's value, by rank, in rank 0; [] elsewhere.

    >>> gather(socket.gethostname())
    """
    data = _tensor(encode(value))
    sizes = _sizes(data, group)
    rows = torch.empty(len(sizes), max(sizes), dtype=torch.uint8) if dist.get_rank() == 0 else None
    dist.gather(_padded(data, max(sizes)), None if rows is None else list(rows), 0, group=group)
    return [] if rows is None else [decode(_bytes(row[:size])) for row, size in zip(rows, sizes)]


def scatter(values: Sequence[Any], group: Group = None) -> Any:
    """Of rank 0's values, one a rank, this rank's.

    >>> scatter([f"for rank {r}" for r in range(size)] if rank == 0 else [])
    """
    parts = [_tensor(encode(value)) for value in values] if dist.get_rank() == 0 else []
    count = dist.get_world_size(group)
    sizes = torch.tensor([part.numel() for part in parts] if parts else [0] * count, dtype=torch.int64)
    dist.broadcast(sizes, 0, group=group)
    most, mine = int(sizes.max()), int(sizes[dist.get_rank(group)])
    data = torch.empty(most, dtype=torch.uint8)
    dist.scatter(data, [_padded(part, most) for part in parts] or None, 0, group=group)
    return decode(_bytes(data[:mine]))


def all_gather(value: Any, group: Group = None, device: torch.device | str = "cpu") -> list[Any]:
    """Every rank's value, by rank, in every rank. device: of tensors that the group can send.

    >>> all_gather(len(mine), mesh.get_group(), mesh.device_type)
    """
    data = _tensor(encode(value)).to(device)
    sizes = _sizes(data, group)
    rows = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(rows, _padded(data, max(sizes)), group=group)
    return [decode(_bytes(row[:size])) for row, size in zip(rows, sizes)]


def _sizes(data: Tensor, group: Group) -> list[int]:
    found = [torch.empty(1, dtype=torch.int64, device=data.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.tensor([data.numel()], dtype=torch.int64, device=data.device), group=group)
    return [int(size) for size in found]


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - data.numel()))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
