"""The Triton version of `residual.py`; imported only where a CUDA tensor meets it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launch, Launcher

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
_MOST_LAUNCHES = 1024
_LAUNCHES: dict[tuple, Launch] = {}
"""By all that the launch depends on but the addresses."""


def bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """See `residual._bias_residual`."""
    out = residual.new_empty(residual.shape)
    if out.numel() == 0:
        return out
    total, width = out.numel(), out.shape[-1]
    key = (total, width, x.dtype, bias.dtype, residual.dtype)
    launch = _LAUNCHES.get(key)
    if launch is None:
        if len(_LAUNCHES) >= _MOST_LAUNCHES:
            _LAUNCHES.clear()
        arguments = {"total": total, "width": width, "BLOCK": BLOCK}
        launch = _BIAS_RESIDUAL.prepare((triton.cdiv(total, BLOCK),), 4, arguments, ("x", "bias", "residual", "out"))
        _LAUNCHES[key] = launch
    launch(x.contiguous(), bias.contiguous(), residual.contiguous(), out)
    return out
