"""Times every quantizing kernel against the bytes it must move. Run on a GPU: `python benchmarks/kernels.py`.

Prints GB/s and the share of a plain copy's; checks nothing (tests/gpu does).
"""

from __future__ import annotations

import argparse
import itertools

import torch
import triton.testing

import ottava  # noqa: F401
from ottava.kernels import activation, tile


def milliseconds(function) -> float:
    """Median."""
    return triton.testing.do_bench(function, warmup=10, rep=40, return_mode="median")


def producers(m: int):
    """(name, make producer, elements out, bytes read an output element)."""
    x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(m, 2 * 14336, device="cuda", dtype=torch.bfloat16)
    dact = torch.randn(m, 14336, device="cuda", dtype=torch.bfloat16)
    gamma, rstd = torch.ones(4096, device="cuda", dtype=torch.bfloat16), torch.ones(m, device="cuda")
    empty = torch.empty(0, device="cuda")
    swiglu = activation.get("swiglu")
    yield "cast", lambda: tile.Identity(x), x.numel(), 2.0
    yield "norm", lambda: tile.Norm(x, gamma, None, empty, rstd, False), x.numel(), 2.0
    yield "swiglu", lambda: tile.Activation(wide, swiglu), dact.numel(), 4.0
    yield "dswiglu", lambda: tile.ActivationBackward(dact, wide, swiglu), wide.numel(), 3.0


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tune", action="store_true", help="try other tiles")
    options = parser.parse_args()
    a = torch.empty(2**29, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    copy = 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e6
    print(f"copy {copy:.0f} GB/s")
    tiles = {
        "tensor": [
            ((64, 64), 4),
            ((64, 128), 4),
            ((64, 128), 8),
            ((128, 64), 4),
            ((128, 128), 8),
            ((128, 64), 8),
            ((32, 128), 4),
            ((64, 256), 8),
        ],
        "block1d": [((128, 128), 4), ((128, 128), 8), ((128, 128), 16)],
        "block2d": [((128, 128), 4), ((128, 128), 8), ((128, 128), 16)],
    }
    scale = torch.ones(1, device="cuda")
    for (name, make, elements, read), (kind, scheme) in itertools.product(
        producers(options.rows),
        (("tensor", "e4m3:tensor:f32"), ("block1d", "e4m3:1x128:pow2"), ("block2d", "e4m3:128x128:pow2")),
    ):
        given = scale if kind == "tensor" else None
        chosen = tile._TILES[kind]
        for candidate in tiles[kind] if options.tune else [chosen]:
            tile._TILES[kind] = candidate
            tile.forget_plans()
            ms = milliseconds(lambda: tile.quantize(make(), scheme, given, None, True, True))  # noqa: B023
            rate = elements * (read + 2.0) / ms / 1e6
            print(f"{name:8} {scheme:18} tile {candidate} {ms:.3f} ms {rate:5.0f} GB/s {rate / copy:.2f} of copy")
        tile._TILES[kind] = chosen
        tile.forget_plans()
    for name, make, elements, read in producers(options.rows):
        ms = milliseconds(lambda: tile.amax(make()))  # noqa: B023
        print(f"{name:8} amax {ms:.3f} ms {elements * read / ms / 1e6:5.0f} GB/s")


if __name__ == "__main__":
    main()
