"""A CPU that says it is a Hopper: CUDA's side of every `if`, its kernels by Triton's interpreter, and stand-ins for NVIDIA's libraries.

    with pretended_cuda():
        out = layer(x)          # the launches that an H200 would see, interpreted one after the other

Inside, every tensor says that it lies on "cuda:0", and that name is a CPU's where one is asked for memory. Ottava's ops are their CUDA
functions. Products of FP8 bytes, which cuBLASLt does on a GPU, are made in float32 here, and refuse the operands that it refuses.
Products in groups are Triton's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels import grouped_gemm, registry, tile

_HERE, _THERE = torch.device("cpu"), torch.device("cuda", 0)
_MAKERS = ("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "empty_strided", "empty_permuted",
           "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")  # fmt: skip
_METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
_H200_PROCESSORS = 132
ACTIVE = False


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.startswith("cuda")
    return _HERE if named or (isinstance(value, torch.device) and value.type == "cuda") else value


def _redirected(function: Callable) -> Callable:
    """`function`, for which "cuda" is the CPU, and memory is not pinned."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in options.items()})

    return call


# -------------------------------------------------------------------------------------------------------------------- cuBLASLt


def _refuse(wrong: bool, why: str, *what: Any) -> None:
    if wrong:
        raise ValueError(f"cuBLASLt would refuse this: {why}: {what}")


def _spread(scale: Tensor, scaling: int, rows: int, columns: int) -> Tensor:
    """float32, to be multiplied with [rows, columns]."""
    if scaling == torch.nn.functional.ScalingType.TensorWise.value:
        _refuse(scale.numel() != 1 or scale.dtype is not torch.float32, "one float32 scale", scale.shape, scale.dtype)
        return scale.reshape(1, 1)
    by_block = scaling == torch.nn.functional.ScalingType.BlockWise128x128.value
    if by_block:  # of the second operand alone: [columns/128 rounded up to 4, rows/128], columns fastest
        scale = scale.t()
        _refuse(scale.stride(-1) != 1 or scale.shape[1] % 4 != 0, "128x128 scales", scale.shape, scale.stride())
        scale = scale.repeat_interleave(128, 0)[:rows]
    else:
        _refuse(scale.stride() != (1, rows), "1x128 scales", scale.shape, scale.stride())
        _refuse(scale.shape != (rows, columns // 128), "1x128 scales", scale.shape)
    return scale.repeat_interleave(128, 1)[:, :columns]


def _scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, a_type: int, b_scale: Tensor, b_type: int, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:  # fmt: skip
    """`torch_private.scaled_mm`: a [m, k] by rows, b [k, n] by columns."""
    (m, k), n = a.shape, b.shape[1]
    _refuse(a.stride(-1) != 1 or b.stride(0) != 1, "an operand that is not K-major", a.stride(), b.stride())
    _refuse(k % 16 != 0 or n % 16 != 0, "sizes that 16 does not divide", m, k, n)
    _refuse(a.data_ptr() % 16 != 0 or b.data_ptr() % 16 != 0, "bytes on an address that 16 does not divide")
    _refuse(a.dtype == b.dtype == torch.float8_e5m2, "two operands in e5m2")
    _refuse(bias is not None and dtype is torch.float32, "a bias beside a float32 output")
    left = a.float() * _spread(a_scale, a_type, m, k)
    right = b.t().float() * _spread(b_scale, b_type, n, k)
    out = left @ right.t()
    return (out if bias is None else out + bias.float()).to(dtype)


_mm = torch.mm


def _mm_cuda(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """`torch.mm`, which takes `out_dtype` on CUDA alone."""
    return _mm(a, b, **options) if out_dtype is None else _mm(a.float(), b.float(), **options).to(out_dtype)


# --------------------------------------------------------------------------------------------------------------------- the ops


def _choose(name: str) -> Callable:
    def call(*args: Any) -> Any:
        with torch.no_grad():
            return getattr(registry.FUNCTIONS["cuda"] if ACTIVE else _REFERENCES, name)(*args)

    return call


_REFERENCES = SimpleNamespace(**vars(registry.FUNCTIONS["cpu"]))
_LIBRARY = torch.library.Library(registry.NAMESPACE, "IMPL")
for _name in vars(_REFERENCES):
    _LIBRARY.impl(_name, _choose(_name), "CPU")


def _device(tensor: Tensor) -> torch.device:
    real: torch.device = torch._C.TensorBase.device.__get__(tensor)
    return _THERE if real.type == "cpu" else real


def _is_cuda(tensor: Tensor) -> bool:
    return _device(tensor) is _THERE


def _first(tensor: Tensor) -> int:
    return 0


def _copy(tensor: Tensor, *device: Any, **options: Any) -> Tensor:
    return tensor.clone()


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """See the top of this file."""
    global ACTIVE
    answers = {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "an interpreted H200",
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=_H200_PROCESSORS),
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: contextlib.nullcontext(),
    }
    private = {
        "current_device": lambda: 0, "current_stream": lambda device: 0, "is_capturing": lambda: False, "scaled_mm": _scaled_mm
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name in _MAKERS:
            stack.enter_context(mock.patch.object(torch, name, _redirected(getattr(torch, name))))
        for name in _METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, _redirected(getattr(Tensor, name))))
        made = staticmethod(_redirected(Tensor._make_wrapper_subclass))
        stack.enter_context(mock.patch.object(Tensor, "_make_wrapper_subclass", made))
        stack.enter_context(mock.patch.multiple(Tensor, is_cuda=property(_is_cuda), device=property(_device)))
        stack.enter_context(mock.patch.object(torch, "mm", _mm_cuda))
        stack.enter_context(mock.patch.multiple(Tensor, get_device=_first, pin_memory=_same, cuda=_copy, cpu=_copy))
        stack.enter_context(mock.patch.multiple(torch.cuda, **answers))
        stack.enter_context(mock.patch.multiple(torch_private, **private))
        stack.enter_context(mock.patch.multiple(grouped_gemm, _GROUPED_MM=None, _SCALED_GROUPED_MM=None))
        stack.enter_context(mock.patch.dict(registry.FUNCTIONS, cpu=registry.FUNCTIONS["cuda"]))
        ACTIVE = True
        try:
            yield
        finally:
            ACTIVE = False
            tile.forget_plans()
