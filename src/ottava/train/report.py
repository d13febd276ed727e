"""`ottava report RUN ...`: one HTML page about one run or several side by side. It needs no network and no script.

Read from each run's folder: metrics.jsonl; and, where they are, config.toml, summary.json (outcome and gates) and fp8.jsonl, one line
for each look at FP8 health: {"step": 50, "tensors": {"layers.0.proj.input": {"amax": ..., "scale": ..., "underflow": 0.01,
"saturated": 0.0}}}.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ottava.train import charts
from ottava.train.charts import AREA_COLOURS, COLOURS, Mark, Series
from ottava.train.clock import PARTS
from ottava.train.metrics import FILE, read_metrics, write_whole
from ottava.train.report_input import plain_config, plain_looks, plain_steps, plain_summary
from ottava.train.restarts import Restart, effective_ratio, read_restarts
from ottava.untrusted.files import read_json, read_toml

HEALTH_FILE = "fp8.jsonl"
LOOKS = 60  # columns of a heat map; of more looks, the worst of each few is shown
EVENTS = 200  # rows of the table of events
WARMUP = 5  # steps that medians leave out, unless the configuration says otherwise (gate.warmup_steps)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with the page: show it. No script runs in it, even if something were not escaped."""
STYLE = """
:root { color-scheme: light dark; --ink: #111827; --soft: #6b7280; --rule: #e5e7eb; --paper: #ffffff; --card: #f9fafb;
  --bad: #dc2626 }
@media (prefers-color-scheme: dark) { :root { --ink: #f3f4f6; --soft: #9ca3af; --rule: #374151; --paper: #111827; --card: #1f2937;
  --bad: #f87171 } }
body { margin: 0 auto; padding: 12px; max-width: 1280px; box-sizing: border-box; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 22px; margin: 8px 0 } h2 { font-size: 16px; margin: 0 0 6px }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(350px, 100%), 1fr)); gap: 12px; margin-bottom: 12px }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px; min-width: 0 }
.wide { grid-column: 1 / -1 } .scroll { overflow: auto; max-height: 560px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px } th { font-weight: 600 }
td, th { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
th:first-child { position: sticky; left: 0; background: var(--card) } tbody th { font-weight: 400; color: var(--soft) }
svg { width: 100%; height: auto; display: block } svg text { font-size: 12px; fill: var(--soft) }
svg .rule { stroke: var(--rule) } svg .mark { stroke-dasharray: 3 3 } svg rect { shape-rendering: crispEdges }
svg .line { fill: none; stroke-width: 1.6; stroke-opacity: 0.85; stroke-linejoin: round }
.event { overflow-wrap: anywhere }
.item { display: inline-flex; align-items: baseline; margin-right: 12px; overflow-wrap: anywhere }
th .item { min-width: 80px; margin: 0 }
.key { flex: none; width: 10px; height: 10px; border: 1px solid var(--rule); border-radius: 2px; margin-right: 5px }
.note { color: var(--soft); font-size: 13px; margin: 6px 0 } .failed { color: var(--bad); font-weight: 600 }
pre { overflow-x: auto; font-size: 12px }
"""


@dataclass(frozen=True)
class Run:
    """What a run left on disk."""

    name: str
    """Of its folder."""
    steps: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    health: list[dict[str, Any]]
    colour: str
    restarts: Sequence[Restart] = ()

    def column(self, key: str) -> Series:
        """A metric over the steps."""
        return Series(self.name, [s["step"] for s in self.steps], [s.get(key) for s in self.steps], self.colour)

    def warm(self) -> list[dict[str, Any]]:
        """The steps after the warm-up, in which kernels are compiled."""
        warmup = self.config.get("gate", {}).get("warmup_steps", WARMUP)
        return [step for step in self.steps if step["step"] > warmup]

    def median(self, key: str) -> float | None:
        """After the warm-up, of the steps that have it."""
        values = [step[key] for step in self.warm() if step.get(key) is not None]
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
                found.append((step["step"], self._restart(attempt)))
            if step.get("event"):
                found.append((step["step"], str(step["event"])))
        return found

    def _restart(self, attempt: int) -> str:
        known = next((one for one in self.restarts if one.attempt == attempt), None)
        if known is None:
            return f"restart {attempt}"
        how = "in place" if known.in_place else "of the job"
        return f"restart {attempt} {how}: {known.cause}; back to step {known.step}, {known.lost_s:,.1f} s lost"


