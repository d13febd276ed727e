"""The one launcher of Triton kernels: every `*_triton.py` and `tile.py` goes through it. Less Python than Triton's own call.

`kernel[grid](...)` binds, specialises and hashes every argument each time: about 60 us for the forty arguments of the tile kernel, more
than a layer's norm takes on an H200. Here are two ways around it:

    launcher(grid, warps, {"x_ptr": x, "M": 128, ...})               # finds the compiled variant by one dictionary look-up
    launch = launcher.prepare(grid, warps, {"M": 128, ...}, ("x_ptr", "out_ptr"))
    launch(x, out)                                                   # all but the addresses was settled before

The first launch of a variant goes through Triton, which compiles it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from ottava import torch_private


class Launcher:
    """A Triton kernel and the variants of it that have been compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names: list[str] = list(kernel.arg_names)
        constants = {self.names[i] for i in kernel.constexprs}
        self.is_constant = [name in constants for name in self.names]
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        warps: int,
        arguments: dict[str, Any],
        fuse_multiply_add: bool = False,
        registers: int | None = None,
    ) -> Any:
        """Launches on the current stream of the tensors' device, with every parameter of the kernel by name; returns the compiled variant.

        Without fused multiply-adds a kernel rounds as the torch reference does. registers: of a thread, at most; what does not fit goes
        to memory.
        """
        values = [arguments[name] for name in self.names]
        device = next(v.get_device() for v in values if isinstance(v, Tensor))
        if device != torch_private.current_device():
            with torch.cuda.device(device):  # as torch's own ops do
                return self(grid, warps, arguments, fuse_multiply_add, registers)
        variant = [v if constant else _specialization(v) for v, constant in zip(values, self.is_constant, strict=True)]
        key = (device, warps, fuse_multiply_add, registers, *variant)
        compiled = self.compiled.get(key)
        if compiled is None:
            options = {} if registers is None else {"maxnreg": registers}
            compiled = self.kernel[grid](*values, num_warps=warps, enable_fp_fusion=fuse_multiply_add, **options)
            self.compiled[key] = compiled
        else:
            compiled[(*grid, 1, 1)[:3]](*values)
        return compiled

    def prepare(
        self,
        grid: tuple[int, ...],
        warps: int,
        arguments: dict[str, Any],
        pointers: tuple[str, ...],
        fuse_multiply_add: bool = False,
        registers: int | None = None,
    ) -> Launch:
        """A launch to be repeated. arguments: all but `pointers`, which are tensors of the same dtypes each time."""
        return Launch(self, grid, warps, arguments, pointers, fuse_multiply_add, registers)


class Launch:
    """A launch whose grid, numbers and dtypes are settled: call it with the tensors, in the order that `prepare` was given.

    Triton compiles pointers that are multiples of 16 apart from others (a scale in the middle of a buffer is not), so there is a
    variant for each pattern of them, and for each device.
    """

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, ...],
        warps: int,
        arguments: dict[str, Any],
        pointers: tuple[str, ...],
        fuse_multiply_add: bool,
        registers: int | None,
    ) -> None:
        self.launcher, self.grid, self.options = launcher, grid, (fuse_multiply_add, registers)
        self.warps = warps
        self.blocks = (*grid, 1, 1)[:3]
        self.values: list[Any] = [None if name in pointers else arguments[name] for name in launcher.names]
        self.places = [launcher.names.index(name) for name in pointers]
        self.ready: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        """What `_entry` gives, by device and alignments."""

    def __call__(self, *tensors: Tensor) -> None:
        """Launches on the current stream of the tensors' device."""
        device = variant = tensors[0].get_device()
        if device != torch_private.current_device():
            with torch.cuda.device(device):
                self(*tensors)
            return
        values = self.values.copy()
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = address = tensor.data_ptr()
            variant = variant << 1 | (address % 16 == 0)
        ready = self.ready.get(variant)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # A profiler that wants to be told of launches is told by Triton's own call.
        if ready is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            self._look_up(tensors, variant)
            return
        run, head = ready
        run(*self.blocks, torch_private.current_stream(device), *head, *values)

    def _look_up(self, tensors: tuple[Tensor, ...], variant: int) -> None:
        values = self.values.copy()
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        arguments = dict(zip(self.launcher.names, values, strict=True))
        compiled = self.launcher(self.grid, self.warps, arguments, *self.options)
        if compiled is not None:  # None: Triton's interpreter, which compiles nothing
            self.ready[variant] = _entry(compiled)


def _entry(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """(what launches a compiled kernel, its arguments between the stream and the kernel's own), without hooks.

    `CompiledKernel.run` is Triton's Python around a function in C, which gives scratch memory to kernels that want some. Ours want
    none: of the version whose order of arguments is known that function is called directly.
    """
    run, hooks = compiled.run, (compiled.packed_metadata, None, None, None)  # `run` first: it loads the kernel
    sizes = getattr(run, "global_scratch_size", None), getattr(run, "profile_scratch_size", None)
    if triton.__version__.startswith("3.6.") and sizes == (0, 0):
        return run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks)
    return run, (compiled.function, *hooks)


def _specialization(value: Any) -> Any:
    """What Triton compiles a variant for: dtype and alignment of a tensor, 1 / divisible by 16 / 64-bit of an integer."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value > 0x7FFFFFFF
    return type(value)
