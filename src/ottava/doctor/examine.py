"""`examine`: all checks on all ranks. What each rank sees alone first, then what shows only when they work together."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ottava.detect.fabric import should_carry
from ottava.detect.machine import Machine
from ottava.doctor import (
    cards,
    clock,
    disk,
    environment,
    gpu_state,
    host,
    links,
    nccl_log,
    network,
    pcie,
    places,
    speed,
    versions,
)
from ottava.doctor.finding import Check, Facts, Finding, Report, counted
from ottava.doctor.team import MissingRanks, Team
from ottava.train.listen import stay_on_this_machine
from ottava.train.world import Place

ALONE: tuple[Check, ...] = (
    versions.CHECK,
    places.CHECK,
    gpu_state.CHECK,
    host.CHECK,
    disk.CHECK,
    network.CHECK,
    environment.CHECK,
    cards.CHECK,
    pcie.CHECK,
)
"""What a rank measures by itself."""
BUSY = 2.0
"""Processes that wait for a core, besides the ranks: above, nobody can say which link is slow, since cores copy. GPUs are not shared."""
SPEED_TURNS, LINK_TURNS = 5, 3
"""Times that what looks slow is measured, before it is called slow."""


@dataclass(frozen=True)
class Options:
    """What is asked for."""

    run: str = "."
    """Folder that the run will write to."""
    space_gib: float = 1.0
    """That must be free there."""
    timeout: float = 20.0
    """Seconds after which a rank that does not answer is missing."""
    seconds: float = 1.0
    """Of each measurement of speed."""
    nccl_log: str | None = None
    """A log of NCCL to read instead of one that is made here."""
    config: str | None = None
    """Of the run: a TOML file or a preset. None: the run's own, if the folder has one."""


def examine(options: Options, place: Place | None = None) -> Report:
    """Every rank calls it, and every rank gets the same report. place: of this rank; None: of one process alone.

    >>> examine(Options()).sound
    True
    """
    start = time.monotonic()
    found: list[Finding] = []
    size = 1 if place is None else place.size
    try:
        team = Team(place, options.timeout)
    except ValueError as error:
        return Report(size, (Finding("ranks", "problem", str(error)),), time.monotonic() - start)
    try:
        _all_checks(options, team, found)
        team.leave()
    except MissingRanks as error:
        found.append(Finding("ranks", "problem", str(error), tuple(error.ranks)))
        team.leave(without=error.ranks)
    return Report(size, tuple(found), time.monotonic() - start)


