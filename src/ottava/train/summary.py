"""The end of a run: summary.json, and the same as a table for people."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from ottava.train.config import Config
from ottava.train.gates import Gate
from ottava.train.restarts import effective_ratio, read_restarts

MEDIANS = ("tokens_per_s", "step_s", "tflops_per_gpu", "mfu")


def summarize(
    config: Config, outcome: str, lines: Sequence[dict[str, Any]], gates: Sequence[Gate], **more: Any
) -> dict[str, Any]:
    """What summary.json says of a run with these lines of metrics.

    >>> summarize(config, "done", list(read_metrics(path)), gates=[])["loss"]
    """
    after = [line for line in lines if line["step"] > config.gate.warmup_steps] or list(lines)

    def median(key: str) -> float | None:
        values = [line[key] for line in after if line.get(key) is not None]
        return statistics.median(values) if values else None

    def last(key: str) -> Any:
        return next((line[key] for line in reversed(lines) if line.get(key) is not None), None)

    validation = last("validation_loss")
    restarts = read_restarts(config.run_folder)
    return {
        "outcome": outcome,
        "step": last("step") or 0,
        "steps": config.train.steps,
        "tokens": last("tokens") or 0,
        "first_loss": lines[0].get("loss") if lines else None,
        "loss": last("loss"),
        "validation_loss": validation,
        "perplexity": math.exp(min(validation, 700.0)) if validation is not None else None,
        "medians": {key: median(key) for key in MEDIANS},
        "mfu_basis": last("mfu_basis"),
        "peak_reserved_gib": max(
            (line["peak_reserved_gib"] for line in lines if line.get("peak_reserved_gib")), default=None
        ),
        "restarts": last("attempt") or 0,
        "lost_s": sum(restart.lost_s for restart in restarts),
        "effective_training_time_ratio": effective_ratio(lines, restarts),
        "gates": [gate.as_dict() for gate in gates],
        **more,
    }


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns under each other.

    >>> print(table([("loss", "2.51"), ("tokens", "614,400")]))
      loss    2.51
      tokens  614,400
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths))).rstrip() for row in rows)


def as_text(config: Config, summary: dict[str, Any]) -> str:
    """The summary as people read it, and where to look next."""
    medians = summary["medians"]
    rows: list[tuple[str, ...]] = [
        ("outcome", summary["outcome"]),
        ("steps", f"{summary['step']:,} of {summary['steps']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
    ]
    if summary["loss"] is not None:
        rows.append(("loss", f"{_number(summary['first_loss'], '.3f')} -> {_number(summary['loss'], '.3f')}"))
    if summary["validation_loss"] is not None:
        rows.append(("validation", f"{summary['validation_loss']:.3f} (perplexity {summary['perplexity']:.2f})"))
    rows += [
        (label, _number(medians[key], form))
        for label, key, form in (
            ("tokens/s", "tokens_per_s", ",.0f"),
            ("seconds a step", "step_s", ".3f"),
            ("TFLOP/s a rank", "tflops_per_gpu", ".3f"),
            ("MFU", "mfu", ".1%"),
        )
        if medians[key] is not None
    ]
    if summary["peak_reserved_gib"] is not None:
        rows.append(("memory a rank", f"{summary['peak_reserved_gib']:.2f} GiB"))
    if summary["restarts"]:
        lost, ratio = summary["lost_s"], summary["effective_training_time_ratio"]
        rows.append(("restarts", f"{summary['restarts']}, {lost:,.1f} s lost"))
        if ratio is not None:
            rows.append(("time on steps", f"{ratio:.1%}"))
    folder = config.run_folder
    looks: list[tuple[str, ...]] = [
        ("ottava report " + shlex.quote(str(folder)), "one page with all curves"),
        ("ottava checkpoint ls " + shlex.quote(str(folder / "checkpoints")), "what was saved"),
        (str(folder / "metrics.jsonl"), "a line a step"),
    ]
    return f"{table(rows)}\n\nWhere to look next\n{table(looks)}"


def _number(value: float | None, form: str) -> str:
    return "non-finite" if value is None else format(value, form)
