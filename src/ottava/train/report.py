"""`ottava report RUN ...`: one HTML page about one run or several side by side. It needs no network and no script.

Read from each run's folder: metrics.jsonl; and, where they are, config.toml, summary.json (outcome and gates) and fp8.jsonl, one line
for each look at FP8 health: {"step": 50, "tensors": {"layers.0.proj.input": {"amax": ..., "scale": ..., "underflow": 0.01,
"saturated": 0.0}}}.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ottava.train import charts
from ottava.train.charts import COLOURS, Series
from ottava.train.metrics import FILE, read_metrics

SPLIT = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "checkpoint_s")
HEALTH_FILE = "fp8.jsonl"
WARMUP = 5  # steps that medians leave out, unless the configuration says otherwise (gate.warmup_steps)

STYLE = """
:root { color-scheme: light dark; --ink: #111827; --soft: #6b7280; --rule: #e5e7eb; --paper: #ffffff; --card: #f9fafb }
@media (prefers-color-scheme: dark) { :root { --ink: #f3f4f6; --soft: #9ca3af; --rule: #374151; --paper: #111827; --card: #1f2937 } }
body { margin: 0 auto; padding: 12px; max-width: 1280px; box-sizing: border-box; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 22px } h2 { font-size: 16px; margin: 0 0 6px }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(350px, 100%), 1fr)); gap: 12px }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px; min-width: 0 }
.wide { overflow-x: auto; margin: 12px 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: 3px 12px 3px 0; text-align: left;
  border-bottom: 1px solid var(--rule); white-space: nowrap }
