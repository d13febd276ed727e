"""The run in the folder, if there is one: does its plan suit these machines, and does its communication hide under its computing."""

from __future__ import annotations

import statistics
from pathlib import Path

from ottava.detect.exposed import SHARE, explain
from ottava.detect.finding import Finding as Detected
from ottava.detect.machine import Machine
from ottava.distributed.topology import check_topology
from ottava.doctor.finding import Finding
from ottava.doctor.run_status import RECENT
from ottava.train.arguments import parse
from ottava.train.communication import setup_of
from ottava.train.config import Config
from ottava.train.metrics import FILE, read_metrics
from ottava.train.run_folder import CONFIG_FILE


def look(
    folder: Path, config_file: str | None, machine: Machine, sound_links: bool, device: str = "cuda"
) -> list[Finding]:
    """What the detectors say of the configuration (of `config_file`, or the run's own) and of the run's last steps.

    sound_links: whether the links were measured and none is slow. device: what the ranks run on.
    """
    path = Path(config_file) if config_file is not None else folder / CONFIG_FILE
    if config_file is None and not path.is_file():
        return [Finding("plan", "not here", f"no run in {folder} yet, and no --config")]
    try:
        config, _ = parse([str(path) if path.is_file() else str(config_file)], prog="ottava doctor")
        found = check_topology(config.plan(), None, machine)
    except (ValueError, OSError, SystemExit) as error:
        why = error.__cause__ if isinstance(error, SystemExit) and error.__cause__ else error
        told_already = str(path) in str(why)
        return [Finding("plan", "problem", str(why) if told_already else f"{path}: {why}")]
    found += _exposed(folder, config, machine, device) if sound_links else []
    levels = {"error": "problem", "warning": "warning"}
    told = [Finding("plan", levels[f.level], f.message) for f in found]  # type: ignore[arg-type]
    return told or [Finding("plan", "ok", f"{path} suits {machine.nodes} x {machine.gpus_per_node} ranks")]


def _exposed(folder: Path, config: Config, machine: Machine, device: str) -> list[Detected]:
    path = folder / FILE
    lines = list(read_metrics(path))[-RECENT:] if path.is_file() else []
    shares = [
        (line["communication_s"] / line["step_s"], line["step_s"]) for line in lines if line.get("communication_s")
    ]
    if not shares:
        return []
    share, step_s = statistics.median(s for s, _ in shares), statistics.median(t for _, t in shares)
    if share <= SHARE:
        return []
    setup = setup_of(config, machine.world_size, device, machine.island)
    return [explain(share, step_s, setup, None)]
