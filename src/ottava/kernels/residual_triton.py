"""The Triton version of `residual.py`; imported only where a CUDA tensor meets it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launcher

BLOCK = 2048  # elements a program: 16 a thread at 4 warps, enough loads in flight to fill the memory


@triton.jit
def _kernel(x, bias, residual, out, total, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + at % width, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + value
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


_BIAS_RESIDUAL = Launcher(_kernel)


def bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """See `residual._bias_residual`."""
    out = residual.new_empty(residual.shape)
    if out.numel():
        _BIAS_RESIDUAL(
            (triton.cdiv(out.numel(), BLOCK),),
            4,
            {
                "x": x.contiguous(), "bias": bias.contiguous(), "residual": residual.contiguous(), "out": out,
                "total": out.numel(), "width": out.shape[-1], "BLOCK": BLOCK,
            },
        )  # fmt: skip
    return out