def load_run(folder: Path, colour: str = COLOURS[0], name: str = "") -> Run:
    """Reads a run's folder.

    >>> load_run(Path("runs/debug")).last("loss")
    """
    if not (folder / FILE).is_file() and not (folder / "config.toml").is_file():
        raise ValueError(f"{folder} is not a run: it has no {FILE}.")
    steps = plain_steps(read_metrics(folder / FILE)) if (folder / FILE).is_file() else []
    if not steps:
        raise ValueError(f"{folder} has no step yet: `ottava status` and `ottava logs` tell what there is.")
    config, summary, health = folder / "config.toml", folder / "summary.json", folder / HEALTH_FILE
    # A run that went back looks at some steps again: the last look counts.
    looks = {look["step"]: look for look in plain_looks(read_metrics(health))} if health.is_file() else {}
    return Run(
        name=name or folder.absolute().name,
        steps=steps,
        config=plain_config(read_toml(config)) if config.is_file() else {},
        summary=plain_summary(read_json(summary)) if summary.is_file() else {},
        health=[looks[step] for step in sorted(looks)],
        colour=colour,
        restarts=read_restarts(folder),
    )


def write_report(folders: Sequence[str | Path], output: str | Path) -> Path:
    """Writes the page about the runs. Returns where it is.

    >>> write_report(["runs/bf16", "runs/fp8"], "report.html")
    """
    if not folders:
        raise ValueError("A report needs at least one run.")
    paths = [Path(folder).absolute() for folder in folders]
    names = [path.name for path in paths]
    runs = []
    for i, path in enumerate(paths):
        name = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        runs.append(load_run(path, COLOURS[i % len(COLOURS)], name))
    output = Path(output)
    try:
        write_whole(output, page(runs))  # which replaces a link, and does not follow it out of a stranger's folder
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}.") from error
    return output


# -------------------------------------------------------------------------------------------------------------------- page


def page(runs: list[Run]) -> str:
    """The whole page."""
    title = "Training report: " + ", ".join(run.name for run in runs)
    tables = [_summary_card(runs), _gate_card(runs), _event_card(runs)]
    cards = [*_line_cards(runs), *_split_cards(runs), *(_health_card(run) for run in runs)]
    body = [
        "<h1>Training report</h1>",
        f'<div class="grid">{"".join(tables)}</div>',
        '<p class="note">All charts are over steps. Dashed lines are what happened, in the colour of the run.</p>',
        f'<div class="grid">{"".join(cards)}</div>',
        *(_basis(run) for run in runs),
        *(_configuration(run) for run in runs),
    ]
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(body)}</body></html>\n"


def _card(title: str, chart: str, note: str = "", wide: bool = False) -> str:
    """Nothing, if there is no chart."""
    if not chart:
        return ""
    below = f'<div class="note">{note}</div>' if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{chart}{below}</section>'


def _key(colour: str, name: str) -> str:
    """An entry of a legend."""
    return f'<span class="item"><span class="key" style="background:{colour}"></span>{escape(name)}</span>'


def _line_cards(runs: list[Run]) -> list[str]:
    marks = [Mark(step, f"{run.name}: {what}", run.colour) for run in runs for step, what in run.events()]
    legend = "".join(_key(run.colour, run.name) for run in runs) if len(runs) > 1 else ""
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
        _card(title, charts.lines(title, [_without_gaps(run, key) for run in runs], label, marks, from_zero), legend)
        for title, key, label, from_zero in drawn
    ]


def _without_gaps(run: Run, key: str) -> Series:
    """Validation is measured now and then: its line goes through the steps that have it. Elsewhere a gap is news."""
    series = run.column(key)
    if key != "validation_loss":
        return series
    known = [(x, y) for x, y in zip(series.x, series.y) if y is not None]
    return Series(run.name, [x for x, _ in known], [y for _, y in known], run.colour)


def _split_cards(runs: list[Run]) -> list[str]:
    """One for each run. Runs that are about as fast have axes of the same height, so that a look compares them."""
    split = [_parts(run) for run in runs]
    heights = [max(charts.heights(parts), default=0.0) for parts in split]
    cards = []
    for run, parts, height in zip(runs, split, heights):
        top = max((other for other in heights if other < 4 * height), default=height)
        chart = charts.stacked("Seconds of a step", parts, top=top)
        cards.append(_card(f"Where a step's seconds go: {run.name}", chart, _shares(parts)))
    return cards


def _parts(run: Run) -> list[Series]:
    """Seconds by part, of the parts that took any. Without the warm-up, beside which nothing else could be seen."""
    steps = run.warm() or run.steps
    x = [step["step"] for step in steps]
    columns = {part: [step.get(f"{part}_s") for step in steps] for part in PARTS}
    return [Series(part, x, columns[part], AREA_COLOURS[i]) for i, part in enumerate(PARTS) if any(columns[part])]


def _shares(parts: list[Series]) -> str:
    """A legend that says how much each part is of all that was measured."""
    seconds = [sum(y for y in part.y if y is not None) for part in parts]
    return "".join(
        _key(part.colour, f"{part.name} {charts.percent(round(s / sum(seconds), 3))}")
        for part, s in zip(parts, seconds)
    )


