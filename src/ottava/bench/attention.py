"""`ottava bench attention`: forward and backward of causal attention by backend, as Ottava's layers call it.

Every backend is first compared with the reference in float64 at a small size: outputs and gradients. "fp8" is the forward of `fp8_dpa`,
casts of q, k and v included, with the backward that bf16 has, from the same unquantized q, k and v. With `--documents 1000` also
attention within packed documents of that mean length, by cumulative lengths and by document bounds.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ottava.bench import report
from ottava.bench.kernels import milliseconds
from ottava.bench.options import count
from ottava.kernels import attention as kernel
from ottava.kernels import attention_backend
from ottava.kernels.attention_documents import document_attention
from ottava.kernels.attention_fp8 import fp8_attention
from ottava.kernels.attention_packed import packed_attention
from ottava.nn.attention_documents import PackedDocuments, document_bounds

SHAPES = {"8b": (1, 8192, 32, 8, 128), "1b": (4, 4096, 32, 8, 64), "tiny": (1, 64, 4, 2, 32)}
"""batch, sequence, heads, key and value heads, channels."""
LIMIT = 0.02
"""Relative error of bf16 outputs and gradients against float64; 2e-3 is usual, gradients lose a little more."""
FP8_LIMIT = 0.08
"""The same for FP8: values and weights keep 4 significant bits; 0.05 is usual for normal numbers, whose sum is small."""


def backends() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Contexts by name, in which `ottava.kernels.attention.attention` takes that backend. "ottava": its own choice."""
    if not torch.cuda.is_available():
        return {"ottava": nullcontext}  # there is one way on a CPU
    # "triton" is for packed documents only; "fp8" is called by itself.
    names = [name for name in attention_backend.NAMES if name not in ("auto", "triton", "fp8")]
    chosen: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        name: functools.partial(attention_backend.attention_backend, name) for name in names
    }
    return {"ottava": nullcontext, **chosen}


