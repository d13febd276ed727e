"""Times the norm, clipping and the step of an optimizer over the parameters of a Llama of the 1B shape: torch's AdamW and FusedAdam.

    python benchmarks/optimizer_step.py [--layers 16] [--output FILE.json]

GB/s counts what must be moved: gradients twice (norm, step), parameters, masters and moments read and written once. `host_ms` is how long
the calls keep Python busy. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ottava.bench.report import write
from ottava.optimizers import FusedAdam
from ottava.optimizers.gradient_norm import norm_and_scale

BLOCKS = "float8_block128"
VARIANTS: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any] | None]] = {
    "torch AdamW(fused), clip_grad_norm_": (torch.float32, torch.float32, None),
    "float32": (torch.float32, torch.float32, {}),
    "bf16 gradients": (torch.float32, torch.bfloat16, {}),
    "bf16 gradients and moments": (torch.float32, torch.bfloat16, {"moments": torch.bfloat16}),
    "bf16 gradients, FP8 moments": (torch.float32, torch.bfloat16, {"moments": BLOCKS}),
    "the same, stochastic": (torch.float32, torch.bfloat16, {"moments": BLOCKS, "stochastic_rounding": True}),
    "bf16 + remainder, FP8 moments": (
        torch.bfloat16,
        torch.bfloat16,
        {"moments": BLOCKS, "master_weights": True, "store_param_remainders": True},
    ),
}


def shapes(layers: int) -> list[tuple[int, ...]]:
    """Of Llama-3 1B: hidden 2048, feed-forward 8192, a quarter as many key and value heads, 128,256 tokens."""
    layer = [(2048,), (3072, 2048), (2048, 2048), (2048,), (8192, 2048), (8192, 2048), (2048, 8192)]
    return [(128256, 2048), *layer * layers, (2048,)]


def measure(work: Callable[[], None], repeats: int = 10) -> tuple[float, float]:
    """(milliseconds of the GPU, of the host), medians."""
    gpu, host = [], []
    for i in range(repeats + 3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        start = time.perf_counter()
        work()
        busy = time.perf_counter() - start
        last.record()
        torch.cuda.synchronize()
        if i >= 3:
            gpu.append(first.elapsed_time(last))
            host.append(busy * 1e3)
    return statistics.median(gpu), statistics.median(host)


def run(dtype: torch.dtype, grad: torch.dtype, options: dict[str, Any] | None, layers: int) -> dict[str, float]:
    """Norm, clip and step of one variant."""
    params = [nn.Parameter(torch.randn(s, device="cuda", dtype=dtype) * 0.02) for s in shapes(layers)]
    for p in params:
        if grad != dtype:
            p.grad_dtype = grad  # type: ignore[attr-defined]
        p.grad = torch.randn(p.shape, device="cuda", dtype=grad) * 1e-3
    if options is None:
        torchs = torch.optim.AdamW(params, fused=True)

        def work() -> None:
            nn.utils.clip_grad_norm_(params, 1.0)
            torchs.step()

        state: Any = torchs.state
    else:
        kept = {f"{m}_dtype": options.get("moments", torch.float32) for m in ("exp_avg", "exp_avg_sq")}
        ours = FusedAdam(params, **kept, **{k: v for k, v in options.items() if k != "moments"})

        def work() -> None:
            ours.step(grad_scale=norm_and_scale([(p.grad, ()) for p in params if p.grad is not None], 1.0)[1])

        state = ours.state
    gpu, host = measure(work)
    held = sum(t.nbytes for p in params for t in state[p].values()) + sum(p.nbytes for p in params)
    moved = 2 * held + 2 * sum(p.grad.nbytes for p in params if p.grad is not None)
    rate, count = moved / gpu / 1e6, sum(p.numel() for p in params)
    return {"gpu_ms": gpu, "host_ms": host, "gb_per_s": rate, "parameters": count, "held_gib": held / 2**30}


def main() -> None:
    """Prints a line a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("optimizer_step.py times GPU kernels, and there is no GPU here.")
    results: dict[str, Any] = {}
    for name, (dtype, grad, options) in VARIANTS.items():
        results[name] = run(dtype, grad, options, chosen.layers)
        print(f"{name:38}", "  ".join(f"{key} {value:,.2f}" for key, value in results[name].items()), flush=True)
        torch.cuda.empty_cache()
    if chosen.output is not None:
        write(chosen.output, "optimizer step", {"layers": chosen.layers, "results": results})


if __name__ == "__main__":
    main()
