"""Where ranks sit: LOCAL_RANK counts up on every machine, and no two ranks drive one GPU."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from ottava.doctor.finding import Check, Facts, Finding, listed


def measure(options: Any) -> Facts:
    """What the launcher told this process, and the GPU that it would take."""
    local = os.environ.get("LOCAL_RANK")
    facts: Facts = {
        "host": socket.gethostname(),
        "rank": os.environ.get("RANK", "0"),
        "local_rank": local,
        "local_size": os.environ.get("LOCAL_WORLD_SIZE"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "gpu": None,
    }
    if facts["gpus"] and (local is None or (local.isdigit() and int(local) < facts["gpus"])):
        facts["gpu"] = str(torch.cuda.get_device_properties(int(local or 0)).uuid)
    return facts


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """By machine."""
    if len(facts) == 1 and facts[0]["local_rank"] is None:
        return [Finding("places", "ok", f"one process, {facts[0]['gpus']} GPUs")]
    found: list[Finding] = []
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact["host"], []).append(rank)
    for host, ranks in hosts.items():
        found += _of_machine(host, ranks, facts, names)
    if not found:
        counts = sorted({len(ranks) for ranks in hosts.values()})
        found.append(Finding("places", "ok", f"{len(hosts)} machines, {' or '.join(map(str, counts))} ranks on each"))
    return found


def _of_machine(host: str, ranks: list[int], facts: list[Facts], names: list[str]) -> list[Finding]:
    found, seats, gpus = [], {}, {}  # type: ignore[var-annotated]
    for rank in ranks:
        fact, local = facts[rank], facts[rank]["local_rank"]
        if local is None:
            found.append(
                _problem(f"{names[rank]} has no LOCAL_RANK: start it with torchrun or srun's equivalent", rank)
            )
            continue
        if not local.isdigit() or int(local) >= len(ranks):
            found.append(
                _problem(f"{names[rank]}: LOCAL_RANK is {local}, but {host} has {len(ranks)} ranks, 0 to {len(ranks) - 1}", rank)
            )  # fmt: skip
        if local in seats:
            both = listed([names[seats[local]], names[rank]])
            found.append(_problem(f"{both} both have LOCAL_RANK {local} on {host}", seats[local], rank))
        seats.setdefault(local, rank)
        if fact["local_size"] is not None and fact["local_size"] != str(len(ranks)):
            found.append(
                _problem(f"{names[rank]}: LOCAL_WORLD_SIZE is {fact['local_size']}, but {len(ranks)} ranks are on {host}", rank)
            )  # fmt: skip
        if fact["gpu"] is not None:
            if fact["gpu"] in gpus:
                both = listed([names[gpus[fact["gpu"]]], names[rank]])
                found.append(_problem(f"{both} drive one GPU, {fact['gpu']} of {host}", gpus[fact["gpu"]], rank))
            gpus.setdefault(fact["gpu"], rank)
    return found


def _problem(message: str, *ranks: int) -> Finding:
    return Finding("places", "problem", message, ranks)


CHECK = Check("places", measure, judge)