svg { width: 100%; height: auto; display: block } svg text { font-size: 12px; fill: var(--soft) }
svg .grid { stroke: var(--rule) } svg .mark { stroke: var(--soft); stroke-dasharray: 3 3 }
svg .line { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 10px }
.note { color: var(--soft); font-size: 13px; overflow-wrap: anywhere } .failed { color: #dc2626; font-weight: 600 }
pre { overflow-x: auto; font-size: 12px }
"""


@dataclass(frozen=True)
class Run:
    """What a run left on disk."""

    name: str
    steps: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    health: list[dict[str, Any]]
    colour: str

    def column(self, key: str) -> Series:
        """A metric over the steps."""
        return Series(self.name, [s["step"] for s in self.steps], [s.get(key) for s in self.steps], self.colour)

    def median(self, key: str) -> float | None:
        """After the warm-up, of the steps that have it."""
        warmup = self.config.get("gate", {}).get("warmup_steps", WARMUP)
        values = [s[key] for s in self.steps if s["step"] > warmup and s.get(key) is not None]
        return statistics.median(values) if values else None

    def last(self, key: str) -> Any:
        """The latest that is known."""
        return next((s[key] for s in reversed(self.steps) if s.get(key) is not None), None)

    def events(self) -> list[tuple[int, str]]:
        """(step, what happened): restarts, and what the run itself reported."""
        found, attempt = [], self.steps[0].get("attempt", 0)
        for step in self.steps:
            if step.get("attempt", 0) != attempt:
                attempt = step.get("attempt", 0)
                found.append((step["step"], f"restart {attempt}"))
            if step.get("event"):
                found.append((step["step"], str(step["event"])))
        return found


def load_run(folder: Path, colour: str = COLOURS[0]) -> Run:
    """Reads a run's folder.

    >>> load_run(Path("runs/debug")).last("loss")
    """
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} is not a run: it has no {FILE}.")
    steps = list(read_metrics(folder / FILE))
    if not steps:
        raise ValueError(f"{folder / FILE} has no step yet.")
    config, summary, health = folder / "config.toml", folder / "summary.json", folder / HEALTH_FILE
    return Run(
        name=folder.name,
        steps=steps,
        config=tomllib.loads(config.read_text(encoding="utf-8")) if config.is_file() else {},
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
        health=list(read_metrics(health)) if health.is_file() else [],
        colour=colour,
    )


def write_report(folders: Sequence[str | Path], output: str | Path) -> Path:
    """Writes the page about the runs. Returns where it is.

    >>> write_report(["runs/bf16", "runs/fp8"], "report.html")
    """
    if not folders:
        raise ValueError("A report needs at least one run.")
    runs = [load_run(Path(f), COLOURS[i % len(COLOURS)]) for i, f in enumerate(folders)]
    output = Path(output)
    output.write_text(page(runs), encoding="utf-8")
    return output


# -------------------------------------------------------------------------------------------------------------------- page


def page(runs: list[Run]) -> str:
    """The whole page."""
    title = "Training report: " + ", ".join(run.name for run in runs)
    legend = "".join(f'<span class="key" style="background:{r.colour}"></span>{escape(r.name)}' for r in runs)
    cards = [*_line_cards(runs), *(_split_card(run) for run in runs), *(_health_card(run) for run in runs)]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{legend}</p>',
        f'<div class="wide">{_summary_table(runs)}</div>',
        f'<div class="grid">{"".join(cards)}</div>',
        _gate_table(runs),
        _event_table(runs),
        *(_basis(run) for run in runs),
        *(_configuration(run) for run in runs),
    ]
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(body)}</body></html>\n"


def _card(title: str, chart: str, note: str = "") -> str:
    return (
        f'<section class="card"><h2>{escape(title)}</h2>{chart}<div class="note">{note}</div></section>'
        if chart
        else ""
    )


def _line_cards(runs: list[Run]) -> list[str]:
    marks = [(float(step), f"{run.name}: {what}") for run in runs for step, what in run.events()]
    drawn = (
        ("Loss", "loss", charts.plain, False),
        ("Validation loss", "validation_loss", charts.plain, False),
        ("MFU", "mfu", charts.percent, True),
        ("Tokens a second", "tokens_per_s", charts.plain, True),
        ("Reserved memory, GiB", "peak_reserved_gib", charts.plain, True),
        ("Gradient norm", "grad_norm", charts.plain, True),
        ("Learning rate", "lr", charts.plain, True),
    )
    return [
        _card(title, charts.lines(title, [_without_gaps(run, key) for run in runs], label, marks, from_zero))
        for title, key, label, from_zero in drawn
    ]


def _without_gaps(run: Run, key: str) -> Series:
    """Validation is measured now and then: its line goes through the steps that have it. Elsewhere a gap is news."""
    series = run.column(key)
    if key != "validation_loss":
        return series
    known = [(x, y) for x, y in zip(series.x, series.y) if y is not None]
    return Series(run.name, [x for x, _ in known], [y for _, y in known], run.colour)


def _split_card(run: Run) -> str:
    x = [s["step"] for s in run.steps]
    parts = [
        Series(key.removesuffix("_s"), x, [s.get(key) for s in run.steps], COLOURS[i])
        for i, key in enumerate(SPLIT)
        if any(s.get(key) for s in run.steps)
    ]
    legend = "".join(f'<span class="key" style="background:{p.colour}"></span>{escape(p.name)}' for p in parts)
    return _card(f"Where a step's seconds go: {run.name}", charts.stacked("Seconds a step", parts), legend)


def _health_card(run: Run) -> str:
    """By layer: the worst of its tensors' shares of values that became 0 or were cut off at the largest number."""
    kept = run.health[:: -(-len(run.health) // 60) or 1]
    rows: dict[str, list[float | None]] = {}
    for i, look in enumerate(kept):
        for tensor, found in look.get("tensors", {}).items():
            row = rows.setdefault(_layer(tensor), [None] * len(kept))
            lost = float(found.get("underflow") or 0.0) + float(found.get("saturated") or 0.0)
            row[i] = max(lost, row[i] or 0.0)
    ordered = dict(
        sorted(rows.items(), key=lambda item: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", item[0])])
    )
    chart = charts.heat_map("FP8 health", [f"step {look['step']}" for look in kept], ordered)
    note = (
        "Share of values that underflow or saturate, worst tensor of each layer. White: none; dark red: 10% and more."
    )
    return _card(f"FP8 health: {run.name}", chart, note)


def _layer(tensor: str) -> str:
    match = re.match(r"(?:.*\.)?layers\.(\d+)\.", tensor)
    return f"layer {match[1]}" if match else tensor


# ------------------------------------------------------------------------------------------------------------------ tables


def _number(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{escape(h)}</th>" for h in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _summary_table(runs: list[Run]) -> str:
    header = (
        "Run",
        "Outcome",
        "Steps",
        "Tokens",
        "Loss",
        "Validation",
        "Tokens/s",
        "TFLOP/s",
        "MFU",
        "GiB",
        "Restarts",
    )
    rows = []
    for run in runs:
        rows.append(
            [
                escape(run.name),
                escape(str(run.summary.get("outcome", "running or killed"))),
                _number(run.last("step"), ","),
                _number(run.last("tokens"), ","),
                _number(run.last("loss"), ".4f"),
                _number(run.last("validation_loss"), ".4f"),
                _number(run.median("tokens_per_s"), ",.0f"),
                _number(run.median("tflops_per_gpu"), ",.1f"),
                _number(run.median("mfu"), ".1%"),
                _number(run.last("peak_reserved_gib"), ",.2f"),
                _number(run.last("attempt") or 0, ","),
            ]
        )
    return _table(header, rows)


def _gate_table(runs: list[Run]) -> str:
    """summary.json: {"gates": [{"name": "min_mfu", "limit": 0.4, "value": 0.37, "passed": false}, ...]}."""
    rows = []
    for run in runs:
        for gate in run.summary.get("gates") or []:
            passed = "passed" if gate.get("passed") else '<span class="failed">failed</span>'
            value, limit = gate.get("value"), gate.get("limit")
            rows.append(
                [escape(run.name), escape(str(gate.get("name"))), _number(limit, "g"), _number(value, ".4g"), passed]
            )
    if not rows:
        return ""
    return f'<div class="wide"><h2>Gates</h2>{_table(("Run", "Gate", "Limit", "Value", ""), rows)}</div>'


def _event_table(runs: list[Run]) -> str:
    rows = [[escape(run.name), f"{step:,}", escape(what)] for run in runs for step, what in run.events()]
    if not rows:
        return ""
    return f'<div class="wide"><h2>What happened</h2>{_table(("Run", "Step", "Event"), rows[:200])}</div>'


def _basis(run: Run) -> str:
    basis = run.last("mfu_basis")
    return f'<p class="note">MFU of {escape(run.name)}: {escape(str(basis))}.</p>' if basis else ""


def _configuration(run: Run) -> str:
    if not run.config:
        return ""
    shown = "\n".join(
        f"[{section}]\n" + "\n".join(f"{k} = {v!r}" for k, v in keys.items()) for section, keys in run.config.items()
    )
    return f"<details><summary>Configuration of {escape(run.name)}</summary><pre>{escape(shown)}</pre></details>"
