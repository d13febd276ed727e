"""Tables of benchmark figures in Markdown pages, made from the JSON that the benchmarks write: nobody copies a number by hand.

    python -m ottava.bench.tables docs/performance.md

A page says where a table goes: everything between the two lines below is replaced by one table for each file that matches. Paths are
relative to the repository, which is where the command runs.

    <!-- table: benchmarks/results/layer-*.json -->
    <!-- end of table -->
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKED = re.compile(r"(<!-- table: (?P<files>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def layer(document: dict[str, Any]) -> str:
    """Of `ottava bench layer`."""
    results = document["results"]
    bf16 = results["bf16"]["ms"]
    known = (("peak_gib", ".2f"), ("peak_gib_selective", ".2f"), ("host_ms", ".1f"))
    columns = tuple(column for column in known if any(column[0] in row for row in results.values()))
    names = {"peak_gib": "peak GiB", "peak_gib_selective": "with selective recompute", "host_ms": "host ms"}
    rows = []
    for name, row in (results | document.get("peers", {})).items():
        if "failed" in row:
            rows.append([name, row["failed"], "", *[""] * len(columns)])
            continue
        cells = [_number(row.get(key), form) for key, form in columns]
        rows.append([name, f"{row['ms']:.1f}", f"{row['ms'] / bf16:.2f}", *cells])
    return _markdown(["", "ms", "against bf16", *(names[key] for key, _ in columns)], rows)


def step(document: dict[str, Any]) -> str:
    """Of `ottava bench step`."""
    results = document["results"]
    peers = [name for name, row in results.items() if not row["ours"] and "ms" in row]
    columns = (
        ("ms", ".1f"), ("tokens_per_s", ",.0f"), ("mfu", ".3f"), ("allocated_gib", ".1f"), ("host_ms", ".1f"), ("launches", ",d"),
    )  # fmt: skip
    rows = []
    for name, row in results.items():
        who = f"{name} (ours)" if row["ours"] else name
        if "failed" in row:
            rows.append([who, row["failed"], *[""] * (len(columns) - 1 + len(peers))])
            continue
        cells = [_number(row.get(key), form) for key, form in columns]
        rows.append([who, *cells, *(f"{row['ratio_to'][peer]:.2f}" for peer in peers)])
    head = ["", "ms", "tokens/s", "MFU", "GiB allocated", "host ms", "launches", *(f"over {peer}" for peer in peers)]
    return _markdown(head, rows)


def kernels(document: dict[str, Any]) -> str:
    """Of `ottava bench kernels`."""
    rows = [
        [r["kernel"], f"{r['rows']:,}", f"{r['bytes'] / 1e6:,.0f}", f"{r['ms']:.3f}", f"{r['gb_per_s']:,.0f}", f"{r['share']:.0%}"]
        for r in document["results"]
    ]  # fmt: skip
    return _markdown(["kernel", "rows", "MB", "ms", "GB/s", "of a copy's rate"], rows)


def gemm(document: dict[str, Any]) -> str:
    """Of `ottava bench gemm`: one line a product, one column a kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in document["results"]))
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in document["results"]:
        product = (f"{row['layer']} {row['direction']}", row["m"], row["n"], row["k"])
        lines.setdefault(product, {})[row["kind"]] = row["tflops"]
    rows = [
        [str(cell) for cell in product] + [_number(found.get(k), ".0f") for k in kinds]
        for product, found in lines.items()
    ]
    return _markdown(["product", "m", "n", "k", *(f"{kind}, TFLOP/s" for kind in kinds)], rows)


def attention(document: dict[str, Any]) -> str:
    """Of `ottava bench attention`."""
    rows = []
    for name, row in document["results"].items():
        if "failed" in row:
            rows.append([name, row["failed"], "", ""])
            continue
        rate = f"{row['forward_tflops']:.0f} and {row['backward_tflops']:.0f}"
        rows.append([name, f"{row['forward_ms']:.3f}", f"{row['backward_ms']:.3f}", rate])
    return _markdown(["backend", "forward ms", "backward ms", "TFLOP/s of the causal square"], rows)


