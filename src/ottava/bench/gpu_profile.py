"""GPU time of a step by kernel and by kind of kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas|splitk|_mm_"),
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm"),
    ("communication", r"nccl|all_gather|reduce_scatter"),
    ("loss", r"cross_entropy|softmax|nll_loss"),
    ("copy", r"^memcpy|^memset|copy|chunk_cat|catarray|fillfunctor"),
    ("quantize, norm, activation", r"tile_kernel|norm|swiglu|rope|residual|amax|triton_"),
    ("elementwise", r"elementwise|vectorized|unrolled|reduce_kernel|embedding|index"),
)
"""(kind, pattern of kernel names); the first that matches."""
LAUNCHES = re.compile(r"^(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|MemcpyAsync|MemsetAsync)")


def kind_of(name: str) -> str:
    """The kind of a kernel.

    >>> kind_of("nvjet_qqtst_128x256_128x6_h_bz_coopA_TNT")
    'gemm'
    """
    lowered = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lowered)), "other")


def profile_step(step: Callable[[], Any], top: int = 25) -> dict[str, Any]:
    """One step: kernels that ran, calls that launched them, milliseconds by kind, and the `top` kernels by time."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        step()
        torch.cuda.synchronize()
    found = [e for e in run.key_averages() if not getattr(e, "is_user_annotation", False)]
    on_gpu = [
        e for e in run.events() if str(e.device_type).endswith("CUDA") and not getattr(e, "is_user_annotation", False)
    ]
    seen = summarize([(e.key, e.count, e.self_device_time_total, str(e.device_type)) for e in found], top)
    return seen | {"gaps": gaps([(e.name, e.time_range.start, e.time_range.end) for e in on_gpu], 15)}


def gaps(kernels: list[tuple[str, float, float]], top: int) -> dict[str, Any]:
    """When nothing ran between the first kernel and the last. kernels: (name, begin, end) in microseconds.

    >>> gaps([("a", 0.0, 10.0), ("b", 8.0, 20.0), ("c", 520.0, 530.0)], 1)
    {'ms': 0.5, 'top': [{'ms': 0.5, 'after': 'b', 'before': 'c', 'at_ms': 0.02}]}
    """
    found: list[tuple[float, str, str, float]] = []
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    end, last = (ordered[0][1], "") if ordered else (0.0, "")
    for name, begin, finish in ordered:
        if begin > end:
            found.append((begin - end, last, name, end - ordered[0][1]))
        if finish > end:
            end, last = finish, name
    longest = sorted(found, reverse=True)[:top]
    return {
        "ms": sum(gap[0] for gap in found) * 1e-3,
        "top": [
            {"ms": us * 1e-3, "after": after[:80], "before": before[:80], "at_ms": at * 1e-3}
            for us, after, before, at in longest
        ],
    }


def summarize(rows: list[tuple[str, int, float, str]], top: int) -> dict[str, Any]:
    """rows: (name, calls, microseconds on the device, kind of device) of everything that a profiler saw.

    >>> summarize([("gemm", 2, 3000.0, "DeviceType.CUDA")], 1)["kinds"]
    {'gemm': {'ms': 3.0, 'calls': 2}}
    """
    kernels = sorted((row for row in rows if row[3].endswith("CUDA")), key=lambda row: -row[2])
    kinds: dict[str, dict[str, float]] = {}
    for name, calls, microseconds, _ in kernels:
        sums = kinds.setdefault(kind_of(name), {"ms": 0.0, "calls": 0})
        sums["ms"] += microseconds * 1e-3
        sums["calls"] += calls
    return {
        "kernels": sum(row[1] for row in kernels),
        "launches": sum(row[1] for row in rows if not row[3].endswith("CUDA") and LAUNCHES.match(row[0])),
        "busy_ms": sum(row[2] for row in kernels) * 1e-3,
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1]["ms"])),
        "top": [{"name": n[:140], "calls": c, "ms": us * 1e-3, "kind": kind_of(n)} for n, c, us, _ in kernels[:top]],
    }
