"""How near `ottava plan` comes to what was measured: every run of Ottava in files that `ottava bench step` wrote.

    python benchmarks/plan_accuracy.py benchmarks/results/{plan,step}-nvidia-*.json

Prints a line a run, estimated beside measured, writes benchmarks/results/plan-accuracy.json, and with `--page docs/planning.md` puts the
table into that page. Exit code 1 if memory is off by more than 5% or time by more than 8% somewhere (`--report`: never).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ottava.bench.shapes import train_config, workloads
from ottava.bench.step import DOCUMENT
from ottava.plan.cluster import Cluster
from ottava.plan.devices import short_name
from ottava.plan.footprint import ElementBytes, footprint
from ottava.plan.layouts import layout_of
from ottava.plan.model_size import ModelSize
from ottava.plan.step_time import step_time
from ottava.train.override import override

MEMORY, TIME = 0.05, 0.08
BEGIN, END = "<!-- accuracy -->\n", "<!-- end of accuracy -->"


def compared(path: Path) -> list[dict[str, Any]]:
    """One row for each of Ottava's runs in a file of `ottava bench step`, without those of which the file says why they are outdated."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("benchmark") != "step":
        raise SystemExit(f"{path} was not written by `ottava bench step`.")
    cluster = Cluster.of(short_name(document["machine"]["device"]), 1)
    base = train_config(workloads()[document["shape"]], "tokens", "run")
    rows = []
    least = min(measured.get("allocated_before_gib", 0.0) for measured in document["results"].values())
    for name, measured in document["results"].items():
        if not measured["ours"] or "ms" not in measured or "outdated" in measured:
            continue
        left_behind = measured.get("allocated_before_gib", 0.0) - least  # by the contender before
        config = override(base, measured["overrides"])
        size, bytes_, layout = ModelSize.of(config), ElementBytes.of(config), layout_of(config)
        time = step_time(config, size, bytes_, cluster, layout, DOCUMENT if config.data.document_mask else None)
        rows.append(
            {
                "file": path.name,
                "run": f"{document['shape']} {name}",
                "ms": measured["ms"],
                "estimated_ms": time.total * 1e3,
                "gib": measured["allocated_gib"] - left_behind,
                "estimated_gib": footprint(config, size, bytes_, layout).allocated / 2**30,
                "parts_ms": {part: seconds * 1e3 for part, seconds in time.parts.items()},
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| run | GiB | estimated | off | ms | estimated | off |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["run"]]
        for key, form in (("gib", ".1f"), ("ms", ".1f")):
            found, estimated = row[key], row[f"estimated_{key}"]
            cells += [format(found, form), format(estimated, form), f"{estimated / found - 1:+.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the table between its marks."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"The page has no {BEGIN.strip()} ... {END}.")
    return f"{before}{BEGIN}{table(rows)}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/plan-accuracy.json"))
    parser.add_argument("--page", type=Path, help="put the table into this page, such as docs/planning.md")
    parser.add_argument("--report", action="store_true", help="exit code 0 whatever is found")
    options = parser.parse_args()
    rows = [row for path in options.files for row in compared(path)]
    print(table(rows))
    options.output.write_text(json.dumps({"results": rows}, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        options.page.write_text(filled(options.page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    far = [
        row["run"]
        for row in rows
        for key, limit in (("gib", MEMORY), ("ms", TIME))
        if abs(row[f"estimated_{key}"] / row[key] - 1) > limit
    ]
    print(f"{len(rows)} runs, {len(far)} figures beyond {MEMORY:.0%} of memory or {TIME:.0%} of time: {', '.join(far)}")
    return 1 if far and not options.report else 0


if __name__ == "__main__":
    sys.exit(main())
