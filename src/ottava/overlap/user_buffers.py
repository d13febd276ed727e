"""`initialize_ub` and `destroy_ub`, which scripts written for TransformerEngine call around overlapped tensor parallelism.

There they allocate the communication buffers that `ub_*` switches of modules need. Here the overlap engine (`ottava.overlap`) makes what it
needs when a group first communicates, and modules overlap without these two. What they are told is kept for modules that are made
later: the method and the number of pieces of each product (`ub_cfgs`). An option that has nothing to act on is named in a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from ottava.notices import warn_once_on_rank0
from ottava.overlap import switches

__all__ = ["UserBufferQuantizationMode", "destroy_ub", "initialize_ub", "is_ub_initialized"]

_SHAPE: list[tuple[int, ...]] = []
_ACTS = ("method", "num_splits")
_IDLE = {
    "num_sm": "no multiprocessors are set aside: copy engines or the process group move the bytes",
    "cga_size": "there are no communication kernels",
    "set_sm_margin": "products have all multiprocessors",
    "aggregate": "a chunk is what one rank holds",
    "atomic_gemm": "chunks are products of their own",
    "use_ce": "overlap_transport chooses what moves the bytes",
    "fp8_buf": "what the recipe quantizes travels as bytes, sums in the dtype of the product",
    "comm_priority": "the transport chooses its streams",
    "gemm_priority": "products run on the current stream",
    "is_reduce_scatter": "what a product gathers or sums follows from its stage",
    "pipeline_rs_overlap_first_gemm": "the own tokens are multiplied last, under the last pieces",
}
"""Keys of `ub_cfgs` that have nothing to act on, and why."""


class UserBufferQuantizationMode(Enum):
    """What travels: tensors in the activation dtype, or FP8 bytes. Here the recipe in force decides, for each forward pass."""

    NONE = "none"
    FP8 = "fp8"


def initialize_ub(
    shape: list[int] | tuple[int, ...],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Mapping[str, Any]] | None] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Checks what it is given, and keeps `ub_cfgs` for modules that are made from now on.

    shape: [tokens, hidden] of the layers' input, of which each of `tp_size` ranks has an equal part. ub_cfgs: by the name of a product
    ("qkv_fprop", "proj_dgrad", ...) its "method" ("ring_exchange", "pipeline", "bulk") and "num_splits"; a list has one for each of
    quantization_modes, and has to say the same in all of them.

        >>> ottava.initialize_ub([4096, 1024], tp_size=2, ub_cfgs={"qkv_fprop": {"method": "pipeline", "num_splits": 8}})
    """
    if _SHAPE:
        raise ValueError(f"initialize_ub was called already, with shape {list(_SHAPE[0])}: call destroy_ub() first.")
    if len(shape) != 2 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"initialize_ub: shape must be [tokens, hidden], got {shape!r}.")
    if not isinstance(tp_size, int) or tp_size < 1 or shape[0] % tp_size:
        raise ValueError(f"initialize_ub: {shape[0]} tokens cannot be split evenly over tp_size={tp_size!r} ranks.")
    modes = _checked_modes(quantization_modes, use_fp8)
    configs = _one_config(ub_cfgs, len(modes))
    switches.configure({name: {k: v for k, v in config.items() if k in _ACTS} for name, config in configs.items()})
    if bootstrap_backend is not None:
        _warn(
            f"initialize_ub: bootstrap_backend={bootstrap_backend!r} has no effect: ranks meet through the tensor-parallel group that "
            "modules are given."
        )
    if with_cublasmp:
        _warn("initialize_ub: with_cublasmp=True has no effect: overlap_transport chooses what moves the bytes.")
    _SHAPE.append(tuple(shape))


def destroy_ub() -> None:
    """Undoes `initialize_ub`; modules keep the methods that they were made with.

    >>> ottava.destroy_ub()
    """
    _SHAPE.clear()
    switches.configure({})


def is_ub_initialized() -> bool:
    """Between `initialize_ub` and `destroy_ub`.

    >>> ottava.overlap.user_buffers.is_ub_initialized()
    False
    """
    return bool(_SHAPE)


def _checked_modes(modes: Any, use_fp8: bool) -> list[UserBufferQuantizationMode]:
    if modes is None:
        return [UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE]
    known = ", ".join(f"UserBufferQuantizationMode.{mode.name}" for mode in UserBufferQuantizationMode)
    if not isinstance(modes, list | tuple) or not all(isinstance(mode, UserBufferQuantizationMode) for mode in modes):
        raise ValueError(f"initialize_ub: quantization_modes must be a list of {known}, got {modes!r}.")
    return list(modes)


def _one_config(given: Any, modes: int) -> Mapping[str, Mapping[str, Any]]:
    """What all modes are configured with, checked. The same methods serve FP8 and high precision."""
    listed = [given] if given is None or isinstance(given, Mapping) else list(given)
    if len(listed) not in (1, modes):
        raise ValueError(
            f"initialize_ub: {len(listed)} ub_cfgs for {modes} quantization_modes: give one for each, or one for all."
        )
    configs = [{} if config is None else config for config in listed]
    if any(config != configs[0] for config in configs):
        raise ValueError(
            "initialize_ub: ub_cfgs differ between quantization_modes: a product has one method here. Give one dict for all."
        )
    for name, config in configs[0].items():
        unknown = sorted(set(config) - set(_ACTS) - set(_IDLE))
        if unknown:
            raise ValueError(
                f"initialize_ub: ub_cfgs[{name!r}] has {unknown[0]!r}; its keys are {', '.join([*_ACTS, *_IDLE])}."
            )
        for key in (key for key in _IDLE if key in config):
            _warn(f"initialize_ub: ub_cfgs[...][{key!r}] has no effect: {_IDLE[key]}.")
    return configs[0]


def _warn(message: str) -> None:
    warn_once_on_rank0(f"ottava: {message}")
