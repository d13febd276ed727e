"""The run in the folder, if there is one: does its plan suit these machines, and does its communication hide under its computing."""

from __future__ import annotations

import statistics
from pathlib import Path

from ottava.detect.exposed import SHARE, Setup, explain
from ottava.detect.finding import Finding as Detected
from ottava.detect.machine import Machine
from ottava.distributed.topology import check_topology
from ottava.doctor.finding import Finding
from ottava.doctor.run_status import RECENT
from ottava.train.arguments import parse
from ottava.train.config import Config
from ottava.train.metrics import FILE, read_metrics
from ottava.train.run_folder import CONFIG_FILE


def look(folder: Path, config_file: str | None, machine: Machine, sound_links: bool) -> list[Finding]:
    """What the detectors say of the configuration (of `config_file`, or the run's own) and of the run's last steps.

    sound_links: whether the links were measured and none is slow.
    """
    path = Path(config_file) if config_file is not None else folder / CONFIG_FILE
    if config_file is None and not path.is_file():
        return [Finding("plan", "not here", f"no run in {folder} yet, and no --config")]
    try:
        config, _ = parse([str(path) if path.is_file() else str(config_file)], prog="ottava doctor")
        found = check_topology(config.plan(), None, machine)
    except (ValueError, OSError, SystemExit) as error:
        why = error.__cause__ if isinstance(error, SystemExit) and error.__cause__ else error
        return [Finding("plan", "problem", f"{path}: {why}")]
    found += _exposed(folder, config, machine, sound_links)
    levels = {"error": "problem", "warning": "warning"}
    told = [Finding("plan", levels[f.level], f.message) for f in found]  # type: ignore[arg-type]
    return told or [Finding("plan", "ok", f"{path} suits {machine.nodes} x {machine.gpus_per_node} ranks")]


def _exposed(folder: Path, config: Config, machine: Machine, sound_links: bool) -> list[Detected]:
    path = folder / FILE
    lines = list(read_metrics(path))[-RECENT:] if path.is_file() else []
    shares = [
        (line["communication_s"] / line["step_s"], line["step_s"]) for line in lines if line.get("communication_s")
    ]
    if not shares or not sound_links:
        return []
    share, step_s = statistics.median(s for s, _ in shares), statistics.median(t for _, t in shares)
    if share <= SHARE:
        return []
    plan = config.plan().resolve(machine.world_size)
    turns = config.train.global_batch // (config.train.micro_batch * plan.dp_replicate * plan.dp_shard)
    setup = Setup(
        plan.strategy, plan.dp_shard, plan.dp_replicate, plan.tp, plan.prefetch, plan.overlap, plan.sequence_parallel,
        plan.reshard_after_forward, turns, plan.dp_shard * plan.tp > machine.island,
    )  # fmt: skip
    return [explain(share, step_s, setup, None)]
