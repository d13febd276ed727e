"""A plan as text, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ottava.plan.layouts import Layout
from ottava.plan.planner import Candidate, Plan
from ottava.train.arguments import to_toml
from ottava.train.charts import AREA_COLOURS
from ottava.train.report import POLICY, STYLE
from ottava.train.summary import table

GIB = 2.0**30
ORDER = "Best first: by speed, less what harder layouts and fewer bits have to earn (docs/planning.md)."
DRAWN = 16
"""Nodes of a mesh that are drawn; there is a note for the others."""
HEAD = (
    "",
    "layout",
    "copies x shards x tp",
    "recompute",
    "batch",
    "types",
    "GiB",
    "ms",
    "tokens/s/GPU",
    "MFU",
    "days",
    "GPU-hours",
)


def as_text(plan: Plan) -> str:
    """Tables for a terminal."""
    winner, cluster = plan.winner, plan.cluster
    rows = [HEAD, *((str(n), *_cells(plan, candidate)) for n, candidate in enumerate(plan.best, 1))]
    memory = [(kind, f"{size / GIB:8.2f} GiB") for kind, size in winner.memory.kinds.items() if size]
    memory.append(("in all", f"{winner.memory.total / GIB:8.2f} GiB of {cluster.gpu.memory_gib:.0f}"))
    seconds = [(name, f"{value * 1e3:10.1f} ms") for name, value in winner.time.parts.items() if value]
    seconds.append(("in all", f"{winner.time.total * 1e3:10.1f} ms"))
    dropped = [(f"{count:,}", why) for why, count in sorted(plan.dropped.items(), key=lambda item: -item[1])]
    parts = [
        f"{cluster.gpus} x {cluster.gpu.name}, {cluster.island} to a node; {plan.tokens:,.0f} tokens. {plan.considered:,} layouts.",
        f"Rates: {cluster.gpu.source}.",
        f"{table(rows)}\n{ORDER}",
        plan.advice,
        f"Memory of a GPU, layout 1\n{table(memory)}",
        f"A step, layout 1\n{table(seconds)}",
    ]
    if dropped:
        parts.append(f"Passed over\n{table(dropped)}")
    return "\n\n".join(parts)


def _cells(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    layout, gpus = candidate.layout, plan.cluster.gpus
    days = candidate.days(plan.tokens)
    return (
        layout.name,
        f"{layout.replicate} x {layout.shard} x {layout.tp}",
        layout.recompute,
        f"{layout.micro_batch} x {layout.accumulate}",
        str(layout.states),
        f"{candidate.memory.total / GIB:.1f}",
        f"{candidate.time.total * 1e3:,.0f}",
        f"{candidate.tokens_per_s / gpus:,.0f}",
        "-" if candidate.mfu is None else f"{candidate.mfu:.1%}",
        f"{days:,.1f}",
        f"{days * 24 * gpus:,.0f}",
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values: the same as `as_text`, and the winner's configuration as TOML."""
    cluster = plan.cluster
    return {
        "gpu": cluster.gpu.name,
        "gpus": cluster.gpus,
        "per_node": cluster.per_node,
        "rates": cluster.gpu.source,
        "tokens": plan.tokens,
        "considered": plan.considered,
        "dropped": plan.dropped,
        "advice": plan.advice,
        "best": [_candidate(plan, candidate) for candidate in plan.best],
        "toml": to_toml(plan.winning_config()),
    }


