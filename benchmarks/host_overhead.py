"""Time that Python spends on one step of the benchmark's layers, the GPU's work being negligible.

`python benchmarks/host_overhead.py [--profile]` on a GPU. A step of four Llama-3-8B layers keeps an H200 busy for about 52 ms; the
host must stay below that, in forward and in backward, or the GPU waits.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

import torch

import ottava
from ottava.bench.layer import RECIPES, Layers, Shape


def main() -> None:
    """Prints milliseconds a step, forward and backward apart."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", metavar="RECIPE", choices=list(RECIPES), default=None)
    options = parser.parse_args()
    shape = Shape(hidden=512, ffn=1024, heads=4, kv_heads=2, sequence=128)
    model = Layers(shape, "cuda")
    x = torch.randn(shape.sequence, 1, shape.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)

    def forward(chosen):
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            return model(x)

    for name, chosen in RECIPES.items():
        times: dict[str, list[float]] = {"forward": [], "backward": []}
        for i in range(25):
            torch.cuda.synchronize()
            start = time.perf_counter()
            y = forward(chosen)
            middle = time.perf_counter()
            y.backward(dy)
            end = time.perf_counter()
            if i >= 5:
                times["forward"].append((middle - start) * 1e3)
                times["backward"].append((end - middle) * 1e3)
        print(name, {k: round(statistics.median(v), 2) for k, v in times.items()})
    if options.profile:
        chosen = RECIPES[options.profile]
        profiler = cProfile.Profile()
        profiler.enable()
        with torch.autograd.set_multithreading_enabled(False):
            for _ in range(20):
                forward(chosen).backward(dy)
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    main()
