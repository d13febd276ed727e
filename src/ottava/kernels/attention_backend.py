"""Which attention kernel runs: by what is installed, by shape, and by what the user says.

Milliseconds, forward + backward, medians on an H200, bf16, causal, 32 query and 8 key/value heads (packed: documents of mean length
1,000). The choice below follows this table; a shape that is not in it takes what torch has.

| | 1x8192, d 128 | 4x4096, d 64 | packed 1x8192, d 128 | packed 4x4096, d 64 |
|---|---|---|---|---|
| cudnn: torch's scaled_dot_product_attention | 0.98 + 2.93 | 0.71 + 2.11 | - | - |
| flash: torch's FlashAttention 2, `varlen_attn` | 1.88 + 5.07 | 1.04 + 3.10 | 0.54 + 1.32 | 0.94 + 2.04 |
| flash4: `flash-attn-4` 4.0.0b36, `pip install ottava[flash]` | 0.95 + 2.64 | 0.80 + 1.80 | 0.33 + 0.91 | 0.52 + 1.14 |
| FlexAttention, compiled, block mask (not used) | - | - | 0.45 + 1.14 | 1.63 + 3.01 |
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ottava import torch_private
from ottava.notices import log, warn_once

NAMES = ("auto", "cudnn", "flash", "flash4", "triton", "fp8")
"""cudnn: dense attention only. triton: packed documents only. The others do both; fp8 where the recipe has `fp8_dpa`."""

# cuDNN first: 521 TFLOP/s forward + backward on an H200 against 283 for the FlashAttention 2.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
FLASH_FIRST = sorted(CUDNN_FIRST, key=lambda kind: kind is not SDPBackend.FLASH_ATTENTION)
_ALLOWED = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}

FLASH4_CHANNELS = (64, 128)
"""Channels of a head at which flash4 was measured, and was faster than cuDNN, forward and backward together."""
FLASH4_QUERIES = 2048
"""Queries from which flash4 is chosen for dense attention: shorter ones were not measured."""

FP8_FASTER_FROM: dict[tuple[str, int], int | None] = {("dense", 128): None, ("packed", 128): None}
"""By kind ("dense", "packed") and channels of a head: the queries of a row from which FP8 attention, forward and backward together, took
less time than the fastest bf16 kernel on an H200 (`ottava bench attention`); None: at no size. Not in it: not measured."""

# Of the process: a recomputed forward runs in another thread, and must choose what the first one chose.
_forced = "auto"


@contextlib.contextmanager
def attention_backend(name: str) -> Iterator[None]:
    """Within it attention on a GPU runs on `name`, in all of the process: "cudnn", "flash", "flash4", "triton" (packed documents),
    "fp8" (whatever was measured, in `autocast` with a recipe that has `fp8_dpa`), or "auto", by shape.

    Where that kernel does not do what is asked for (a mask, dropout, float32), attention still runs on what does.

        >>> with attention_backend("flash"):
        ...     DotProductAttention(4, 16)(q, k, v)
    """
    if name not in NAMES:
        raise ValueError(f"attention_backend must be one of {', '.join(NAMES)}; got {name!r}.")
    if name == "flash4" and flash4() is None:
        raise ValueError("attention_backend 'flash4' needs the package flash-attn-4: pip install 'ottava[flash]'.")
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def forced() -> str:
    """The name that `attention_backend` was given, or "auto"."""
    return _forced


@functools.cache
def flash4() -> ModuleType | None:
    """`flash_attn.cute`, if it is installed and can be imported. An installation that is broken is reported, not silently passed by."""
    try:
        if importlib.util.find_spec("flash_attn.cute") is None:
            return None
    except ModuleNotFoundError:  # no flash_attn at all
        return None
    try:
        return importlib.import_module("flash_attn.cute")
    except Exception as error:  # a beta with compiled parts of other packages: anything may be wrong with it
        warn_once(f"ottava: flash-attn-4 is installed but cannot be imported ({error!r}); torch's kernels are used.")
        return None


@functools.cache
def say_once(message: str) -> None:
    """Logs at INFO, the first time."""
    log.info(message)


def dense_kernels(q: Tensor, k: Tensor, v: Tensor, causal: bool, special: bool) -> list[SDPBackend] | None:
    """For q [b, h, s, d], k and v [b, g, t, d] on a GPU: torch's, in the order in which it shall try them; None: flash4.

    special: a mask, a bias or dropout, which only torch's kernels take.
    """
    asked = forced()
    kernels = FLASH_FIRST if asked == "flash" else CUDNN_FIRST
    if torch.compiler.is_compiling():
        return kernels
    kernels = allowed(kernels)
    wanted = asked == "flash4" or (
        # Who keeps torch from cuDNN, or says an order of its kernels, does not want another one.
        asked in ("auto", "fp8") and q.shape[2] >= FLASH4_QUERIES and kernels[:1] == CUDNN_FIRST[:1]
    )
    square = not causal or q.shape[2] == k.shape[2]  # flash4 counts a causal mask from the other corner
    takes_it = wanted and square and not special and flash4_fits(q, k, v) and flash4() is not None
    name = "flash4" if takes_it else kernels[0].name.split("_")[0].lower() if kernels else "no kernel"
    say_once(f"ottava: attention with heads of {q.shape[3]} channels uses {name}.")
    return None if takes_it else kernels


def allowed(kernels: list[SDPBackend]) -> list[SDPBackend]:
    """Those that are not switched off (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_cudnn_sdp`, ...); in the order that
    was said there, if one was."""
    found = [kind for kind in kernels if _ALLOWED[kind]()]
    order = torch_private.sdpa_priority()
    return found if order is None else sorted(found, key=order.index)


@torch_private.constant_when_traced
def choice_is_ours() -> bool:
    """Whether nobody has switched one off or said an order. Compiled code keeps what held when it was traced."""
    return allowed(CUDNN_FIRST) == CUDNN_FIRST


def fp8_is_slower(kind: str, channels: int, queries: int) -> str | None:
    """Why FP8 attention is not the faster one on a GPU, by the table above or by what `attention_backend` says; None if it may run."""
    asked = forced()
    if asked not in ("auto", "fp8"):
        return f"attention_backend({asked!r}) is in force"
    if asked == "fp8":
        return None
    if (kind, channels) not in FP8_FASTER_FROM:
        known = "has not been measured to be faster in FP8"
    else:
        needed = FP8_FASTER_FROM[kind, channels]
        if needed is not None and queries >= needed:
            return None
        known = f"was measured and is no faster in FP8 {'at any size' if needed is None else f'below {needed} queries'}"
    return f"{kind} attention with heads of {channels} channels {known} (attention_backend('fp8') runs it all the same)"


def packed_backend(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """For packed q [t, h, d], k and v [t, g, d]: "flash4", "flash", or None where no such kernel takes them."""
    if not varlen_fits(q, k, v):
        return None
    asked = forced()
    chosen = "flash"
    if asked in ("auto", "cudnn", "flash4", "fp8") and flash4_fits(q, k, v) and flash4() is not None:
        chosen = "flash4"
    return chosen


def varlen_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What FlashAttention 2 takes: 16-bit floats, heads of up to 256 channels in eights, as many for values as for keys."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and q.numel() > 0
        and k.numel() > 0
        and (torch.compiler.is_compiling() or capability(q.device.index) >= (8, 0))  # which is not traced
    )


def flash4_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What flash4 was measured with. It is written for Hopper and Blackwell; torch.compile does not look into it, so compiled code
    keeps to torch's kernels, and so does who asks for deterministic ones, since its backward adds up in any order."""
    return (
        not torch.compiler.is_compiling()
        and not torch.are_deterministic_algorithms_enabled()
        and varlen_fits(q, k, v)
        and q.shape[-1] in FLASH4_CHANNELS
        and capability(q.device.index)[0] in (9, 10)
    )


@functools.cache
def capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
