"""`Reader`: a checkpoint in one process, a piece at a time; for tools that work on more than fits into memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.checkpoint.boxes import Box, Part
from ottava.checkpoint.flat import Flat
from ottava.checkpoint.load import open_checkpoint, plan_reads, read_all
from ottava.checkpoint.manifest import Manifest
from ottava.checkpoint.metadata import Entry
from ottava.checkpoint.storage import Location, folder_at


class Reader:
    """Verifies a checkpoint when it is opened, then reads what is asked for and keeps nothing.

    path: a checkpoint's directory or URL. InvalidCheckpoint if it is not what its manifest says.

        >>> reader = Reader("run/checkpoints/step-00000100")
        >>> first_rows = reader.read("model.embedding.weight", ((0, 0), (128, 4096)))
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        self._opened = open_checkpoint(folder_at(path))

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint says about itself."""
        return self._opened.manifest

    @property
    def entries(self) -> dict[str, Entry]:
        """The stored tensors by name."""
        return self._opened.entries

    @property
    def values(self) -> dict[str, Any]:
        """The plain values by name."""
        return self._opened.values

    @property
    def config(self) -> Any:
        """The configuration that was saved with it."""
        return self._opened.config

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box (offset, shape) of it."""
        entry = self.entries.get(name)
        if entry is None:
            raise ValueError(f"The checkpoint has no tensor {name!r}; `ls` lists those it has.")
        offset, shape = box or ((0,) * len(entry.shape), entry.shape)
        tensor = torch.empty(shape, dtype=entry.dtype)
        flat = Flat({name: Part(entry.shape, entry.dtype, ((offset, tensor),))}, {}, {})
        read_all(self._opened, plan_reads(self._opened, flat, {name}))
        return tensor