def _all_checks(options: Options, team: Team, found: list[Finding]) -> None:
    hosts = team.gather("hello", socket.gethostname())
    names = [f"rank {rank} on {name}" for rank, name in enumerate(hosts)] if team.size > 1 else ["this machine"]
    found.append(Finding("ranks", "ok", f"{team.size} answer, on {counted(len(set(hosts)), 'machine')}"))
    mine = {check.name: _measured(check.measure, options) for check in ALONE}
    everyone = team.gather("alone", mine)
    for check in ALONE:
        found += check.findings([facts[check.name] for facts in everyone], names)
    found += clock.judge([{"time": value} for value in team.gather("times", team.instant("clock"))], names)
    device = _device(team)
    found += _speed(options, team, device, names)
    measured = _links(options, team, device, hosts, names, found)
    loads = team.gather("load", os.getloadavg()[0] / len(os.sched_getaffinity(0)))
    if device.type == "cpu" and max(loads) > BUSY + team.place.local_size:
        measured = [_doubted(f, max(loads)) for f in measured]
    found += measured
    sound = any(f.check == "links" and f.status == "ok" for f in measured)
    machine = Machine(team.place.local_size, max(team.size // team.place.local_size, 1))
    seen = _plan(options, machine, sound, device) if team.rank == 0 else []
    found += [Finding(**finding) for finding in team.share("plan", [asdict(finding) for finding in seen])]


def _plan(options: Options, machine: Machine, sound_links: bool, device: torch.device) -> list[Finding]:
    from ottava.doctor.run_plan import (
        look,  # here: it reads configurations, which needs packages that a bare torch has not
    )

    try:
        return look(Path(options.run).expanduser(), options.config, machine, sound_links, device.type)
    except ModuleNotFoundError as error:
        return [Finding("plan", "not here", f"needs more packages: pip install 'ottava[train]' ({error})")]


def _doubted(finding: Finding, load: float) -> Finding:
    """Cores that others use too tell nothing about a link: its slowness is worth a warning."""
    if finding.status != "problem" or "GB/s" not in finding.message:
        return finding
    doubt = f"{finding.message} (machines are busy, {load:.0f} processes a core: look again when they are not)"
    return Finding(finding.check, "warning", doubt, finding.ranks)


def _speed(options: Options, team: Team, device: torch.device, names: list[str]) -> list[Finding]:
    """A rank that looks slow is measured again, with all others, and is slow if it always is: machines have other work too."""
    check = Check("speed", speed.measure, speed.judge)
    best: list[Facts] = [{} for _ in names]
    found: list[Finding] = []
    for turn in range(SPEED_TURNS):
        team.gather(f"speed/ready {turn}", None)  # all at the same time, as in training
        rates = team.gather(f"speed/{turn}", _measured(speed.measure, device, options.seconds))
        best = [speed.better(known, new) for known, new in zip(best, rates)]
        found = check.findings(best, names)
        if all(f.status != "problem" for f in found):
            break
    return found


def _measured(measure: Callable[..., Facts], *given: Any) -> Facts:
    """What `measure` finds; that it raised is a finding too."""
    try:
        return measure(*given)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _device(team: Team) -> torch.device:
    if not torch.cuda.is_available():
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // team.place.local_size, 1))
        return torch.device("cpu")
    device = torch.device("cuda", team.place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


# ------------------------------------------------------------------------------------------------------------------- links


def _links(
    options: Options, team: Team, device: torch.device, hosts: list[str], names: list[str], earlier: list[Finding]
) -> list[Finding]:
    machines = len(set(hosts))
    if team.size == 1:
        return [
            Finding("links", "not here", "one rank has nobody to talk to: start it under torchrun"),
            *_read_log(options, machines),
        ]
    if any(f.check == "network" and f.status == "problem" for f in earlier):
        return [Finding("links", "not here", "not measured until the problems of the network are solved")]
    shared = any(f.check == "places" and "drive one GPU" in f.message for f in earlier)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory(prefix="ottava-doctor-") as folder:
        log = _log_nccl(Path(folder)) if "nccl" in backend and options.nccl_log is None else None
        found = _pairs(options, team, device, backend, hosts, names)
        text = nccl_log.choices(log.read_text(errors="replace")) if log is not None and log.is_file() else None
    logs = [text for text in team.gather("nccl", text) if text]
    if logs:
        return found + nccl_log.judge(nccl_log.parse("\n".join(logs)), machines)
    return found + _read_log(options, machines)


def _pairs(
    options: Options, team: Team, device: torch.device, backend: str, hosts: list[str], names: list[str]
) -> list[Finding]:
    """A link that looks slow is measured again, like a rank that does."""
    best: list[Facts] = [{} for _ in names]
    found: list[Finding] = []
    for turn in range(LINK_TURNS):
        facts = _measured(_in_group, team, device, backend, options.timeout, turn)
        everyone = team.gather(f"links/{turn}", facts)  # a rank that has stopped meanwhile is named here
        failed = [rank for rank, f in enumerate(everyone) if "failed" in f]
        if failed:
            first = str(everyone[failed[0]]["failed"]).splitlines()[0]
            return [Finding("links", "problem", f"{names[failed[0]]}: {first}", tuple(failed))]
        best = [links.better(known, new) for known, new in zip(best, everyone)]
        found = links.judge(best, names, hosts)
        if all(f.status != "problem" for f in found):
            break
    return found


def _in_group(team: Team, device: torch.device, backend: str, timeout: float, turn: int) -> Facts:
    assert team.store is not None
    if team.place.local:
        stay_on_this_machine()  # as a run would
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"links-{turn}", team.store),
        rank=team.rank,
        world_size=team.size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        facts = links.measure(device, team.rank, team.size)
        facts["interface"] = network.interface_towards(os.environ.get("MASTER_ADDR", "localhost"))
        if device.type == "cuda" and "nccl" in backend:
            facts["should"] = should_carry(range(team.size), team.place.local_size)
        return facts
    finally:
        dist.destroy_process_group()


def _log_nccl(folder: Path) -> Path | None:
    """Where NCCL, which reads these variables when it starts, will write; None if the user has it write elsewhere."""
    if "NCCL_DEBUG" in os.environ:
        return None
    log = folder / "nccl.log"
    os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"] = "INFO", str(log)
    return log


def _read_log(options: Options, machines: int) -> list[Finding]:
    if options.nccl_log is None:
        return [Finding("NCCL", "not here", "no GPUs of several ranks, and no --nccl-log to read")]
    try:
        text = Path(options.nccl_log).read_text(errors="replace")
    except OSError as error:
        return [Finding("NCCL", "problem", f"{options.nccl_log} cannot be read: {error.strerror}")]
    return nccl_log.judge(nccl_log.parse(text), machines)
