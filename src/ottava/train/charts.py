"""Charts as SVG text: lines, stacked areas, a heat map. No script and nothing to download, so that a page shows for ever.

All are drawn 400 units wide: about the width of a phone, and of a third of a desktop's window, so that text is readable on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 10, 26
COLOURS = ("#3b82f6", "#ef4444", "#059669", "#d97706", "#8b5cf6", "#0891b2", "#db2777", "#5c940d")
"""Of lines. All stand out from white and from a dark page."""
AREA_COLOURS = ("#94a3b8", "#7cb5d8", "#4682a9", "#e8a33d", "#8a6fb0", "#6ba368", "#c9737b", "#5f6b7a")
"""Softer, and none of those above: a part of something is not a run."""
POINTS = 400
"""More points than this are averaged: a chart has no more pixels."""

Number = float | int | None


@dataclass(frozen=True)
class Series:
    """A line: its name, and y over x. A y of None, or one that is not finite, is a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[Number]
    colour: str = COLOURS[0]


@dataclass(frozen=True)
class Mark:
    """Something that happened at x: a dashed line."""

    x: float
    what: str
    colour: str = COLOURS[0]


def plain(value: float) -> str:
    """A number on an axis. It has room for 6 digits.

    >>> plain(1_500), plain(150_000), plain(0.00025)
    ('1,500', '150k', '2.5e-4')
    """
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.6g}{suffix}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.6g}"


def percent(value: float) -> str:
    """A share on an axis."""
    return f"{100 * value:.3g}%"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between low and high.

    >>> ticks(0.0, 10.0)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _known(value: Number) -> bool:
    return value is not None and math.isfinite(value)


def thinned(x: Sequence[float], y: Sequence[Number], points: int = POINTS) -> tuple[list[float], list[Number]]:
    """At most `points` averages of neighbours. A group with a gap in it is a gap: what went wrong must show.

    >>> thinned([1, 2, 3, 4], [1.0, 3.0, None, 5.0], points=2)
    ([1.5, 3.5], [2.0, None])
    """
    if len(x) <= points:
        return list(x), list(y)
    size = math.ceil(len(x) / points)
    xs: list[float] = []
    ys: list[Number] = []
    for i in range(0, len(x), size):
        some = y[i : i + size]
        xs.append(sum(x[i : i + size]) / len(some))
        ys.append(sum(v for v in some if v is not None) / len(some) if all(map(_known, some)) else None)
    return xs, ys


class _Frame:
    """Axes, and where a value lies between them."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], label: Callable[[float], str]) -> None:
        self.x, self.label = x, label
        room = (y[1] - y[0]) * 0.04 or abs(y[1]) * 0.1 or 1.0
        self.y = (y[0] - room if y[0] else 0.0, y[1] + room)

    def at(self, x: float, y: float) -> str:
        return f"{self.across(x):.1f},{self.up(y):.1f}"

    def across(self, x: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - low) / (high - low) if high > low else 0.5)

    def up(self, y: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)

    def axes(self) -> str:
        out = []
        for value in ticks(*self.y, count=6):
            y = self.up(value)
            out.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{escape(self.label(value))}</text>')
        for value in ticks(*self.x, count=4):
            out.append(
                f'<text x="{self.across(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{plain(value)}</text>'
            )
        return "".join(out)


def _svg(title: str, inside: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">{inside}</svg>'


def _limits(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def lines(
    title: str,
    series: Sequence[Series],
    label: Callable[[float], str] = plain,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
) -> str:
    """A line for each series, and a dashed one for each mark.

    >>> lines("Loss", [Series("a", [1, 2], [5.5, 4.0])]).startswith("<svg")
    True
    """
    thin = [Series(s.name, *thinned(s.x, s.y), s.colour) for s in series]
    known = [(x, float(y)) for s in thin for x, y in zip(s.x, s.y) if y is not None and math.isfinite(y)]
    if not known:
        return ""
    low, high = _limits([y for _, y in known])
    # To the last step itself, not to the middle of the last points that were averaged.
    frame = _Frame(_limits([x for s in series for x in s.x]), (0.0 if from_zero else low, high), label)
    out = [frame.axes()]
    for mark in marks:
        if frame.x[0] <= mark.x <= frame.x[1]:
            at = f"{frame.across(mark.x):.1f}"
            out.append(
                f'<line class="mark" stroke="{mark.colour}" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{escape(mark.what)}</title></line>"
            )
    for s in thin:
        for piece in _pieces(s):
            name = f"<title>{escape(s.name)}</title>"
            points = " ".join(frame.at(x, y) for x, y in piece)
            if len(piece) == 1:
                ((x, y),) = piece
                out.append(
                    f'<circle cx="{frame.across(x):.1f}" cy="{frame.up(y):.1f}" r="2" fill="{s.colour}">{name}</circle>'
                )
            else:
                out.append(f'<polyline class="line" stroke="{s.colour}" points="{points}">{name}</polyline>')
    return _svg(title, "".join(out))


def _pieces(series: Series) -> list[list[tuple[float, float]]]:
    """The parts of a line between its gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.x, series.y):
        if y is None or not math.isfinite(y):
            pieces.append([])
        else:
            pieces[-1].append((x, float(y)))
    return [piece for piece in pieces if piece]


