"""The columnwise copy of a weight that FSDP2 gathers: made in backward, not kept from forward on.

FSDP2 frees a gathered weight after its layer's forward and gathers it again for backward. A columnwise copy that autograd keeps
in between, of every layer, would hold the bytes of the whole model on every rank. So what autograd keeps are tensors without
memory, and the product that needs them quantizes the weight that is there again by then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels.cast import Buffers


class _Source:
    """A weight, and all that makes its copy the one that forward would have made."""

    def __init__(self, weight: Tensor, scheme: str, scale: Tensor | None, amax: Tensor | None) -> None:
        self.weight, self.scheme = weight.detach(), scheme
        self.scale = None if scale is None else scale.clone()  # delayed scaling writes its next one over it
        self.amax = amax

    def quantize(self) -> tuple[Tensor, Tensor, Tensor]:
        """(data, scale_inv, amax)."""
        q = Buffers(*torch.ops.ottava.quantize(self.weight, self.scheme, self.scale, self.amax, False, True))
        return q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax


class LaterTensor(Tensor):
    """One of the three tensors of a columnwise copy, made when an op asks for it."""

    source: _Source
    which: int

    @staticmethod
    def __new__(cls, source: _Source, which: int, like: Tensor) -> LaterTensor:
        device = source.weight.device
        self: Any = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        self.source, self.which = source, which
        return self

    __torch_function__ = torch_private.DISABLED_TORCH_FUNCTION  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LaterTensor({self.source.scheme} of {tuple(self.source.weight.shape)}, {self.which})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return LaterTensor(args[0].source, args[0].which, args[0])
        made: dict[int, tuple[Tensor, ...]] = {}

        def now(later: LaterTensor) -> Tensor:
            source = later.source
            if id(source) not in made:
                made[id(source)] = source.quantize()
            return made[id(source)][later.which]

        args, kwargs = torch_private.map_instances(LaterTensor, now, (args, kwargs or {}))
        return func(*args, **kwargs)


def columnwise_later(weight: Tensor, scheme: str, scale: Tensor | None, amax: Tensor | None) -> tuple[Tensor, ...]:
    """(data, scale_inv, amax) of the columnwise copy of `weight`, quantized by the op that multiplies by them.

    scale, amax: what forward has quantized with, where it does not follow from the weight alone.
    """
    source = _Source(weight, scheme, scale, amax)
    shapes = torch.ops.ottava.quantize(torch.empty_like(source.weight, device="meta"), scheme, None, None, False, True)
    likes = Buffers(*shapes)
    three = (likes.columnwise_data, likes.columnwise_scale_inv, likes.columnwise_amax)
    return tuple(LaterTensor(source, which, like) for which, like in enumerate(three))
