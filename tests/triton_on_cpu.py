"""Triton's interpreter as Ottava's kernels need it: what it rounds wrongly, does slowly or does not know.

With TRITON_INTERPRET=1 in the environment before Triton is imported, `triton.jit` makes functions that run on the CPU, a program of the
grid after the other, over numpy arrays. It shows what a kernel computes, not what a compiler makes of it: what is checked here, a GPU has
to check again.

* Its casts cut instead of rounding. Here torch casts, whose bytes are those of the hardware (docs/numerics.md), saturating as PTX does.
* Its minima and maxima of two floats are NaN if one of them is. PTX's are the other one, unless a kernel asks for NaN.
* Its products take the bits of bf16 for numbers. Here they are made in float32.
* It has no inline PTX: the few instructions that kernels use are functions on arrays here, found by their first words.
* numpy has become stricter about arrays of one element than it expects.
* It reduces with a function of the kernel's own element by element: here by halves, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

Array = np.ndarray
_DTYPES = {
    tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}  # fmt: skip
_FP8_MAX = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_NAN_BYTE = 0x7F


# ------------------------------------------------------------------------------------------------------------------- casts


def _as_torch(values: Array, kind: Any) -> Tensor:
    """1-D. numpy has no bf16 and no FP8: the interpreter keeps their bits."""
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).view(_DTYPES[kind])


def cast(values: Array, source: Any, target: Any) -> Array:
    """Between floating-point types, to nearest even; FP8 saturates, and its NaN is 0x7F, as of PTX's cvt.rn.satfinite."""
    wide = _as_torch(values, source)
    if target in _FP8_MAX:
        wide, limit = wide.float(), _FP8_MAX[target]
        data = wide.clamp(-limit, limit).to(_DTYPES[target]).view(torch.uint8)
        data = torch.where(wide.isnan(), _NAN_BYTE, data)
    else:
        data = wide.to(_DTYPES[target])
        data = data.view(torch.uint16) if target == tl.bfloat16 else data
    return data.numpy().reshape(np.shape(values))


def _create_fp_to_fp(builder: Any, source: Any, target: Any, rounding: Any = None) -> Any:
    data = cast(source.data, source.dtype.scalar, target.scalar)
    return interpreter.TensorHandle(data, target.scalar)


def _cast_impl(builder: Any, source: Any, target: Any) -> Any:
    kinds = source.dtype.scalar, target.scalar
    if all(kind in _DTYPES for kind in kinds):
        return _create_fp_to_fp(builder, source, target)
    data = source.data
    if kinds[0] in (tl.bfloat16, *_FP8_MAX):  # to an integer: by value, not by bits
        data = cast(data, kinds[0], tl.float32)
    if kinds[1] in (tl.bfloat16, *_FP8_MAX):
        return interpreter.TensorHandle(cast(data.astype(np.float32), tl.float32, kinds[1]), kinds[1])
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target)), kinds[1])


def _create_dot(builder: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: int) -> Any:
    """In float32: products of operands of 16 bits or fewer are exact there."""
    left, right = (cast(x.data, x.dtype.scalar, tl.float32) for x in (a, b))
    data = np.matmul(left, right, dtype=np.float32) + total.data
    return interpreter.TensorHandle(data.astype(total.data.dtype), total.dtype.scalar)


# --------------------------------------------------------------------------------------------------------------------- PTX


def _pair_of_bytes(kind: Any) -> Callable[[Array, Array], Array]:
    def pair(low: Array, high: Array) -> Array:
        return cast(low, tl.float32, kind).astype(np.uint16) | cast(high, tl.float32, kind).astype(np.uint16) << 8

    return pair


def _pair_of_bf16(low: Array, high: Array) -> Array:
    low, high = (cast(x, tl.float32, tl.bfloat16).astype(np.uint32) for x in (low, high))
    return low | high << 16


def _larger_halves(a: Array, b: Array) -> Array:
    return np.maximum(a & 0xFFFF, b & 0xFFFF) | np.maximum(a >> 16, b >> 16) << 16


def _exp2(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        found = np.exp2(x)
    return np.where(np.abs(found) < np.finfo(np.float32).tiny, np.float32(0), found)  # .ftz


PTX: dict[str, Callable[..., Array]] = {
    "cvt.rn.satfinite.e4m3x2.f32": _pair_of_bytes(tl.float8e4nv),
    "cvt.rn.satfinite.e5m2x2.f32": _pair_of_bytes(tl.float8e5),
    "cvt.rn.bf16x2.f32": _pair_of_bf16,
    "max.u16x2": _larger_halves,
    "ex2.approx.ftz.f32": _exp2,
    "rcp.approx.ftz.f32": lambda x: np.float32(1) / x,  # and two steps that make the quotient exact
}


class _Results:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def get_result(self, index: int) -> Any:
        """The only one."""
        assert index == 0
        return self.handle


def _create_inline_asm(
    builder: Any, text: str, constraints: str, values: list, types: list, is_pure: bool, pack: int
) -> _Results:
    found = [function for name, function in PTX.items() if name in text]
    if len(found) != 1:
        raise KeyError(f"No function in triton_on_cpu.PTX, or more than one, stands for: {text}")
    kind = types[0]
    data = found[0](*(value.data for value in values)).astype(interpreter._get_np_dtype(kind))
    return _Results(interpreter.TensorHandle(data, kind.scalar))


# -------------------------------------------------------------------------------------------------------------- reductions


def _reduce_by_halves(self: Any, given: tuple) -> list:
    """Along `axis`, of one tensor, with a function that takes arrays: for functions whose order does not matter."""
    (tensor,) = given
    data = tensor.handle.data
    kept = data.ndim
    data = data.reshape(-1) if self.axis is None else np.moveaxis(data, self.axis, 0)
    while data.shape[0] > 1:
        half = data.shape[0] // 2  # a tensor's sizes are powers of two
        low, high = (self.to_tensor(part, tensor.dtype) for part in (data[:half], data[half:]))
        data = self.combine_fn.fn(low, high).handle.data.reshape(half, *data.shape[1:])
    data = data[0]
    if self.keep_dims:
        data = np.expand_dims(data, self.axis if self.axis is not None else tuple(range(kept)))
    return [self.to_tensor(data, tensor.dtype)]


# ----------------------------------------------------------------------------------------------------------------- scalars

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_scalars(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element there, which numpy does not take for a number any more."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def install() -> None:
    """For the rest of the process."""
    builder = interpreter.InterpreterBuilder
    builder.cast_impl, builder.create_fp_to_fp = _cast_impl, _create_fp_to_fp
    builder.create_inline_asm, builder.create_dot = _create_inline_asm, _create_dot
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
    interpreter._patch_lang_tensor = _patch_scalars
    interpreter.InterpretedFunction.constexprs = ()  # the launcher asks a kernel which of its arguments are constants
