"""`ottava bench attention`: forward and backward of causal attention by backend, as Ottava's layers call it.

Every backend is first compared with the reference in float64 at a small size: outputs and gradients.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ottava.bench import report
from ottava.bench.kernels import milliseconds
from ottava.bench.layer import _count
from ottava.kernels import attention as kernel

SHAPES = {"8b": (1, 8192, 32, 8, 128), "1b": (4, 4096, 32, 8, 64), "tiny": (1, 64, 4, 2, 32)}
"""batch, sequence, heads, key and value heads, channels."""
LIMIT = 0.02
"""Relative error of bf16 outputs and gradients against float64; 2e-3 is usual, gradients lose a little more."""


def backends() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Contexts by name, in which `ottava.kernels.attention.attention` takes that backend. "ottava": its own choice."""
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {"ottava": nullcontext}
    if importlib.util.find_spec("ottava.kernels.attention_backend") is not None:
        module: Any = importlib.import_module("ottava.kernels.attention_backend")
        names = [name for name in module.NAMES if name not in ("auto", "triton")]  # the latter: packed documents only
        found |= {name: lambda name=name: module.attention_backend(name) for name in names}  # type: ignore[misc]
    return found


def peers() -> dict[str, SDPBackend]:
    """torch's own attention by backend, called directly."""
    return {
        "torch cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch flash": SDPBackend.FLASH_ATTENTION,
        "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    }


def _inputs(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, [b, s, heads, d]."""
    batch, length, heads, groups, channels = shape
    generator = torch.Generator().manual_seed(0)
    small = length <= 1024
    made = []
    for count in (heads, groups, groups, heads):
        size = (batch, length, count, channels)
        x = torch.randn(*size, generator=generator) if small else torch.randn(*size, device=device)
        made.append(x.to(device, torch.bfloat16).to(dtype))
    return made


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel.attention(q, k, v, scale=q.shape[-1] ** -0.5, causal=True, batch_first=True)


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def forward_backward(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs[3])
    return out.detach(), *grads  # type: ignore[return-value]


def check(attend: Callable[..., Tensor], shape: tuple[int, ...], device: str, context: Any) -> float:
    """Largest relative error of output and gradients against float64; ArithmeticError above the limit."""
    expected = forward_backward(_ours, _inputs(shape, "cpu", torch.float64))
    with context():
        found = forward_backward(attend, _inputs(shape, device, torch.bfloat16))
    error = max(float((a.cpu().double() - b).norm() / b.norm()) for a, b in zip(found, expected))
    if not error <= LIMIT:
        raise ArithmeticError(f"wrong: relative error {error:.4f} (limit {LIMIT})")
    return error


def measure(
    attend: Callable[..., Tensor], shape: tuple[int, ...], device: str, context: Any, rounds: int
) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of forward and backward. Causal: half of the square counts."""
    inputs = _inputs(shape, device, torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    with context():
        out = attend(*leaves)
        forward = milliseconds(lambda: attend(*inputs[:3]), rounds, device)
        backward = milliseconds(lambda: torch.autograd.grad(out, leaves, inputs[3], retain_graph=True), rounds, device)
    batch, length, heads, _, channels = shape
    flops = 2.0 * batch * heads * length**2 * channels  # 4 for the whole square
    return {
        "forward_ms": forward, "backward_ms": backward, "forward_tflops": flops / forward * 1e-9,
        "backward_tflops": 2.5 * flops / backward * 1e-9,
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--shape", choices=list(SHAPES), help="sizes (default 8b; on a CPU tiny)")
    parser.add_argument("--rounds", type=_count, default=20, help="timed calls of each; the median counts (default 20)")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default benchmarks/results/attention-DEVICE-SHAPE.json)"
    )


def run(options: argparse.Namespace) -> int:
    """Checks, measures, prints a table and writes the JSON. A backend that cannot run is reported with its reason."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = options.shape or ("8b" if device == "cuda" else "tiny")
    shape = SHAPES[name]
    small = (1, 200 if device == "cuda" else 48, 4, 2, shape[-1])
    contenders: dict[str, tuple[Callable[..., Tensor], Any]] = {n: (_ours, c) for n, c in backends().items()}
    if device == "cuda":
        contenders |= {n: (_torch, lambda b=b: sdpa_kernel([b])) for n, b in peers().items()}
    results: dict[str, dict[str, Any]] = {}
    wrong = False
    for label, (attend, context) in contenders.items():
        try:
            error = check(attend, small, device, context)
            results[label] = {"relative_error": error, **measure(attend, shape, device, context, options.rounds)}
        except Exception as failure:  # a backend that is not here or does not take this shape is a result
            wrong |= isinstance(failure, ArithmeticError)
            results[label] = {"failed": f"{type(failure).__name__}: {str(failure).splitlines()[0]}"}
        row = results[label]
        figures = row.get("failed") or (
            f"{row['forward_ms']:9.3f} + {row['backward_ms']:.3f} ms, {row['forward_tflops']:.0f} and "
            f"{row['backward_tflops']:.0f} TFLOP/s, relative error {row['relative_error']:.4f}"
        )
        print(f"{label:20}{figures}", flush=True)
    path = options.output or report.default_path("attention", name)
    sizes = dict(zip(("batch", "sequence", "heads", "kv_heads", "channels"), shape))
    report.write(path, "attention", {"shape": sizes, "results": results})
    print(f"wrote {path}")
    return 1 if wrong else 0
