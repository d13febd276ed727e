"""`ReadOnly`: what a row, the transpose or another view of an FP8-stored weight is: values that can be read and not be written.

A stored weight has bytes and no values, so no tensor can be a view of its values. What looks like one to autograd and to the user is a
copy, and a write into a copy (`weight[0].mul_(2)`) would be lost without a word.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.quant.tensor import makes_views, written_arguments


class ReadOnly(torch.Tensor):
    """See above. Whatever is computed from it is an ordinary tensor; views of it are read-only, too."""

    seen: Tensor
    """The values."""
    owner: str
    """How error messages call the weight."""

    @staticmethod
    def __new__(cls, values: Tensor, owner: str) -> ReadOnly:
        place: dict[str, Any] = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        self: Any = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device, **place
        )
        self.seen, self.owner = values, owner
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    __torch_function__ = torch_private.DISABLED_TORCH_FUNCTION  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.seen)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.seen.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return copy.deepcopy(self.seen, memo)

    def tolist(self) -> Any:
        """The values. (torch has none of a subclass.)"""
        return self.seen.tolist()

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["seen"], self.owner

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: str, outer_size: Any, outer_stride: Any) -> ReadOnly:
        return ReadOnly(inner["seen"], meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        found = next((t for t in written_arguments(func, args, kwargs) if isinstance(t, cls)), None)
        if found is not None:
            raise ValueError(
                f"{func} would write into a view of {found.owner}, which is stored in FP8: the view is a copy of its values, and the "
                "weight would stay as it is. Write to the whole parameter (copy_(), mul_() ...), or clone() the view to change the copy."
            )
        plain_args, plain_kwargs = torch_private.map_instances(cls, lambda t: t.seen, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        first = args[0] if args else None
        return read_only(func, result, first.owner) if isinstance(first, cls) else result


def read_only(func: Any, result: Any, owner: str) -> Any:
    """What an op returns, read-only where it is a view of what it was given."""
    if not makes_views(func):
        return result
    return torch_private.map_instances(Tensor, lambda t: t if torch_private.is_fake(t) else ReadOnly(t, owner), result)
