"""Draws docs/images/batch.svg: how a batch walks through one layer, and what each stop keeps for the backward pass.

    python docs/draw_batch.py

The figures are bytes per token and hidden element (u) of the Llama-3-8B shape; docs/memory.md derives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OUTPUT = Path(__file__).parent / "images" / "batch.svg"

# Follows the reader's light or dark setting; the background stays transparent.
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
  .small { font-size: 11px; fill: #59636e }
  .left { text-anchor: start }
  .title { font-weight: 600 }
  .fp8 { fill: #ffe3c2; stroke: #bc6c25 }
  .gemm { fill: #d3e9ff; stroke: #2a6fb0 }
  .plain { fill: #eef1f4; stroke: #8b949e }
  .wire { stroke: #59636e; stroke-width: 1.4; fill: none; marker-end: url(#tip) }
  .tip { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9da7b3 }
    .fp8 { fill: #5a3a16; stroke: #e0a458 }
    .gemm { fill: #173a5e; stroke: #6cb0f5 }
    .plain { fill: #262c34; stroke: #7d8590 }
    .wire { stroke: #9da7b3 }
    .tip { fill: #9da7b3 }
  }
"""


@dataclass(frozen=True)
class Stop:
    """A box on the way of the batch."""

    kind: str
    """Colour class: "fp8" writes FP8, "gemm" multiplies it, "plain" stays in the activation dtype."""
    name: str
    output: str
    """What it produces, and the dtype."""
    keeps: str = ""
    """What stays in memory for the backward pass, in u."""


ATTENTION = [
    Stop("plain", "x", "bf16", "2"),
    Stop("fp8", "norm + cast", "FP8", "1"),
    Stop("gemm", "qkv GEMM", "bf16", "3"),
    Stop("plain", "RoPE, attention", "bf16", "2"),
    Stop("fp8", "cast", "FP8"),
    Stop("gemm", "proj GEMM", "bf16"),
    Stop("plain", "+ residual", "bf16", "2"),
]
MLP = [
    Stop("fp8", "norm + cast", "FP8", "1"),
    Stop("gemm", "fc1 GEMM", "bf16", "14"),
    Stop("fp8", "SwiGLU + cast", "FP8"),
    Stop("gemm", "fc2 GEMM", "bf16"),
    Stop("plain", "+ residual", "bf16"),
]
FLOORS = ["recipe", "quant", "kernels", "nn", "optimizers", "distributed", "checkpoint", "train"]

WIDTH, BOX_WIDTH, BOX_HEIGHT, STEP = 980, 122, 46, 138
LEFT = 8


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text whose baseline is at y."""
    return f'<text x="{x:g}" y="{y:g}"' + (f' class="{style}"' if style else "") + f">{words}</text>"


def box(x: float, y: float, kind: str, width: float = BOX_WIDTH, height: float = BOX_HEIGHT) -> str:
    """A rounded box with its top left corner at (x, y)."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="{kind}"/>'


def row(stops: list[Stop], y: float, first_column: int) -> list[str]:
    """Boxes from left to right with arrows between them, and under each what it keeps."""
    parts = []
    for column, stop in enumerate(stops, start=first_column):
        x = LEFT + column * STEP
        middle = x + BOX_WIDTH / 2
        parts += [box(x, y, stop.kind), text(middle, y + 20, stop.name, "title"), text(middle, y + 37, stop.output)]
        parts.append(
            text(middle, y + BOX_HEIGHT + 17, f"keeps {stop.keeps}u" if stop.keeps else "keeps nothing", "small")
        )
        if column > first_column:
            parts.append(f'<path d="M{x - STEP + BOX_WIDTH} {y + 23:g}H{x - 4}" class="wire"/>')
    return parts


def floors(y: float) -> list[str]:
    """The packages, lowest first; an arrow points at what a package may import."""
    parts = []
    for column, name in enumerate(FLOORS):
        x = LEFT + column * 120
        parts.append(box(x, y, "plain", 100, 32))
        parts.append(text(x + 50, y + 21, name))
        if column:
            parts.append(f'<path d="M{x} {y + 16:g}H{x - 16}" class="wire"/>')
    return parts


def draw() -> str:
    """The whole picture as SVG."""
    down = LEFT + 6 * STEP + BOX_WIDTH / 2
    into = LEFT + STEP + BOX_WIDTH / 2
    parts = [
        text(LEFT, 20, "How a batch walks through one layer under FP8", "title left"),
        *row(ATTENTION, 36, 0),
        # From the first residual sum down to the second norm: around the labels, then in from above.
        f'<path d="M{down:g} 104V122H{into:g}V132" class="wire"/>',
        *row(MLP, 138, 1),
        text(LEFT, 164, "MLP", "title left"),
        text(
            LEFT,
            228,
            "Kept for backward: 25u, of which recompute drops every quantized copy: 23u. bf16 keeps 27u.",
            "left",
        ),
        text(LEFT, 262, "The packages: each may import only what lies to its left", "title left"),
        *floors(274),
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 318" role="img" '
        'aria-label="The stops of a transformer layer, what each keeps for the backward pass, and the packages">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>\n'
        f"{body}\n</svg>\n"
    )


if __name__ == "__main__":
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(draw())
