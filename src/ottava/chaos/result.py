"""What a campaign found: a JSON file, and the table by kind that is made of it."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ottava.chaos.campaign import CODES, END_S, Campaign, Outcome
from ottava.chaos.plan import KINDS
from ottava.train.config import HealthSection


def result(campaigns: Sequence[tuple[Campaign, Sequence[Outcome]]], seed: int) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    outcomes = [outcome.as_json() for _, found in campaigns for outcome in found]
    steps, wall = sum(c.steps_s for c, _ in campaigns), sum(c.wall_s for c, _ in campaigns)
    first = campaigns[0][0]
    return {
        "machine": f"{platform.machine()}, {len(cpus())} cores",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seed": seed,
        "watchdog_s": first.config.health.watchdog_s,
        "limits_s": {phase: limit(first.config.health, phase) for phase in ("start", "load", "save", "data")},
        "effective_training_time_ratio": steps / wall if wall else None,
        "skipped": {kind: why for campaign, _ in campaigns for kind, why in campaign.skipped.items()},
        "faults": outcomes,
    }


def cpus() -> set[int]:
    """Cores that this process may use."""
    import os

    return os.sched_getaffinity(0)


def limit(section: HealthSection, phase: str) -> float:
    """Seconds in which a job that cannot go on must have ended: those of the watchdog in this phase, and 30."""
    own = {"start": section.watchdog_start_s, "load": section.watchdog_start_s, "save": section.watchdog_save_s}
    return own.get(phase, section.watchdog_s) + END_S


def failures(found: dict[str, Any]) -> list[str]:
    """What was not as promised, in words; empty if all was."""
    problems = []
    for one in found["faults"]:
        what = f"{one['kind']}, {one['phase']}, rank {one['rank']}, {one['launcher']} with {one['ranks']} ranks"
        if not one["struck"]:
            problems.append(f"{what}: did not strike")
        elif not one["equal"]:
            problems.append(f"{what}: {one['note']}")
        elif one["code"] is not None and one["code"] not in CODES:
            problems.append(f"{what}: exit code {one['code']}")
        elif one["code"] is not None and one["end_s"] > found["limits_s"].get(one["phase"], found["limits_s"]["data"]):
            problems.append(f"{what}: ended after {one['end_s']:.0f} s")
    return problems


def table(found: dict[str, Any]) -> str:
    """By kind, in Markdown."""
    rows = [
        "| fault | times | went on by itself | ended, and was started again (exit codes) | bits equal | median time lost | longest end |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        own = [one for one in found["faults"] if one["kind"] == kind]
        if not own:
            if kind in found["skipped"]:
                rows.append(f"| {kind} | skipped: {found['skipped'][kind]} | | | | | |")
            continue
        ended = [one for one in own if one["code"] is not None]
        codes = ", ".join(str(code) for code in sorted({one["code"] for one in ended}))
        lost = [one["lost_s"] for one in own if one["lost_s"] is not None]
        ends = [one["end_s"] for one in ended if one["end_s"] is not None]
        rows.append(
            f"| {kind} | {len(own)} | {sum(one['survived'] for one in own)} | {len(ended)}{f' ({codes})' if codes else ''} | "
            f"{sum(one['equal'] for one in own)} | {f'{statistics.median(lost):.1f} s' if lost else ''} | "
            f"{f'{max(ends):.1f} s' if ends else ''} |"
        )
    return "\n".join(rows)


def write(found: dict[str, Any], path: Path) -> None:
    """A file that `table` can be made of again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
