"""How a moment of Adam is kept between steps: float32, or fewer bits with one scale a tensor or one a block of 128 elements.

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

from ottava.kernels import block_moment
from ottava.kernels.random_bits import round_to_bfloat16
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
BLOCKS = "float8_block128"
"""What a user asks for; `_BLOCK_NAMES` has what each moment then is."""
_BLOCK_NAMES = {"exp_avg": "float8_e4m3fn_block128", "exp_avg_sq": "float8_root_block128"}


@dataclass(frozen=True)
class MomentFormat:
    """float32 and bfloat16 are kept as they are; float16 and FP8 (as uint8 bytes) are scaled so that amax is the largest value."""

    name: str
    """"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fn_block128" or "float8_root_block128": a word, so that
    a state dict can carry it."""

    @staticmethod
    def of(dtype: torch.dtype | str, argument: str) -> MomentFormat:
        """The format that a user asks for with `argument`=`dtype`: "exp_avg_dtype" or "exp_avg_sq_dtype"."""
        moment = argument.removesuffix("_dtype")
        if dtype in (BLOCKS, _BLOCK_NAMES.get(moment)):
            return MomentFormat(_BLOCK_NAMES[moment])
        named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if named not in _NAMES:
            known = ", ".join(str(d) for d in _NAMES)
            raise ValueError(
                f"FusedAdam: {argument} must be one of {known} (uint8: FP8, E4M3) or {BLOCKS!r}, got {dtype!r}."
            )
        return MomentFormat(_NAMES[named])

    def for_shape(self, dimensions: int) -> MomentFormat:
        """What a parameter of so many dimensions has: blocks lie along rows of matrices, everything else stays float32.

        Vectors (norms, biases) are next to nothing of a model, and their shards would not end at multiples of 128.
        """
        return MomentFormat("float32") if self.blocks and dimensions < 2 else self

    @property
    def blocks(self) -> bool:
        """Has a scale for each 128 elements of a row. [Note: block moments]"""
        return self.name in _BLOCK_NAMES.values()

    @property
    def fp8(self) -> bool:
        """Stored as bytes of an 8-bit format."""
        return self.name in _FP8_SCHEMES or self.blocks

    @property
    def scaled(self) -> bool:
        """Has float32 scales beside it: [1], or of blocks [..., ceil(K/128)]."""
        return self.fp8 or self.name == "float16"

    @property
    def of_whole_tensor(self) -> bool:
        """Has one scale for all elements, which no rank can find from its own."""
        return self.scaled and not self.blocks

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the stored tensor."""
        return torch.uint8 if self.fp8 else getattr(torch, self.name)

    def zeros(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(stored, scale_inv) of an all-zero moment."""
        stored = torch.zeros(shape, dtype=self.dtype, device=device)
        scales = block_moment.scale_shape(shape) if self.blocks else (1,)
        return stored, torch.ones(scales, dtype=torch.float32, device=device) if self.scaled else None

    def decode(self, stored: Tensor, scale_inv: Tensor | None) -> Tensor:
        """float32 values."""
        if not self.scaled:
            return stored.float()
        assert scale_inv is not None
        if self.blocks:
            return block_moment.decode(stored, scale_inv, self._root)
        if not self.fp8:
            return stored.float() * scale_inv.reshape(())
        unused_amax = scale_inv.new_empty(0)
        flat = torch.ops.ottava.dequantize(
            _matrix(stored), scale_inv, unused_amax, _FP8_SCHEMES[self.name], torch.float32
        )
        return flat.reshape(stored.shape)

    @property
    def _root(self) -> bool:
        return self.name == _BLOCK_NAMES["exp_avg_sq"]

    def encode_(
        self,
        value: Tensor,
        stored: Tensor,
        scale_inv: Tensor | None,
        positive: bool = False,
        random: Tensor | None = None,
    ) -> None:
        """Writes float32 `value` into `stored` and `scale_inv`, with scales from its own amax.

        positive: the second moment. A value above 0 that would round to 0 becomes the smallest number of the format instead:
        Adam divides by its root, and 0 would turn a tiny gradient into a huge step. random: bits (`random_bits`) to round bfloat16 and
        blocks by; None: to the nearest.
        """
        if not self.scaled:
            rounds = random is not None and self.name == "bfloat16"
            stored.copy_(round_to_bfloat16(value, random) if rounds else value)  # type: ignore[arg-type]
            return
        assert scale_inv is not None
        if self.blocks:
            codes, scales = block_moment.encode(value, self._root, random)
            stored.copy_(codes)
            scale_inv.copy_(scales)
            return
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
