"""The one launcher of Triton kernels: every `*_triton.py` and `tile.py` goes through it. Less Python than Triton's own call.

`kernel[grid](...)` binds, specialises and hashes every argument each time: about 60 us for the forty arguments of the tile kernel, more
than a layer's norm takes on an H200. Here the compiled variant is found by one dictionary look-up and launched directly; the first
launch of a variant goes through Triton, which compiles it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Launcher:
    """A Triton kernel and the variants of it that have been compiled.

    launcher(grid, warps, arguments): `arguments` has every parameter of the kernel by name.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names: list[str] = list(kernel.arg_names)
        constants = {self.names[i] for i in kernel.constexprs}
        self.is_constant = [name in constants for name in self.names]
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self, grid: tuple[int, ...], warps: int, arguments: dict[str, Any], fuse_multiply_add: bool = False
    ) -> None:
        """Launches on the current stream. Without fused multiply-adds a kernel rounds as the torch reference does."""
        values = [arguments[name] for name in self.names]
        variant = [v if constant else _specialization(v) for v, constant in zip(values, self.is_constant, strict=True)]
        key = (torch.cuda.current_device(), warps, fuse_multiply_add, *variant)
        compiled = self.compiled.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*values, num_warps=warps, enable_fp_fusion=fuse_multiply_add)
            self.compiled[key] = compiled
        else:
            compiled[(*grid, 1, 1)[:3]](*values)


def _specialization(value: Any) -> Any:
    """What Triton compiles a variant for: dtype and alignment of a tensor, 1 / divisible by 16 / 64-bit of an integer."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value > 0x7FFFFFFF
    return type(value)
