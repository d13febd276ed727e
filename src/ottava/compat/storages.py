"""One direction of a quantized tensor, as TransformerEngine's programs look at it: bytes and scales whose first dimension is the
matrix's rows, in both directions, so that those of a sharded weight can be put under one another.

Ottava keeps columnwise bytes transposed, because GEMMs want them so; here they are upright.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import State, Weight
from ottava.quant.weight_memory import ROWWISE
from ottava.quant.weight_operands import upright
from ottava.quant.weight_place import Extent

__all__ = ["DirectionStorage", "IdentityTensorStorage"]

Buffers = dict[str, Tensor]
"""Attribute of TransformerEngine's storage class -> tensor."""


class DirectionStorage:
    """The rowwise or the columnwise bytes and scales of a tensor."""

    def __init__(self, tensor: QuantizedTensor, direction: str) -> None:
        self.tensor, self.direction = tensor, direction

    @property
    def scheme(self) -> Scheme:
        """How its bytes are made."""
        return self.tensor.scheme.along(self.direction)

    @property
    def _shares_bytes(self) -> bool:
        """Whether the columnwise bytes are the rowwise ones."""
        return not self.tensor.scheme.two_copies

    def rows_of_bytes(self) -> Tensor:
        """Bytes, rows of the matrix first."""
        tensor, name = self.tensor, f"{self.direction}_data"
        if isinstance(tensor, Weight) and tensor.state is State.SHARD:
            kept = self.direction if self.direction in tensor.memory.data else ROWWISE
            return tensor.memory.data[kept][: tensor.memory.place.rows]
        if self.direction == ROWWISE or self._shares_bytes:
            return _there(tensor.rowwise_data, "rowwise_data")
        return upright(_there(getattr(tensor, name), name), self.scheme)

    def rows_of_scales(self) -> Tensor:
        """Scales, rows of the matrix first."""
        tensor = self.tensor
        if isinstance(tensor, Weight) and tensor.state is State.SHARD and not self._shares_bytes:
            memory = tensor.memory
            return memory.scales(self.direction) if memory.has_blocks(self.direction) else memory.group.scale_inv
        name = f"{ROWWISE if self._shares_bytes else self.direction}_scale_inv"
        scale = _there(getattr(tensor, name), name)
        return scale if self.direction == ROWWISE or scale.dim() == 1 or self._shares_bytes else scale.t()

    def __getattr__(self, name: str) -> Any:
        if name in ("_scale_inv", f"_{self.direction}_scale_inv"):
            return self.rows_of_scales()
        if name in ("_data", f"_{self.direction}_data"):
            return self.rows_of_bytes()
        raise AttributeError(
            f"The {self.direction} direction of a {self.scheme} tensor has no {name!r} here; it has _{self.direction}_data and "
            f"_{self.direction}_scale_inv, _scale_inv, dequantize() and fsdp_extract_buffers()."
        )

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """What of it differs from shard to shard: bytes, and scales that only their rank has. (Others are the same on all ranks.)"""
        found: Buffers = {f"_{self.direction}_data": self.rows_of_bytes()}
        if self._own_scales():
            found[f"_{self.direction}_scale_inv"] = self.rows_of_scales()
        return tuple(t.contiguous() for t in found.values()), {"field_names": tuple(found), "direction": self.direction}

    def _own_scales(self) -> bool:
        if not isinstance(self.tensor, Weight):
            return not self.scheme.per_tensor
        return not self._shares_bytes and self.tensor.memory.extent(self.direction) is Extent.OWN

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the rowwise bytes."""
        if self.direction != ROWWISE and not self._shares_bytes:
            raise ValueError(
                f"The columnwise bytes of {self.scheme} are quantized along the other dimension: dequantize the tensor itself."
            )
        return self.tensor.dequantize(dtype)


class IdentityTensorStorage:
    """A direction in high precision. Of a weight that is stored in FP8 these are the dequantized values: Ottava keeps no others."""

    def __init__(self, values: Tensor) -> None:
        self._hp_data = values

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values."""
        return self._hp_data if dtype is None else self._hp_data.to(dtype)

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The values."""
        return (self._hp_data,), {"field_names": ("_hp_data",)}


def _there(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"The tensor has no {name}: it was dropped, or never made.")
    return tensor
