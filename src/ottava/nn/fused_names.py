"""Several parameters under the name of the matrix that they are the rows of, and their entries in a state dict.

[Note: fused names] Gate and up of a gated MLP (and q, k, v of a fused projection that is not interleaved) lie one under the other in one
matrix. Tensor-parallel ranks split each by itself, which one DTensor cannot say: so where a module can be split they are parameters
of their own, over one memory. The name of the whole stays usable: it can be read, assigned and loaded. A module that cannot be split
has the whole as its parameter, and loads parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ottava.nn.draw import is_dtensor
from ottava.nn.held import full, held, placed_like
from ottava.nn.weight_entries import is_bytes, taken
from ottava.quant.weight import Weight
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE, WeightMemory
from ottava.quant.weight_place import blocks_of


def fused(parts: list[Any]) -> Tensor:
    """The parts under one another, with their gradients where all have one."""
    whole = torch.cat(parts)
    if all(part.grad is not None for part in parts):
        whole.grad = torch.cat([part.grad for part in parts])
    return whole


def split_entries(
    state: dict[str, Any], prefix: str, whole: str, rows: Mapping[str, int], parts: Mapping[str, Any]
) -> None:
    """Puts the entries of `whole` under the names of its parts, each with its rows."""
    extra = taken(state, prefix + whole)
    value = extra.pop("")
    del state[prefix + whole]
    own = list(rows.values())
    if not is_dtensor(next(iter(parts.values()))):  # a plain part of a tensor-parallel rank may be smaller
        own = [parts[name].shape[0] for name in rows]
    first = 0
    for name, count in zip(rows, own, strict=True):
        part = parts[name]
        state[prefix + name] = placed_like(part, value[first : first + count])
        for entry, tensor in extra.items():
            memory = held(part).memory
            state[f"{prefix}{name}{entry}"] = _rows_of_entry(tensor, entry.removeprefix("_"), memory, first, count)
        first += count


def _rows_of_entry(tensor: Tensor, entry: str, memory: WeightMemory, first: int, count: int) -> Tensor:
    """The entry of rows [first, first + count) of a whole matrix."""
    if entry == "format" or tensor.dim() == 1:
        return tensor
    if entry == "columnwise":
        return tensor[first : first + count]
    block = memory.block(COLUMNWISE if entry.startswith(COLUMNWISE) else ROWWISE)
    return tensor[blocks_of((first, 0, count, 1), block)[0]]


def join_entries(state: dict[str, Any], prefix: str, whole: str, rows: Mapping[str, int], parameter: Any) -> list[str]:
    """Puts the entries of parts under the name of the whole; what is wrong with them."""
    found = {name: {e: full(t) for e, t in taken(state, prefix + name).items()} for name in rows}
    for name in rows:
        del state[prefix + name]
    values = [entries.pop("") for entries in found.values()]
    state[prefix + whole] = placed_like(parameter, torch.cat(values))
    weight = held(parameter)
    if not isinstance(weight, Weight) or not is_bytes(values[0]):
        return []
    for entry in next(iter(found.values())):
        parts = [entries.get(entry) for entries in found.values()]
        if any(part is None for part in parts):
            continue  # `load_entries` says what is missing
        joined = _joined_entry(parts, entry.removeprefix("_"), weight.memory, list(rows.values()))  # type: ignore[arg-type]
        if joined is None:
            return [f"{list(rows)} have different {entry[1:]}, so that their bytes cannot be {whole}'s."]
        state[f"{prefix}{whole}{entry}"] = joined
    return []


def _joined_entry(parts: list[Tensor], entry: str, memory: WeightMemory, rows: list[int]) -> Tensor | None:
    """One entry of the matrix from those of its parts; None if they differ where they have to agree."""
    if parts[0].dim() == 1:
        return parts[0] if all(torch.equal(part, parts[0]) for part in parts) else None
    if entry == "columnwise":
        return torch.cat(parts)
    block = memory.block(COLUMNWISE if entry.startswith(COLUMNWISE) else ROWWISE)[0]
    joined, first = parts[0].new_empty(-(-sum(rows) // block), parts[0].shape[1]), 0
    for part, count in zip(parts, rows, strict=True):
        top = first // block
        if first % block and not torch.equal(joined[top], part[0]):  # a block that begins in the part before
            return None
        joined[top : top + part.shape[0]] = part
        first += count
    return joined
