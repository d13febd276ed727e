"""float32 masters of parameters that are stored in fewer bits: where they start, and how 16 bits of one are enough beside bf16."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels.block_moment import BLOCK, scale_shape
from ottava.nn.strategy import like_dtensor
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import Weight


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself. All arithmetic of the optimizer is elementwise on these."""
    if not hasattr(tensor, "to_local"):
        return tensor
    local = torch_private.local_tensor(tensor)  # the same object every time, and quick
    return tensor.to_local() if hasattr(local, "trigger_wait") else local  # a collective may be under way


def has_bytes_only(local: Any) -> bool:
    """Whether a parameter is stored in FP8, without values in high precision."""
    return isinstance(local, QuantizedTensor) and local.stored_quantized


def placed_like(param: Any, local: Tensor) -> Tensor:
    """`local` as state of `param`: a DTensor of the same placements if `param` is one, so that it can be saved and resharded."""
    return like_dtensor(param, local) if hasattr(param, "to_local") else local


@dataclass(frozen=True)
class Place:
    """Where this rank's elements lie in the whole parameter: element i of them, with `columns` a row, is element
    base + i // columns * stride + i % columns."""

    base: int = 0
    columns: int = 0
    """0: rows are whole, and i is followed by i + 1."""
    stride: int = 0

    @staticmethod
    def of(param: Any) -> Place:
        """Of a DTensor. What is no DTensor is taken for the whole."""
        if not hasattr(param, "to_local") or not param.dim():
            return WHOLE
        shape, offset = torch_private.local_box(param)
        if shape[1:-1] != tuple(param.shape[1:-1]):
            raise ValueError(
                f"FusedAdam: a parameter of shape {tuple(param.shape)} is cut to {shape} along a dimension between the first and the last, "
                "where stochastic rounding does not know its elements' numbers: shard it along the first, or use stochastic_rounding=False."
            )
        whole = param.shape[-1]
        base = offset[0] * math.prod(param.shape[1:]) + (offset[-1] if param.dim() > 1 else 0)
        return Place(base) if param.dim() == 1 or shape[-1] == whole else Place(base, shape[-1], whole)

    @property
    def columnwise(self) -> bool:
        """Whether there are gaps between the rows."""
        return self.columns > 0

    def index(self, shape: torch.Size, device: torch.device) -> Tensor:
        """The number of each element in the whole parameter, int64 of `shape`."""
        found = torch.arange(shape.numel(), device=device)
        if self.columnwise:
            found += found // self.columns * (self.stride - self.columns)
        return (found + self.base).view(shape)


WHOLE = Place()


def placed_scales(param: Any, scales: Tensor) -> Tensor:
    """Scales of the local blocks of a moment as state of `param`: of a DTensor a DTensor, cut as the parameter is."""
    if not hasattr(param, "to_local"):
        return scales
    whole = like_dtensor(param, scales, scale_shape(param.shape))
    (_, at), (held, first) = torch_private.local_box(param), torch_private.local_box(whole)
    if held != tuple(scales.shape) or (scales.numel() and at[-1] != first[-1] * BLOCK):
        raise ValueError(
            f"FusedAdam: a parameter of shape {tuple(param.shape)} is cut to {tuple(local_of(param).shape)} at {at}, but moments in FP8 "
            f"have blocks of {BLOCK} along the last dimension that must lie on one rank: use a tensor-parallel size that leaves a multiple "
            f"of {BLOCK}, or float32 or bfloat16 moments."
        )
    return whole


def initial_master(param: Any, local: Any, free: bool) -> Tensor:
    """float32 start of the master of `param` whose local tensor is `local`; free: forget a preserved initial value.

    The value that `quantized_model_init(preserve_high_precision_init_val=True)` kept is used while the weight still is its
    quantization. After something else was written into the weight it is gone, and the weight's own values count.
    """
    if not has_bytes_only(local):
        return local.detach().to(torch.float32, copy=True)
    if isinstance(local, Weight) and local.memory.preserved is not None:  # forgotten when something else is written
        preserved = local.memory.preserved.to(local.device, torch.float32, copy=True)
        if free:
            local.memory.forget_first_values()
        return preserved
    values: Any = local.detach()
    return values.dequantize(torch.float32)


def join_remainder(param: Tensor, remainder: Tensor) -> Tensor:
    """bf16 `param` and int16 `remainder` -> the float32 master they stand for, bit for bit."""
    high = param.detach().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def split_remainder_(master: Tensor, param: Tensor, remainder: Tensor) -> None:
    """Writes float32 `master` as its nearest bf16 (ties away from zero) into `param` and the difference of bits into `remainder`.

    Ties away from zero keep the difference within 16 bits: [-0x8000, 0x7fff]. Ties to even would need one value more.
    """
    bits = master.view(torch.int32)
    remainder.copy_(bits)  # the low 16 bits, as a signed number
    param.detach().view(torch.int16).copy_((bits + 0x8000) >> 16)
