"""Element and scale formats: E4M3, E5M2, E2M1, E8M0.

>>> from ottava.quant.formats import ELEMENTS
>>> ELEMENTS["e4m3"].max
448.0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Byte that stands for NaN after a cast. One byte for all NaNs, whatever their sign, so that CPU and GPU agree.
NAN_BYTE = {"e4m3": 0x7F, "e5m2": 0x7F}


@dataclass(frozen=True)
class Element:
    """A small floating-point format in which data is stored."""

    name: str
    max: float
    """Largest finite magnitude."""
    dtype: torch.dtype | None
    """torch's dtype of the same bits; None for E2M1, of which two are packed in a byte."""
    bits: int
    largest_code: int
    """Code of `max`, without its sign."""

    def magnitude_codes(self, data: torch.Tensor) -> torch.Tensor:
        """The codes of the elements that `data` (uint8) holds, without their signs. In no particular order, for counting."""
        if self.bits == 4:  # two in a byte
            return torch.stack([data & 0xF, data >> 4]) & 0x7
        return data & 0x7F


ELEMENTS = {
    "e4m3": Element("e4m3", 448.0, torch.float8_e4m3fn, 8, 0x7E),
    "e5m2": Element("e5m2", 57344.0, torch.float8_e5m2, 8, 0x7B),
    "e2m1": Element("e2m1", 6.0, None, 4, 0x7),
}

# Magnitudes of the eight non-negative E2M1 codes.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e8m0_to_float(exponent: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) as float32, exact also for e = 0 (a subnormal float32). 255 is the format's NaN, which a file may have."""
    bits = exponent.to(torch.int32) << 23
    subnormal = torch.full_like(bits, 0x00400000)  # 2^-127
    values = torch.where(exponent == 0, subnormal, bits).view(torch.float32)
    return values.masked_fill(exponent == 255, torch.nan)