def peers() -> dict[str, SDPBackend]:
    """torch's own attention by backend, called directly."""
    return {
        "torch cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch flash": SDPBackend.FLASH_ATTENTION,
        "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    }


# ------------------------------------------------------------------------------------------------------- packed documents


def packed(name: str, documents: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention within documents [b, s] by backend: "flash", "flash4", or "triton" and "fp8", which take bounds in place of lengths."""
    if name == "flash4" and attention_backend.flash4() is None:
        raise ValueError("needs the package flash-attn-4: pip install 'ottava[flash]'.")
    starts, ends = document_bounds(documents)
    known = PackedDocuments(documents.cpu(), documents.device)
    assert known.cu_seqlens is not None and known.longest is not None
    lengths, longest = known.cu_seqlens, known.longest

    def by_bounds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return document_attention(q, k, v, starts, ends, scale=q.shape[-1] ** -0.5, batch_first=True)

    def in_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fp8_attention(q, k, v, scale=q.shape[-1] ** -0.5, causal=True, batch_first=True, bounds=(starts, ends))

    def by_lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5
        out = packed_attention(
            flat_q, flat_k, flat_v, lengths, lengths, longest, longest, scale=scale, causal=True, backend=name
        )
        return out.view(q.shape)

    return {"triton": by_bounds, "fp8": in_fp8}.get(name, by_lengths)


def draw_documents(batch: int, length: int, mean: int, device: str) -> Tensor:
    """[b, s]: the number of each token's document, for documents of that mean length."""
    begins = torch.rand(batch, length, dtype=torch.float32, generator=torch.Generator().manual_seed(1)) < 1 / mean
    return begins.long().cumsum(1).to(device)


def _dense(documents: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same with a mask of the whole square: what packed attention is checked against."""
    allowed = (documents[:, :, None] == documents[:, None, :])[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.attention(q, k, v, scale=q.shape[-1] ** -0.5, causal=True, batch_first=True, allowed=allowed)

    return attend


# ------------------------------------------------------------------------------------------------------------- measurement


def _inputs(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, [b, s, heads, d]."""
    batch, length, heads, groups, channels = shape
    generator = torch.Generator().manual_seed(0)
    small = length <= 1024
    made = []
    for each in (heads, groups, groups, heads):
        size = (batch, length, each, channels)
        x = (
            torch.randn(*size, dtype=torch.float32, generator=generator)
            if small
            else torch.randn(*size, dtype=torch.float32, device=device)
        )
        made.append(x.to(device, torch.bfloat16).to(dtype))
    return made


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel.attention(q, k, v, scale=q.shape[-1] ** -0.5, causal=True, batch_first=True)


def _fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fp8_attention(q, k, v, scale=q.shape[-1] ** -0.5, causal=True, batch_first=True)


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


def check(
    attend: Callable[..., Tensor],
    shape: tuple[int, ...],
    device: str,
    context: Any,
    reference: Callable[..., Tensor] | None = None,
    limit: float = LIMIT,
) -> float:
    """Largest relative error of output and gradients against float64; ArithmeticError above the limit."""
    expected = forward_backward(reference or _ours, _inputs(shape, "cpu", torch.float64))
    with context():
        found = forward_backward(attend, _inputs(shape, device, torch.bfloat16))
    error = max(float((a.cpu().double() - b).norm() / b.norm()) for a, b in zip(found, expected))
    if not error <= limit:
        raise ArithmeticError(f"wrong: relative error {error:.4f} (limit {limit})")
    return error


def measure(
    attend: Callable[..., Tensor], shape: tuple[int, ...], device: str, context: Any, rounds: int
) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of forward and backward. Causal: half of the square counts (of the whole sequence, also if packed)."""
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
    parser.add_argument("--documents", type=count, help="also packed documents of this mean length, in tokens")
    parser.add_argument("--rounds", type=count, default=20, help="timed calls of each; the median counts (default 20)")
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
    contenders["fp8"] = (_fp8, nullcontext)
    if device == "cuda":
        contenders |= {n: (_torch, lambda b=b: sdpa_kernel([b])) for n, b in peers().items()}
    results: dict[str, dict[str, Any]] = {}
    for label, (attend, context) in contenders.items():
        limit = FP8_LIMIT if label == "fp8" else LIMIT
        results[label] = _row(attend, attend, context, small, shape, device, options.rounds, limit=limit)
        _print(label, results[label])
    for label in ("flash", "flash4", "triton", "fp8") if options.documents else ():
        few, many = (
            draw_documents(1, small[1], 20, device),
            draw_documents(shape[0], shape[1], options.documents, device),
        )
        name_of = f"packed {label}"
        try:
            checked, timed = packed(label, few), packed(label, many)
            reference = _dense(few.cpu())
            limit = FP8_LIMIT if label == "fp8" else LIMIT
            results[name_of] = _row(checked, timed, nullcontext, small, shape, device, options.rounds, reference, limit)
        except ValueError as failure:
            results[name_of] = {"failed": str(failure)}
        _print(name_of, results[name_of])
    path = options.output or report.default_path("attention", name)
    sizes: dict[str, Any] = {"documents": options.documents} | dict(
        zip(("batch", "sequence", "heads", "kv_heads", "channels"), shape)
    )
    report.write(path, "attention", {"shape": sizes, "results": results})
    print(f"wrote {path}")
    return 1 if any(row.get("wrong") for row in results.values()) else 0


def _row(
    checked: Callable[..., Tensor],
    timed: Callable[..., Tensor],
    context: Any,
    small: tuple[int, ...],
    shape: tuple[int, ...],
    device: str,
    rounds: int,
    reference: Callable[..., Tensor] | None = None,
    limit: float = LIMIT,
) -> dict[str, Any]:
    """Figures of a backend; a backend that is not here or does not take this shape is a result as well."""
    try:
        error = check(checked, small, device, context, reference, limit)
        return {"relative_error": error, **measure(timed, shape, device, context, rounds)}
    except ArithmeticError as failure:
        return {"failed": str(failure), "wrong": True}
    except Exception as failure:  # whatever a foreign kernel raises
        return {"failed": f"{type(failure).__name__}: {(str(failure) or 'no message').splitlines()[0]}"}


def _print(label: str, row: dict[str, Any]) -> None:
    figures = row.get("failed") or (
        f"{row['forward_ms']:9.3f} + {row['backward_ms']:.3f} ms, {row['forward_tflops']:.0f} and "
        f"{row['backward_tflops']:.0f} TFLOP/s, relative error {row['relative_error']:.4f}"
    )
    print(f"{label:20}{figures}", flush=True)
