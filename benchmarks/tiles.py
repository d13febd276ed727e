"""Tries tiles and warps of the quantizing kernels: `python benchmarks/tiles.py` on a GPU. What is best goes into `tile._TILES`.

Each candidate's bytes are compared with the reference's before it is timed; the shares are those of `ottava bench kernels`.
"""

from __future__ import annotations

import argparse

from ottava.bench import kernels
from ottava.kernels import tile

TENSOR = [
    ((64, 64), 4),
    ((64, 128), 4),
    ((64, 128), 8),
    ((128, 64), 4),
    ((128, 64), 8),
    ((128, 128), 8),
    ((32, 128), 4),
    ((32, 256), 4),
]
BLOCK = [((128, 128), 4), ((128, 128), 8), ((128, 128), 16)]
CANDIDATES = {"tensor": ("tensor", TENSOR), "1x128": ("block1d", BLOCK), "128x128": ("block2d", BLOCK)}
"""By the last word of a kernel's name in `ottava bench kernels`: what tiles call it, and its (tile, warps)."""
PRODUCERS = {"cast": "identity", "norm": "norm", "swiglu": "activation", "dswiglu": "activation_backward"}
"""By its first word."""


def main() -> None:
    """Prints a line a candidate, the best last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--only", default="cast", help="kernels whose name contains this (default: all)")
    options = parser.parse_args()
    copy = kernels.copy_rate(2**29, 20, "cuda")
    for case in kernels.cases(kernels.Sizes()):
        first, *_, last = case.name.split()
        if first not in PRODUCERS or last not in CANDIDATES or options.only not in case.name:
            continue
        kind, candidates = CANDIDATES[last]
        place = (kind, PRODUCERS[first])
        kept, found = tile._TILES.get(place), []
        for candidate in candidates:
            tile._TILES[place] = candidate
            tile.forget_plans()
            kernels.check(case, "cuda")
            row = kernels.measure(case, options.rows, copy, 20, "cuda")
            found.append((row["share"], candidate))
        for share, ((rows, columns), warps) in sorted(found):
            print(f"{case.name:24} {rows:4} x {columns:<4} {warps:2} warps {share:6.2f} of a copy")
        tile._TILES.pop(place)
        if kept is not None:
            tile._TILES[place] = kept
        tile.forget_plans()


if __name__ == "__main__":
    main()
