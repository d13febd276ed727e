"""Tries tiles, warps and registers of the quantizing kernels: `python benchmarks/tiles.py` on a GPU. What is best goes into `tile._TILES`.

Each candidate's bytes are compared with the reference's before it is timed; the shares are those of `ottava bench kernels`. Processes of
their own compile and compare (`--jobs`), since that takes longer than the timing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from ottava.bench import kernels
from ottava.kernels import tile
from ottava.kernels.tile import _Tile

SMALL = [(32, 128, 4), (64, 128, 8), (32, 128, 8), (64, 128, 4), (16, 128, 4), (32, 256, 8)]
BLOCK = [(128, 128, 4), (128, 128, 8), (128, 128, 16)]
LIMITS = (None, 64, 80, 104, 128, 168)
"""Registers of a thread."""
KINDS = {"tensor": ("tensor", SMALL), "1x128": ("block1d", BLOCK), "128x128": ("block2d", BLOCK)}
"""By the last word of a kernel's name in `ottava bench kernels`: what tiles call it, and its rows, columns and warps."""
PRODUCERS = {
    "cast": "identity", "norm + cast": "norm", "swiglu + cast": "activation", "dswiglu + cast": "activation_backward",
    "dswiglu + swiglu + cast": "activation_backward_with_output",
}  # fmt: skip
"""By the words before it."""


class Trial(NamedTuple):
    """A candidate for a place in `tile._TILES`."""

    case: kernels.Case
    place: tuple[str, str]
    tile: _Tile

    def choose(self) -> None:
        """Puts it there."""
        tile._TILES[self.place] = self.tile
        tile.forget_plans()


def trials(only: str) -> Iterator[Trial]:
    """All whose kernel's name contains `only`. Limits that leave a processor less than 8 or more than 32 warps are not tried."""
    for case in kernels.cases(kernels.Sizes()):
        words, _, last = case.name.rpartition(" ")
        if words not in PRODUCERS or last not in KINDS or only not in case.name:
            continue
        kind, cuts = KINDS[last]
        for cut in cuts:
            for limit in LIMITS:
                if limit is None or 8 <= 65536 // (limit * 32 * cut[2]) * cut[2] <= 32:
                    yield Trial(case, (kind, PRODUCERS[words]), _Tile(*cut, limit))


def compare(only: str, part: int, parts: int) -> None:
    """Compiles and compares every `parts`-th trial; raises SystemExit at the first whose bytes are wrong."""
    for trial in list(trials(only))[part::parts]:
        trial.choose()
        kernels.check(trial.case, "cuda")


def main() -> None:
    """Prints the best of each kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--only", default="cast", help="kernels whose name contains this (default: all)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile and compare (default 8)")
    parser.add_argument("--show", type=int, default=6, help="of the best, how many (default 6)")
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        compare(options.only, options.part, options.jobs)
        return
    command = [sys.executable, __file__, "--only", options.only, "--jobs", str(options.jobs), "--part"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(options.jobs)]
    codes = [child.wait() for child in children]
    if any(codes):
        raise SystemExit("tiles: a candidate's bytes are wrong.")
    copy = kernels.copy_rate(2**29, 20, "cuda")
    found: dict[str, list[tuple[float, _Tile]]] = {}
    for trial in trials(options.only):
        trial.choose()
        row = kernels.measure(trial.case, options.rows, copy, 12, "cuda")
        found.setdefault(trial.case.name, []).append((row["share"], trial.tile))
    for name, shares in found.items():
        for share, (rows, columns, warps, registers) in sorted(shares, reverse=True, key=lambda each: each[0])[
            : options.show
        ]:
            print(f"{name:32} {rows:4} x {columns:<4}{warps:3} warps {registers or '':>4} {share:6.2f} of a copy")


if __name__ == "__main__":
    main()