def _health_card(run: Run) -> str:
    """By layer: the worst of its tensors' shares of values that became 0 or were cut off at the largest number."""
    size = -(-len(run.health) // LOOKS) or 1
    columns = [run.health[i : i + size] for i in range(0, len(run.health), size)]
    rows: dict[str, list[float | None]] = {}
    for i, looks in enumerate(columns):
        for tensor, found in (item for look in looks for item in look.get("tensors", {}).items()):
            row = rows.setdefault(_layer(tensor), [None] * len(columns))
            lost = float(found.get("underflow") or 0.0) + float(found.get("saturated") or 0.0)
            lost = 1.0 if found.get("non_finite") else lost
            row[i] = max(lost, row[i] or 0.0)
    ordered = dict(
        sorted(rows.items(), key=lambda item: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", item[0])])
    )
    chart = charts.heat_map("FP8 health", [f"step {looks[-1]['step']:,}" for looks in columns], ordered)
    scale = "".join(_key(charts.shade(share), charts.percent(share)) for share in (0.0, 0.001, 0.01, 0.1))
    note = f"Values that underflow or saturate, in the worst tensor of a layer (all of them, where some are NaN or infinite): {scale}"
    return _card(f"FP8 health: {run.name}", chart, note)


def _layer(tensor: str) -> str:
    match = re.match(r"(?:.*\.)?layers\.(\d+)\.", tensor)
    return f"layer {match[1]}" if match else tensor


# ------------------------------------------------------------------------------------------------------------------ tables


def _number(value: Any, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already. The first of a row is its name."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _summary_card(runs: list[Run]) -> str:
    """A column for each run. What no run knows is left out."""
    rows = [
        ("Outcome", [escape(str(run.summary.get("outcome", "running or killed"))) for run in runs]),
        ("Steps", [_number(run.last("step"), ",") for run in runs]),
        ("Tokens", [_number(run.last("tokens"), ",") for run in runs]),
        ("Loss", [_number(run.last("loss"), ".4f") for run in runs]),
        ("Validation", [_number(run.last("validation_loss"), ".4f") for run in runs]),
        ("Tokens/s", [_number(run.median("tokens_per_s"), ",.0f") for run in runs]),
        ("TFLOP/s", [_number(run.median("tflops_per_gpu"), ",.4g") for run in runs]),
        ("MFU", [_number(run.median("mfu"), ".1%") for run in runs]),
        ("Memory", [_number(run.last("peak_reserved_gib"), ",.2f", " GiB") for run in runs]),
        ("Restarts", [_number(run.last("attempt") or 0, ",") for run in runs]),
        ("Time lost", [_number(sum(r.lost_s for r in run.restarts) or None, ",.1f", " s") for run in runs]),
        ("Time on steps", [_number(effective_ratio(run.steps, run.restarts), ".1%") for run in runs]),
    ]
    table = _table(("Run", *_names(runs)), [(name, *cells) for name, cells in rows if any(cells)])
    return _card("Summary", table, wide=len(runs) > 2)


def _names(runs: list[Run]) -> list[str]:
    return [_key(run.colour, run.name) for run in runs]


def _gate_card(runs: list[Run]) -> str:
    """summary.json: {"gates": [{"name": "min_mfu", "limit": 0.4, "value": 0.37, "passed": false}, ...]}."""
    found = [{str(gate.get("name")): gate for gate in run.summary.get("gates") or []} for run in runs]
    names = list(dict.fromkeys(name for gates in found for name in gates))
    if not names:
        return ""
    rows = [(escape(name), *(_verdict(gates.get(name)) for gates in found)) for name in names]
    return _card("Gates", _table(("Gate", *_names(runs)), rows), wide=len(runs) > 2)


def _verdict(gate: dict[str, Any] | None) -> str:
    if gate is None:
        return ""
    value = "nothing was measured" if gate.get("value") is None else f"{gate['value']:.4g}"
    verdict = "passed" if gate.get("passed") else '<span class="failed">failed</span>'
    return f"{verdict}: {value}, limit {_number(gate.get('limit'), 'g')}"


def _event_card(runs: list[Run]) -> str:
    """Restarts, steps that were skipped: the first few of a run that had many."""
    rows = [
        (_key(run.colour, run.name), f"{step:,}", f'<span class="event">{escape(what)}</span>')
        for run in runs
        for step, what in run.events()
    ]
    if not rows:
        return ""
    more = f"{len(rows) - EVENTS:,} more are not shown." if len(rows) > EVENTS else ""
    return _card("What happened", _table(("Run", "Step", "Event"), rows[:EVENTS]), more)


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