def _candidate(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    layout, states = candidate.layout, candidate.layout.states
    return {
        "layout": layout.name,
        "dp_replicate": layout.replicate,
        "dp_shard": layout.shard,
        "tp": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "strategy": layout.strategy,
        "recompute": layout.recompute,
        "micro_batch": layout.micro_batch,
        "accumulate": layout.accumulate,
        "optimizer": states.optimizer,
        "moments": states.moments,
        "gradients": states.gradients,
        "fp8_weights": states.fp8_weights,
        "memory_gib": {kind: size / GIB for kind, size in candidate.memory.kinds.items()},
        "total_gib": candidate.memory.total / GIB,
        "step_s": candidate.time.total,
        "seconds": candidate.time.parts,
        "communication_s": candidate.time.communication,
        "tokens_per_s": candidate.tokens_per_s,
        "mfu": candidate.mfu,
        "days": candidate.days(plan.tokens),
        "gpu_hours": candidate.days(plan.tokens) * 24 * plan.cluster.gpus,
    }


# -------------------------------------------------------------------------------------------------------------------- page


def as_html(plan: Plan, title: str) -> str:
    """One page: the tables, and the mesh as a picture. It needs no network and no script."""
    rows = [(str(n), *_cells(plan, candidate)) for n, candidate in enumerate(plan.best, 1)]
    dropped = sorted(plan.dropped.items(), key=lambda item: -item[1])
    winner = plan.winner
    cards = [
        _card("Layouts", _table(HEAD, rows) + f"<p class=note>{ORDER}</p>", wide=True),
        _card("The mesh of layout 1", mesh_picture(winner.layout, plan.cluster.island), wide=True),
        _card("Memory of a GPU", _bars({k: v / GIB for k, v in winner.memory.kinds.items()}, "GiB")),
        _card("A step", _bars({k: v * 1e3 for k, v in winner.time.parts.items()}, "ms")),
        _card("Passed over", _table(("layouts", "why"), [(f"{count:,}", why) for why, count in dropped])),
    ]
    about = f"{plan.cluster.gpus:,} x {plan.cluster.gpu.name}, {plan.tokens:,.0f} tokens"
    body = (
        f"<h1>Plan: {escape(title)}</h1><p>{escape(about)}</p><p>{escape(plan.advice)}</p>"
        f'<div class="grid">{"".join(cards)}</div><p class="note">Rates: {escape(plan.cluster.gpu.source)}.</p>'
        f'<section class="card"><h2>Configuration of layout 1</h2><pre>{escape(to_toml(plan.winning_config()))}</pre></section>'
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Plan: {escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def mesh_picture(layout: Layout, island: int) -> str:
    """The ranks as an SVG: a box a GPU, a frame a node, a colour a copy; a number a shard and a letter a part of each layer."""
    nodes = -(-layout.ranks // island)
    shown = min(nodes, DRAWN)
    columns = min(shown, 4)
    side, gap = 34, 14
    across = min(island, 4)
    width, height = across * side + gap, -(-island // across) * side + gap + 14
    drawn = []
    for node in range(shown):
        left, top = (node % columns) * (width + gap), (node // columns) * (height + gap)
        drawn.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="none" stroke="currentColor" opacity="0.4"/>'
            f'<text x="{left + 7}" y="{top + 13}">node {node}</text>'
        )
        for place in range(min(island, layout.ranks - node * island)):
            rank = node * island + place
            copy, shard, part = _place(rank, layout)
            x, y = left + 7 + place % across * side, top + 19 + place // across * side
            name = f"rank {rank}: copy {copy}, shard {shard}, part {part} of each layer"
            drawn.append(
                f'<g><title>{escape(name)}</title><rect x="{x}" y="{y}" width="{side - 4}" height="{side - 4}" rx="3" '
                f'fill="{AREA_COLOURS[copy % len(AREA_COLOURS)]}"/><text x="{x + (side - 4) / 2}" y="{y + 20}" text-anchor="middle" '
                f'style="fill:#111827">{shard}{_letter(part) if layout.tp > 1 else ""}</text></g>'
            )
    total = (columns * (width + gap), -(-shown // columns) * (height + gap))
    more = f"<p class=note>{nodes - shown:,} more nodes are like these.</p>" if nodes > shown else ""
    legend = "A colour is a copy of the model, a number a shard of it" + (
        ", a letter a part of each layer." if layout.tp > 1 else "."
    )
    size = f'viewBox="0 0 {total[0]} {total[1]}" style="max-width:{total[0] * 1.4:.0f}px"'
    return f'<svg {size} role="img" aria-label="mesh">{"".join(drawn)}</svg><p class=note>{legend}</p>{more}'


def _place(rank: int, layout: Layout) -> tuple[int, int, int]:
    return rank // (layout.shard * layout.tp), rank // layout.tp % layout.shard, rank % layout.tp


def _letter(part: int) -> str:
    return chr(ord("a") + part) if part < 26 else f".{part}"


def _card(title: str, inside: str, wide: bool = False) -> str:
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{inside}</section>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _bars(values: dict[str, float], unit: str) -> str:
    """Horizontal bars with their numbers."""
    known = {name: value for name, value in values.items() if value > 0}
    largest, drawn = max(known.values(), default=1.0), []
    for n, (name, value) in enumerate(known.items()):
        y, length = n * 24, 200 * value / largest
        drawn.append(
            f'<text x="0" y="{y + 16}">{escape(name)}</text><rect x="110" y="{y + 4}" width="{length:.1f}" height="16" '
            f'fill="{AREA_COLOURS[n % len(AREA_COLOURS)]}"/><text x="{116 + length:.1f}" y="{y + 16}">{value:,.1f} {escape(unit)}</text>'
        )
    return f'<svg viewBox="0 0 400 {len(known) * 24 + 4}" role="img" aria-label="{escape(unit)} by kind">{"".join(drawn)}</svg>'
