"""What the sizes of a program are worth in FP8 attention's kernel, beside cuDNN's bf16 forward. Needs a Hopper GPU.

    python benchmarks/fp8_attention_sizes.py [--shape 8b]

One line for each size: milliseconds, TFLOP/s, and the difference of its output from that of the sizes in use. "one sum" lets the matrix
units, whose sums have 14 bits, add up all keys; the kernel in use lets them add up 128.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ottava.bench.attention import SHAPES
from ottava.kernels import attention_fp8_triton as kernel

SIZES = [
    kernel.Sizes(rows, keys, rows // 16, stages) for rows in (64, 128) for keys in (64, 128) for stages in (2, 3, 4)
]


def milliseconds(call: Callable[[], object], rounds: int = 20) -> float:
    """The median of calls that are timed by events, after three that are not."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def one_sum(folder: str) -> ModuleType:
    """The kernel's module, with the accumulator inside of the product."""
    text = Path(kernel.__file__).read_text(encoding="utf-8")
    separate = "out = out * shrink[:, None] + tl.dot(weights.to(tl.float8e4nv), values)"
    if separate not in text:
        raise SystemExit(f"{kernel.__file__} has changed: the line with the second product is not there.")
    path = Path(folder) / "one_sum.py"
    path.write_text(text.replace(separate, "out = tl.dot(weights.to(tl.float8e4nv), values, out * shrink[:, None])"))
    spec = importlib.util.spec_from_file_location("one_sum", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_sum"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    batch, length, heads, groups, dim = SHAPES[parser.parse_args().shape]
    q, k, v = (torch.randn(batch, length, n, dim, device="cuda", dtype=torch.bfloat16) for n in (heads, groups, groups))
    scale, flops = dim**-0.5, 2.0 * batch * heads * length**2 * dim  # causal: half of the square
    options = (True, 448.0, 0.0, False)
    laid = kernel.operands(q, k, v, *options)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    kernel.attend(laid, expected, None, scale, True, True, length)

    def show(name: str, ms: float, found: torch.Tensor | None = None) -> None:
        apart = "" if found is None else f", {(found - expected).float().norm() / expected.float().norm():.1e} apart"
        print(f"{name:44}{ms:8.3f} ms {flops / ms * 1e-9:6.0f} TFLOP/s{apart}", flush=True)

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        by_head = [x.transpose(1, 2) for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        show("cudnn, bf16", milliseconds(lambda: attend(*by_head, is_causal=True, enable_gqa=True)))
    print(f"{'amax and bytes of q, k and v':44}{milliseconds(lambda: kernel.operands(q, k, v, *options)):8.3f} ms")
    with tempfile.TemporaryDirectory() as folder:
        for label, module in (("", kernel), (", one sum", one_sum(folder))):
            for sizes in SIZES:
                name = f"{sizes.rows} x {sizes.keys}, {sizes.warps} warps, {sizes.stages} stages{label}"
                try:
                    ms = milliseconds(lambda: module.attend(laid, out, None, scale, True, True, length, sizes))  # noqa: B023
                    show(name, ms, out)
                except Exception as failure:  # too much shared memory, say
                    print(f"{name:44}{type(failure).__name__}: {str(failure).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
