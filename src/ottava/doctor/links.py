"""How fast ranks talk: collectives over all of them, and every pair by itself, so that a slow link has a name.

No MPI and no test programs: the process group that training will use. Rates are bus bandwidth, what one rank's link carries: for n ranks
and S bytes, an all-reduce moves 2 S (n - 1) / n over it, a gather or a reduce-scatter S (n - 1) / n.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ottava.detect.fabric import SHOULD
from ottava.doctor.finding import Facts, Finding, listed

# torch 2.13 has new names for two collectives and warns about the old ones, which 2.11 has alone.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
ROUNDS = 4
"""Of each, the best counts, after one that does not."""
SLOW = {"cpu": 0.2, "cuda": 0.6}
"""Of what other pairs reach: on a CPU all ranks share the cores that copy."""
LEAST = 0.04
"""Of what an interface carries: TCP reaches a tenth of a fast one and nearly all of a slow one, so less is a fault. Where there is one
pair, there is no other to compare it with."""
ALL_PAIRS = 8
"""Ranks up to which every pair is measured; beyond, partners at distances of 1, 2, 4, ..."""


def partners(rank: int, size: int) -> list[int | None]:
    """Who this rank exchanges with, round by round; None: it waits. In each round the pairs are disjoint.

    >>> partners(0, 4)
    [3, 1, 2]
    """
    if size <= ALL_PAIRS:  # a tournament: the last stays, the others move around
        seats = size + size % 2
        found: list[int | None] = []
        for turn in range(seats - 1):
            fixed, others = seats - 1, seats - 1
            if rank == fixed:
                peer = turn * (seats // 2) % others
            else:
                peer = (turn - rank) % others
                if peer == rank:
                    peer = fixed
            found.append(peer if peer < size else None)
        return found
    powers = [1 << k for k in range((size - 1).bit_length())]
    return [rank ^ power if rank ^ power < size else None for power in powers]


def measure(device: torch.device, rank: int, size: int) -> Facts:
    """Bus bandwidth of collectives, and rates with every partner, in bytes a second. Every rank calls it."""
    count = BYTES[device.type] // 4 // size * size
    whole, part = (
        torch.ones(count, dtype=torch.float32, device=device),
        torch.ones(count // size, dtype=torch.float32, device=device),
    )
    share = (size - 1) / size * count * 4
    works: dict[str, tuple[Callable[[], Any], float]] = {
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * share),
        "all-gather": (lambda: _GATHER(whole, part), share),
        "reduce-scatter": (lambda: _REDUCE_SCATTER(part, whole), share),
    }
    facts: Facts = {"device": device.type, "collectives": {}, "pairs": []}
    for name, (work, moved) in works.items():
        facts["collectives"][name] = moved / _best(work, device)
        whole.fill_(1.0)
    sent, received = (
        torch.ones(count, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
    )
    for peer in partners(rank, size):
        dist.barrier()
        if peer is None:
            continue

        def exchange(peer: int = peer) -> None:
            both = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)]
            for request in dist.batch_isend_irecv(both):
                request.wait()

        facts["pairs"].append([peer, count * 4 / _best(exchange, device)])
    dist.barrier()  # nobody leaves while others still exchange
    return facts


def _best(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest run."""
    best = float("inf")
    for n in range(ROUNDS + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        if n:
            best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def better(known: Facts, new: Facts) -> Facts:
    """The higher rates of two measurements of one rank."""
    if not known:
        return new
    collectives = {name: max(rate, known["collectives"][name]) for name, rate in new["collectives"].items()}
    pairs = [[peer, max(rate, old)] for (peer, rate), (_, old) in zip(new["pairs"], known["pairs"], strict=True)]
    return {**new, "collectives": collectives, "pairs": pairs}


def judge(facts: list[Facts], names: list[str], hosts: list[str]) -> list[Finding]:
    """Pairs that are far slower than others of their kind (inside a machine, between machines) or than their interface, or a rank all of
    whose pairs are; collectives that are far slower than the links ("should", bytes a second, if known)."""
    pairs: dict[tuple[int, int], float] = {}
    for rank, fact in enumerate(facts):
        for peer, rate in fact["pairs"]:
            key = (min(rank, peer), max(rank, peer))
            pairs[key] = min(rate, pairs.get(key, rate))
    found: list[Finding] = []
    for inside in (True, False):
        kind = {pair: rate for pair, rate in pairs.items() if (hosts[pair[0]] == hosts[pair[1]]) is inside}
        found += _slow_pairs(
            kind, SLOW[facts[0]["device"]], names, "inside a machine" if inside else "between machines"
        )
    told = {rank for finding in found for rank in finding.ranks}
    found += [f for f in _below_interface(pairs, facts, names) if not set(f.ranks) & told]
    found += _below_hardware(facts)
    rates = {name: min(f["collectives"][name] for f in facts) for name in facts[0]["collectives"]}
    shown = ", ".join(f"{name} {rate / 1e9:.3g}" for name, rate in rates.items())
    slowest = f"; pairs {min(pairs.values()) / 1e9:.3g} to {max(pairs.values()) / 1e9:.3g}" if pairs else ""
    found.append(Finding("links", "ok" if not found else "warning", f"GB/s: {shown}{slowest}"))
    return found


def _slow_pairs(kind: dict[tuple[int, int], float], share: float, names: list[str], where: str) -> list[Finding]:
    if not kind:
        return []
    ordered = sorted(kind.values())
    usual = ordered[round(0.75 * (len(ordered) - 1))]  # most links may be slow because they end in one rank
    slow = {pair for pair, rate in kind.items() if rate < share * usual}
    found, told = [], set()
    for rank in sorted({end for pair in slow for end in pair}):
        mine = [pair for pair in kind if rank in pair]
        if len(mine) > 1 and all(pair in slow for pair in mine):
            rate = max(kind[pair] for pair in mine)
            message = (
                f"{names[rank]}: all its links {where} are slow, {rate / 1e9:.3g} GB/s; others have {usual / 1e9:.3g}"
            )
            found.append(Finding("links", "problem", message, (rank,)))
            told |= set(mine)
    for a, b in sorted(slow - told):
        message = (
            f"{listed([names[a], names[b]])}: {kind[a, b] / 1e9:.3g} GB/s {where}; other pairs have {usual / 1e9:.3g}"
        )
        found.append(Finding("links", "problem", message, (a, b)))
    return found


def _below_interface(pairs: dict[tuple[int, int], float], facts: list[Facts], names: list[str]) -> list[Finding]:
    found = []
    for (a, b), rate in sorted(pairs.items()):
        ends = [facts[rank].get("interface") for rank in (a, b)]
        if None in ends or ends[0]["address"] == ends[1]["address"]:  # type: ignore[index]
            continue  # not known, or through the machine's own memory
        known = [(end["rate"], end["name"]) for end in ends if end and end["rate"] is not None]
        if known and rate < LEAST * min(known)[0]:
            carries, name = min(known)
            message = f"{listed([names[a], names[b]])}: {rate / 1e9:.3g} GB/s, and {name} carries {carries / 1e9:.3g}"
            found.append(Finding("links", "problem", message, (a, b)))
    return found


def _below_hardware(facts: list[Facts]) -> list[Finding]:
    should = min((f["should"] for f in facts if f.get("should")), default=None)
    slowest = min(f["collectives"]["all-reduce"] for f in facts)
    if should is None or slowest >= SHOULD * should:
        return []
    message = f"all-reduce at {slowest / 1e9:.3g} GB/s, and the links of all ranks carry {should / 1e9:.3g}"
    return [Finding("links", "problem", message)]
