"""The story of a run's bad steps: what was found, where, what was done about it, and what to do now."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from ottava.guard.finding import KINDS, Finding
from ottava.train.events import read_events
from ottava.train.metrics import FILE as METRICS
from ottava.train.metrics import read_metrics
from ottava.train.report_input import plain_steps
from ottava.train.run_folder import CONFIG_FILE

MOST = 4
"""Tensors that are listed of one event."""

ADVICE = {
    "memory": "Memory that nobody wrote has changed: a flipped bit. Have the GPU and the memory of that rank checked (`ottava doctor`; "
    "counters of ECC errors and of remapped rows), and leave the machine out if it happens again.",
    "replay": "The same numbers gave two results. If it was transient and happens once in a long while, it was a stray bit; if it "
    "is persistent, or the same rank comes again, take that machine out.",
    "replicas": "Ranks that must hold the same numbers did not. A flipped bit that nobody saw when it happened: a smaller "
    "health.replay_every finds it sooner, and with its rank.",
    "implausible": "No training makes such a number: most likely a flipped exponent bit. Have the memory of that rank checked if it "
    "happens again.",
    "weights": "A weight that is not finite was written by a step, or by a flipped bit. If there were large gradients before it, lower "
    "optimizer.lr or set optimizer.clip.",
    "forward": "Activations overflow: look at `ottava report` for a growing loss or gradient norm before this step; a lower optimizer.lr, "
    "a longer schedule.warmup_steps or train.z_loss help. If it is transient and in one rank, suspect the hardware.",
    "backward": "Gradients overflow: a lower optimizer.lr, or more layers in high precision (precision.plain_layers). If it is transient "
    "and in one rank, suspect the hardware.",
}


def explain(folder: Path, step: int | None = None) -> str:
    """In words. ValueError for a folder that is no run.

    >>> print(explain(Path("runs/debug")))
    """
    if not (folder / CONFIG_FILE).is_file() and not (folder / METRICS).is_file():
        raise ValueError(f"{folder} is not a run: it has neither {CONFIG_FILE} nor {METRICS}.")
    events = [event for event in read_events(folder) if step in (None, event["step"])]
    lines = plain_steps(read_metrics(folder / METRICS)) if (folder / METRICS).is_file() else []
    if not events:
        which = "No step" if step is None else f"Nothing of step {step}"
        told = [
            f"  step {line['step']}: {line['event']}"
            for line in lines
            if line.get("event") and step in (None, line["step"])
        ]
        return "\n".join([f"{which} of {folder} has bad numbers on record.", *told])
    parts = [_story(number, list(group), lines) for number, group in groupby(events, key=lambda event: event["step"])]
    return "\n\n".join([*parts, _ending(events, lines)])


def _story(step: int, events: list[dict[str, Any]], lines: list[dict[str, Any]]) -> str:
    told = [f"Step {step}"]
    before = [line for line in lines if line["step"] < step and line.get("loss") is not None][-1:]
    if before:
        told.append(f"  Before it: step {before[0]['step']} had loss {before[0]['loss']:.4f}.")
    for event in events:
        told.append(f"  {event['text']}")
        findings = list(_findings(event))
        told += [f"    {finding.text}" for finding in findings[1:MOST]]
        if len(findings) > MOST:
            told.append(f"    and {len(findings) - MOST} more")
        if event["what"] == "skipped":
            told.append("  The step changed no weight; the run went on with the next.")
    causes = [finding for event in events for finding in _findings(event)][:1]
    told += [f"  What to do: {ADVICE[_key(cause)]}" for cause in causes]
    return "\n".join(told)


def _findings(event: dict[str, Any]) -> Iterable[Finding]:
    for values in event["findings"]:
        try:
            finding = Finding.from_json(values)
        except (TypeError, AttributeError):
            continue  # of a later version, or damaged
        texts = (finding.kind, finding.layer, finding.operand, finding.direction, finding.value, finding.detail)
        numbers = (finding.step, 0 if finding.rank is None else finding.rank)
        known = all(type(t) is str for t in texts) and all(type(n) is int for n in numbers)
        if known and finding.kind in KINDS and _key(finding) in ADVICE:
            yield finding


def _key(finding: Finding) -> str:
    if finding.kind != "non-finite":
        return finding.kind
    return finding.direction or "weights"


def _ending(events: list[dict[str, Any]], lines: list[dict[str, Any]]) -> str:
    skipped = sum(event["what"] == "skipped" for event in events)
    back = sum(event["what"] == "rolled back" for event in events)
    ranks = sorted({f.rank for event in events for f in _findings(event) if f.rank is not None})
    parts = [f"{skipped} steps skipped, {back} times back to a checkpoint"]
    if ranks:
        parts.append(f"ranks that were named: {', '.join(map(str, ranks))}")
    if lines:
        parts.append(f"the run is at step {lines[-1]['step']}")
    return "; ".join(parts) + "."
