"""`ottava plan --calibrate`: measures a few products, attention and a copy on this GPU, as an entry of the table.

What is not measured here is taken from a kind that has been: how near casts and norms come to a copy, the host, the links.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ottava.kernels import cast, gemm
from ottava.plan.devices import RATE_OF_RECIPE, GpuKind, packaged, short_name
from ottava.quant.quantization import Quantization
from ottava.train.config import PrecisionSection

SHAPES = ((8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336), (4096, 14336, 8192))
"""(m, n, k): qkv, fc1, fc2 and a weight's gradient of a layer of 8 billion parameters with 8,192 tokens."""
LENGTH = 8192
COPIED = 2**30
ROUNDS = 10


def calibrate(device: torch.device, shapes: tuple[tuple[int, int, int], ...] = SHAPES, length: int = LENGTH,
              copied: int = COPIED) -> tuple[str, GpuKind]:  # fmt: skip
    """(short name, entry) of the device. The sizes are arguments so that a small device can be measured in seconds.

    >>> key, gpu = calibrate(torch.device("cuda"))
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    key = short_name(name)
    base = packaged().get(key, packaged()["h200"])
    products, rates = _products(device, shapes)
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else base.memory_gib
    return key, replace(
        base,
        name=name,
        memory_gib=round(memory, 1),
        copy_tb_s=round(_copy(device, copied), 4),
        gemm_tflops=rates,
        attention_tflops=_attention(device, length, base),
        products=tuple(products),
        source=f"measured by ottava plan --calibrate on {name}, torch {torch.__version__}; links, host and the elementwise share from "
        f"{base.name}",
    )


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median of some runs, after two that do not count."""
    taken = []
    for n in range(ROUNDS + 2):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        if n >= 2:
            taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(
    device: torch.device, shapes: tuple[tuple[int, int, int], ...]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows by shape, and by kind the rate of all shapes together."""
    rows: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    for recipe, kind in RATE_OF_RECIPE.items():
        if not _has(recipe, device):
            continue
        operations = seconds = 0.0
        for m, n, k in shapes:
            taken = _seconds(_product(recipe, m, n, k, device), device)
            rows.append({"kind": kind, "m": m, "n": n, "k": k, "tflops": round(2e-12 * m * n * k / taken, 3)})
            operations, seconds = operations + 2e-12 * m * n * k, seconds + taken
        rates[kind] = round(operations / seconds, 3)
    return rows, rates


def _has(recipe: str, device: torch.device) -> bool:
    """Whether the device multiplies by this recipe itself; elsewhere products are emulated."""
    if recipe == "none":
        return True
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    blackwell = torch.cuda.get_device_capability(device) >= (10, 0)
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    kind = RATE_OF_RECIPE[recipe]
    return {"mxfp8": False, "nvfp4": False, "block": hopper}.get(kind, hopper or blackwell)


def _product(recipe: str, m: int, n: int, k: int, device: torch.device) -> Callable[[], Any]:
    """out[m, n] = a[m, k] @ b[n, k].T as a layer runs it forward."""
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    made = PrecisionSection(recipe=recipe).make_recipe()  # type: ignore[arg-type]
    if made is None:
        return lambda: gemm.mm(a, b, None, torch.bfloat16)
    q = Quantization.of(made)
    operands: list[Any] = []
    for x, scheme in ((a, q.input), (b, q.weight)):
        buffers = cast.Buffers(*cast.quantize(x, str(scheme), None, None, True, False))
        operands += [buffers.rowwise_data, buffers.rowwise_scale_inv, buffers.rowwise_amax]
    return lambda: gemm.scaled_mm(*operands, str(q.input), str(q.weight), None, torch.bfloat16, q.split_fprop)


def _attention(device: torch.device, length: int, base: GpuKind) -> dict[str, dict[str, float]]:
    """Causal, forward and backward, for heads of 64 and 128 channels; packed documents in the proportion of the base."""
    found = {}
    for channels in (64, 128):
        shape = (1, max(4096 // channels, 1) if length >= 1024 else 2, length, channels)
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        pairs = 2e-12 * shape[1] * length * length * channels
        with torch.no_grad():
            forward = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)  # noqa: B023
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)  # noqa: B023
        known = base.attention_tflops[str(channels)]
        rates = {"forward": pairs / forward, "backward": 2.5 * pairs / backward}
        packed = {f"packed_{name}": rate * known[f"packed_{name}"] / known[name] for name, rate in rates.items()}
        found[str(channels)] = {name: round(rate, 4) for name, rate in (rates | packed).items()}
    return found


def _copy(device: torch.device, size: int) -> float:
    """1e12 bytes a second, read and written."""
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2e-12 * size / _seconds(lambda: b.copy_(a), device)