def heights(series: Sequence[Series]) -> list[float]:
    """How high `stacked` draws the series together, at each of its points.

    >>> heights([Series("data", [1, 2], [0.25, 0.25]), Series("forward", [1, 2], [0.5, None])])
    [0.75, 0.25]
    """
    return [sum(column) for column in zip(*(_solid(s).y for s in series))]


def _solid(series: Series) -> Series:
    """Thinned; what is not known counts as 0."""
    return Series(series.name, *thinned(series.x, [v if _known(v) else 0.0 for v in series.y]), series.colour)


def stacked(
    title: str, series: Sequence[Series], label: Callable[[float], str] = plain, top: float | None = None
) -> str:
    """Areas on top of one another, all over the same x. What is not known counts as 0.

    top: where the axis ends, for charts that are to be compared. None: at the highest point.

    >>> stacked("Seconds", [Series("data", [1, 2], [0.1, 0.1]), Series("forward", [1, 2], [0.3, 0.2])]).count("<polygon")
    2
    """
    thin = [_solid(s) for s in series]
    if not thin or not thin[0].x:
        return ""
    x = thin[0].x
    below = [0.0] * len(x)
    layers = []
    for s in thin:
        above = [b + float(y or 0.0) for b, y in zip(below, s.y)]
        layers.append((s, below, above))
        below = above
    frame = _Frame(_limits(list(series[0].x)), (0.0, max(below) if top is None else top), label)
    out = [frame.axes()]
    for s, low, high in layers:
        there = " ".join(frame.at(a, b) for a, b in zip(x, high))
        back = " ".join(frame.at(a, b) for a, b in reversed(list(zip(x, low))))
        out.append(f'<polygon fill="{s.colour}" points="{there} {back}"><title>{escape(s.name)}</title></polygon>')
    return _svg(title, "".join(out))


def shade(share: Number) -> str:
    """White for none to dark red for 10% and more, by the square root: 0.1% is to be seen too. Grey: not known.

    >>> shade(0.0), shade(0.2)
    ('hsl(0 80% 100%)', 'hsl(0 80% 40%)')
    """
    if share is None or not math.isfinite(share):
        return "#d1d5db"
    return f"hsl(0 80% {100 - 60 * min(math.sqrt(share / 0.1), 1.0):.0f}%)"


def heat_map(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Number]]) -> str:
    """A cell for each row and column, coloured by `shade` (values are shares).

    >>> heat_map("FP8", ["step 1", "step 2"], {"layers.0": [0.0, 0.2]}).count("<rect")
    2
    """
    if not rows or not columns:
        return ""
    cell = min(max(180 / len(rows), 3.0), 16.0)
    width = (WIDTH - LEFT - 20 - RIGHT) / len(columns)
    height = round(TOP + cell * len(rows) + BOTTOM)
    out = []
    every = math.ceil(13 / cell)  # a name needs 13 units of height
    for i, (name, values) in enumerate(rows.items()):
        y = TOP + i * cell
        if i % every == 0:
            short = name if len(name) <= 10 else "…" + name[-9:]  # the cells' titles have it whole
            out.append(f'<text x="{LEFT + 15}" y="{y + cell / 2 + 4:.1f}" text-anchor="end">{escape(short)}</text>')
        for j, value in enumerate(values):
            said = percent(value) if value is not None and math.isfinite(value) else "not measured"
            out.append(
                f'<rect x="{LEFT + 20 + j * width:.2f}" y="{y:.2f}" width="{width:.2f}" height="{cell:.2f}" fill="{shade(value)}">'
                f"<title>{escape(name)}, {escape(columns[j])}: {said}</title></rect>"
            )
    for j in sorted({0, len(columns) - 1}):
        anchor = "start" if j == 0 and len(columns) > 1 else "end"
        x = LEFT + 20 if anchor == "start" else WIDTH - RIGHT
        out.append(f'<text x="{x}" y="{height - 8}" text-anchor="{anchor}">{escape(columns[j])}</text>')
    return _svg(title, "".join(out), height)
