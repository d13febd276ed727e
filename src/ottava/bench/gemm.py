"""`ottava bench gemm`: rates of the matrix products of a named model, forward and backward, in bf16 and by FP8 scheme.

The JSON is a list of {device, kind, m, n, k, tflops} (and which product of the layer it is): out[m, n] = a[m, k] @ b[n, k].T.
Each kind is first compared with the product of its dequantized operands in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.bench import report
from ottava.bench.kernels import milliseconds
from ottava.bench.options import count
from ottava.bench.shapes import Workload, workloads
from ottava.kernels import cast, gemm
from ottava.quant.quantization import Quantization
from ottava.quant.scheme import Scheme
from ottava.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

KINDS: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
"""Delayed and current scaling differ in how exactly the forward product adds up."""
ROLES = {"forward": ("input", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "input")}
"""What is multiplied in each direction."""


class Product(NamedTuple):
    """One matrix product of a step."""

    layer: str
    direction: str
    m: int
    n: int
    k: int


def products(workload: Workload) -> Iterator[Product]:
    """Of one layer and of the head.

    >>> next(products(workloads()["8b"]))
    Product(layer='qkv', direction='forward', m=8192, n=6144, k=4096)
    """
    model, tokens = workload.model, workload.tokens
    keys = model.hidden_size // model.heads * (model.kv_heads or model.heads)
    matrices = {
        "qkv": (model.hidden_size + 2 * keys, model.hidden_size),
        "proj": (model.hidden_size, model.hidden_size),
        "fc1": (2 * model.ffn_hidden_size, model.hidden_size),
        "fc2": (model.hidden_size, model.ffn_hidden_size),
        "head": (model.vocab_size or 0, model.hidden_size),
    }
    for layer, (outputs, inputs) in matrices.items():
        yield Product(layer, "forward", tokens, outputs, inputs)
        yield Product(layer, "dgrad", tokens, inputs, outputs)
        yield Product(layer, "wgrad", outputs, inputs, tokens)


def prepare(kind: str, product: Product, device: str) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
    """(the product as a layer runs it, its operands as float32 numbers)."""
    recipe = KINDS[kind]
    a = torch.randn(product.m, product.k, device=device, dtype=torch.bfloat16)
    b = torch.randn(product.n, product.k, device=device, dtype=torch.bfloat16)
    if recipe is None:
        return lambda: gemm.mm(a, b, None, torch.bfloat16), a.float(), b.float()
    schemes = [str(Scheme.of(recipe, role)) for role in ROLES[product.direction]]
    operands: list[Any] = []
    plain: list[Tensor] = []
    for x, scheme in zip((a, b), schemes):
        made = cast.Buffers(*cast.quantize(x, scheme, None, None, True, False))
        amax = made[4]
        operands += [made[0], made[1], amax]
        plain.append(cast.dequantize(made[0], made[1], amax, scheme, torch.float32))
    facts = Quantization.of(recipe)
    split = {"forward": facts.split_fprop, "dgrad": facts.split_dgrad, "wgrad": facts.split_wgrad}[product.direction]
    return lambda: gemm.scaled_mm(*operands, *schemes, None, torch.bfloat16, split), plain[0], plain[1]


def check(kind: str, device: str) -> float:
    """Largest relative error of the kind's three products at a small size; SystemExit if one is above 1%."""
    worst = 0.0
    for direction in ROLES:
        multiply, a, b = prepare(kind, Product("check", direction, 256, 384, 512), device)
        expected = a.double() @ b.double().t()
        error = float((multiply().double() - expected).norm() / expected.norm())
        worst = max(worst, error)
        if not error <= 0.01:
            raise SystemExit(f"bench gemm: {kind} {direction} is wrong: relative error {error:.4f} (limit 0.01).")
    return worst


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--shape", choices=list(workloads()), help="model and batch (default 8b; on a CPU tiny)")
    parser.add_argument("--rounds", type=count, default=20, help="timed calls of each; the median counts (default 20)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/gemm-DEVICE-SHAPE.json)")


def run(options: argparse.Namespace) -> int:
    """Checks, measures, prints a table and writes the JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = options.shape or ("8b" if device == "cuda" else "tiny")
    errors = {kind: check(kind, device) for kind in KINDS}
    name = report.machine()["device"]
    rows: list[dict[str, Any]] = []
    print(f"{shape} on {name}: TFLOP/s\n{'':24}{'m':>8}{'n':>8}{'k':>8}" + "".join(f"{kind:>12}" for kind in KINDS))
    for product in products(workloads()[shape]):
        line = f"{product.layer + ' ' + product.direction:24}{product.m:8}{product.n:8}{product.k:8}"
        for kind in KINDS:
            if product.layer == "head" and KINDS[kind] is not None:
                continue  # the head is not quantized
            multiply, _, _ = prepare(kind, product, device)
            ms = milliseconds(multiply, options.rounds, device)
            tflops = 2.0 * product.m * product.n * product.k / ms * 1e-9
            rows.append({"device": name, "kind": kind, **product._asdict(), "ms": ms, "tflops": tflops})
            line += f"{tflops:12.1f}"
        print(line, flush=True)
    path = options.output or report.default_path("gemm", shape)
    report.write(path, "gemm", {"shape": shape, "relative_errors": errors, "results": rows})
    print(f"wrote {path}")
    return 0
