"""Draws docs/images/convergence.svg: validation loss of one job, unquantized and with FP8 recipes.

    python docs/draw_convergence.py [benchmarks/results/convergence-nvidia-h200.json]

The figures come from benchmarks/convergence.py. Curves lie on top of one another, so the panel below shows the gap to the
unquantized run.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path

from ottava.train.charts import COLOURS, HEIGHT, WIDTH, Series, lines, percent

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "images" / "convergence.svg"
LEGEND = 18  # units of height of a line of text

# Follows the reader's light or dark setting; the background stays transparent.
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #59636e }
  .title { font-size: 13px; font-weight: 600 }
  .grid { stroke: #8b949e; stroke-width: 0.3 }
  .line { fill: none; stroke-width: 1.6 }
  @media (prefers-color-scheme: dark) { text { fill: #9da7b3 } }
"""


def panel(title: str, chart: str, top: int) -> str:
    """A chart with its title, `top` units from the top."""
    inside = re.sub(r"^<svg[^>]*>|</svg>$", "", chart)
    return f'<text class="title" x="10" y="{top + 14}">{escape(title)}</text><g transform="translate(0 {top + 18})">{inside}</g>'


def draw(runs: dict) -> str:
    """The whole picture."""
    colours = dict(zip(runs, COLOURS))
    million = {name: [tokens / 1e6 for tokens, _ in run["validation"]] for name, run in runs.items()}
    losses = {name: [loss for _, loss in run["validation"]] for name, run in runs.items()}
    base = losses["none"]
    gaps = {name: [a / b - 1 for a, b in zip(losses[name], base)] for name in runs if name != "none"}
    upper = lines("Validation loss", [Series(n, million[n], losses[n], colours[n]) for n in runs])
    lower = lines("Gap", [Series(n, million[n], gap, colours[n]) for n, gap in gaps.items()], percent)
    places = [(10 + WIDTH // 2 * (i % 2), 6 + LEGEND * (i // 2)) for i in range(len(runs))]  # two columns
    keys = "".join(
        f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colours[name]}"/>'
        f'<text x="{x + 14}" y="{y + 9}">{escape("not quantized" if name == "none" else name)}</text>'
        for name, (x, y) in zip(runs, places)
    )
    first = places[-1][1] + LEGEND
    second = first + HEIGHT + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {second + HEIGHT + 24}" role="img" '
        f'aria-label="Validation loss of FP8 recipes against an unquantized run"><style>{STYLE}</style>{keys}'
        + panel("Validation loss, by millions of tokens", upper, first)
        + panel("Gap to the unquantized run", lower, second)
        + "</svg>\n"
    )


def main() -> None:
    """Reads the results, writes the picture."""
    default = ROOT / "benchmarks" / "results" / "convergence-nvidia-h200.json"
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    OUTPUT.write_text(draw(json.loads(source.read_text(encoding="utf-8"))["runs"]), encoding="utf-8")
    print(OUTPUT)


if __name__ == "__main__":
    main()
