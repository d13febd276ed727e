"""What a campaign found, as JSON; `ottava.bench.tables` makes the table by kind of it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ottava.chaos.campaign import CODES, END_S, Campaign, Outcome
from ottava.chaos.plan import KINDS
from ottava.train.config import HealthSection


def result(campaigns: Sequence[tuple[Campaign, Sequence[Outcome]]], seed: int, command: str) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    outcomes = [outcome.as_json() for _, found in campaigns for outcome in found]
    steps, wall = sum(c.steps_s for c, _ in campaigns), sum(c.wall_s for c, _ in campaigns)
    first = campaigns[0][0]
    device = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return {
        "benchmark": "chaos",
        "command": command,
        "machine": {"device": device, "torch": torch.__version__, "load": os.getloadavg()[0]},
        "kinds": list(KINDS),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seed": seed,
        "watchdog_s": first.config.health.watchdog_s,
        "limits_s": {phase: limit(first.config.health, phase) for phase in ("start", "load", "save", "data")},
        "effective_training_time_ratio": steps / wall if wall else None,
        "skipped": {kind: why for campaign, _ in campaigns for kind, why in campaign.skipped.items()},
        "faults": outcomes,
    }


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


def write(found: dict[str, Any], path: Path) -> None:
    """To a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
