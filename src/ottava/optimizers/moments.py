"""How a moment of Adam is kept between steps: float32, or fewer bits with one scale a tensor.

>>> format = MomentFormat.of(torch.float8_e4m3fn, "exp_avg_dtype")
>>> stored, scale_inv = format.zeros((2, 2), torch.device("cpu"))
>>> format.encode_(torch.tensor([[1.0, -2.0], [0.5, 0.0]]), stored, scale_inv)
>>> format.decode(stored, scale_inv)
tensor([[ 1.0000, -2.0000],
        [ 0.5000,  0.0000]])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottava.quant.scaling import amax_of, scale_from_amax

FLOAT16_MAX = 65504.0
FLOAT16_SMALLEST = 2.0**-24
# uint8 is TransformerEngine's way to ask for FP8; it means E4M3 there too.
_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "float8_e4m3fn",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
_FP8_SCHEMES = {"float8_e4m3fn": "e4m3:tensor", "float8_e5m2": "e5m2:tensor"}


@dataclass(frozen=True)
class MomentFormat:
    """float32 and bfloat16 are kept as they are; float16 and FP8 (as uint8 bytes) are scaled so that amax is the largest value."""

    name: str
    """"float32", "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2": a word, so that a state dict can carry it."""

    @staticmethod
    def of(dtype: torch.dtype, argument: str) -> MomentFormat:
        """The format that a user asks for with `argument`=`dtype`."""
        if dtype not in _NAMES:
            known = ", ".join(str(d) for d in _NAMES)
            raise ValueError(f"FusedAdam: {argument} must be one of {known} (uint8: FP8, E4M3), got {dtype!r}.")
        return MomentFormat(_NAMES[dtype])

    @property
    def fp8(self) -> bool:
        """Stored as bytes of an 8-bit format."""
        return self.name in _FP8_SCHEMES

    @property
    def scaled(self) -> bool:
        """Has a float32 scale_inv [1] beside it."""
        return self.fp8 or self.name == "float16"

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the stored tensor."""
        return torch.uint8 if self.fp8 else getattr(torch, self.name)

    def zeros(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(stored, scale_inv) of an all-zero moment."""
        stored = torch.zeros(shape, dtype=self.dtype, device=device)
        return stored, torch.ones(1, dtype=torch.float32, device=device) if self.scaled else None

    def decode(self, stored: Tensor, scale_inv: Tensor | None) -> Tensor:
        """float32 values."""
        if not self.scaled:
            return stored.float()
        assert scale_inv is not None
        if not self.fp8:
            return stored.float() * scale_inv.reshape(())
        unused_amax = scale_inv.new_empty(0)
        flat = torch.ops.ottava.dequantize(
            _matrix(stored), scale_inv, unused_amax, _FP8_SCHEMES[self.name], torch.float32
        )
        return flat.reshape(stored.shape)

    def encode_(self, value: Tensor, stored: Tensor, scale_inv: Tensor | None, positive: bool = False) -> None:
        """Writes float32 `value` into `stored` and `scale_inv`, with a scale from its own amax.

        positive: the second moment. A value above 0 that would round to 0 becomes the smallest number of the format instead:
        Adam divides by its root, and 0 would turn a tiny gradient into a huge step.
        """
        if not self.scaled:
            stored.copy_(value)
            return
        assert scale_inv is not None
        if self.fp8:
            fresh = torch.ops.ottava.quantize(_matrix(value), _FP8_SCHEMES[self.name], None, None, True, False)
            data, inverse = fresh[0].reshape(stored.shape), fresh[1]
            smallest: float = 1  # the byte 0x01
        else:
            scale = scale_from_amax(amax_of(value), FLOAT16_MAX, 0.0, False)
            data = (value * scale.reshape(())).clamp_(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)
            inverse, smallest = torch.ones_like(scale) / scale, FLOAT16_SMALLEST
        if positive:
            data = data.masked_fill((data == 0) & (value > 0), smallest)
        stored.copy_(data)
        scale_inv.copy_(inverse)


def _matrix(x: Tensor) -> Tensor:
    """x as rows and columns, contiguous: what the quantizing ops take."""
    return (x.reshape(-1, x.shape[-1]) if x.dim() > 1 and x.numel() else x.reshape(1, -1)).contiguous()