def chaos(document: dict[str, Any]) -> str:
    """Of `ottava chaos`: one line a kind of fault."""
    rows = []
    for kind in document["kinds"]:
        if why := document["skipped"].get(kind):
            rows.append([kind, f"skipped: {why}", *[""] * 5])
            continue
        own = [one for one in document["faults"] if one["kind"] == kind]
        if not own:
            continue
        ended = [one for one in own if one["code"] is not None]
        codes = ", ".join(str(code) for code in sorted({one["code"] for one in ended}))
        lost = [one["lost_s"] for one in own if one["lost_s"] is not None]
        ends = [one["end_s"] for one in ended]
        rows.append(
            [
                kind,
                str(len(own)),
                str(sum(one["survived"] for one in own)),
                f"{len(ended)} ({codes})" if ended else "0",
                str(sum(one["equal"] for one in own)),
                f"{statistics.median(lost):.1f}" if lost else "-",
                f"{max(ends):.1f}" if ends else "-",
            ]
        )
    head = ["fault", "times", "went on by itself", "ended, started again (exit codes)", "bits equal", "median s lost"]
    return _markdown([*head, "longest s to end"], rows)


def overlap(document: dict[str, Any]) -> str:
    """Of `ottava bench overlap`."""
    times = ("communication_ms", "gemm_ms", "sequential_ms", "overlapped_ms", "bound_ms")
    rows = [
        [f"{row['product']} {row['direction']}", row["collective"], row["method"], *(_number(row.get(key), ".3f") for key in times),
         _number(row.get("hidden_share"), ".0%"), row.get("chosen", "-")]
        for row in document["results"]
    ]  # fmt: skip
    head = [
        "GEMM",
        "collective",
        "method",
        "collective ms",
        "GEMM ms",
        "one after the other",
        "overlapped",
        "bound",
        "hidden",
        "chosen",
    ]
    return _markdown(head, rows)


def overlap_cpu(document: dict[str, Any]) -> str:
    """Of benchmarks/overlap_cpu.py."""
    times = ("communication_ms", "gemm_ms", "sequential_ms", "overlapped_ms")
    rows = [
        [name, *(f"{row[key]:.0f}" for key in times), f"{row['ratio']:.2f}"]
        for name, row in document["methods"]["rows"].items()
    ]
    head = ["", "collective ms", "GEMM ms", "one after the other", "overlapped", "overlapped / sequential"]
    run = document["training"]
    before, after = (f"{run['step_s'][name]:.2f} s" for name in ("none", run["overlap"]))
    trained = (
        f'Training two layers, `overlap="{run["overlap"]}"`: a step takes {after} instead of {before}, and '
        f"{run['hidden_share']:.0%} of {run['communication_s']:.2f} s of communication is hidden."
    )
    return f"{_markdown(head, rows)}\n\n{trained}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "layer": layer, "step": step, "kernels": kernels, "gemm": gemm, "attention": attention, "overlap": overlap,
    "overlap_cpu": overlap_cpu, "chaos": chaos,
}  # fmt: skip


def from_file(path: Path, root: Path) -> str:
    """A table with its command, machine and file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    make = TABLES.get(document.get("benchmark", ""))
    if make is None:
        raise ValueError(
            f"{path} is of the benchmark {document.get('benchmark')!r}; tables are made of {', '.join(TABLES)}."
        )
    name = path.relative_to(root).as_posix()
    machine = document["machine"]
    about = f"`{document['command']}` on {machine['device']}, torch {machine['torch']}, {document['date']}: [figures](../{name})."
    return f"{about}\n\n{make(document)}\n{_outdated(document)}"


def _outdated(document: dict[str, Any]) -> str:
    """A line for each figure of which the file itself says why the code of today gives another."""
    results = document.get("results")
    named = results.items() if isinstance(results, dict) else ()
    return "".join(f"\nOf an older Ottava: {name}, {row['outdated']}.\n" for name, row in named if "outdated" in row)


def filled(page: str, root: Path) -> str:
    """`page` with every table made anew from the files under `root`."""

    def table(marked: re.Match[str]) -> str:
        files = sorted(root.glob(marked["files"]))
        return marked[1] + "".join(f"\n{from_file(path, root)}\n" for path in files) + marked[3]

    return MARKED.sub(table, page)


def main(arguments: list[str]) -> int:
    """Rewrites the pages that are named."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for name in arguments:
        page = Path(name)
        page.write_text(filled(page.read_text(encoding="utf-8"), Path.cwd()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
