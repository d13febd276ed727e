"""`GradientCopies`: gradients that a replay overwrites, copied to where autograd may keep them, in few allocations and launches.

An allocation for each of the forty gradients of four layers, and a `copy_` for each, take the host longer than the replay that made them.
Parameters' gradients with equal rows are therefore laid under one another by one `torch.cat`, and handed out as parts of it: they share
memory, as the buckets of DistributedDataParallel do, which is free again when the last of them is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: what kernels want of a tensor's address to read it in wide words
LARGEST = 2**30  # elements of one concatenation: up to 2**31 torch needs one launch for it


class GradientCopies:
    """Copies of `gradients`, which stay where they are, as often as it is called; those that need no copy are returned as they are.

    kept: by gradient, whether it has to be copied. apart: so many of them, the first ones, get memory of their own.

        >>> copies = GradientCopies([dx, None, dweight], [False, True, True], apart=1)
        >>> dx, _, copy_of_dweight = copies()
    """

    def __init__(self, gradients: Sequence[Tensor | None], kept: Sequence[bool], apart: int) -> None:
        self._uncopied: list[Tensor | None] = [None if keep else g for g, keep in zip(gradients, kept, strict=True)]
        self._alone: list[tuple[int, Tensor]] = []
        groups: dict[tuple, list[int]] = defaultdict(list)
        for place, (gradient, keep) in enumerate(zip(gradients, kept, strict=True)):
            if gradient is None or not keep:
                continue
            if place < apart or not _can_be_joined(gradient):
                self._alone.append((place, gradient))
            else:
                groups[gradient.dtype, gradient.device, gradient.shape[1:]].append(place)
        self._joined = [
            (part, [gradients[place] for place in part], [gradients[place].shape[0] for place in part])  # type: ignore[union-attr]
            for places in groups.values()
            for part in _of_bounded_size(places, gradients)
        ]

    def __call__(self) -> list[Tensor | None]:
        """Without gradients being recorded."""
        found = self._uncopied.copy()
        for place, gradient in self._alone:
            found[place] = gradient.clone()
        for places, gradients, rows in self._joined:
            # "unsafe": for autograd the parts are tensors like any others, not views that in-place operations have to be tracked through.
            parts = torch.unsafe_split_with_sizes(torch.cat(gradients), rows)  # type: ignore[arg-type]
            for place, part in zip(places, parts):
                found[place] = part
        return found


def _can_be_joined(gradient: Tensor) -> bool:
    """Whether it has rows, and what comes after it would still be aligned."""
    size = gradient.numel() * gradient.element_size()
    return gradient.dim() > 0 and gradient.is_contiguous() and size > 0 and size % ALIGNMENT == 0


def _of_bounded_size(places: list[int], gradients: Sequence[Tensor | None]) -> list[list[int]]:
    """`places` in order, in lists of at most `LARGEST` elements, or of one gradient."""
    lists: list[list[int]] = []
    room = 0
    for place in places:
        count = gradients[place].numel()  # type: ignore[union-attr]
        if count > room or not lists:
            lists.append([])
            room = LARGEST
        lists[-1].append(place)
        room -= count
    return lists
