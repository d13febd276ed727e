"""What NCCL chose, read from its log (NCCL_DEBUG=INFO): which network, GPUDirect RDMA, NVLink SHARP, how ranks of a machine talk."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ottava.doctor.finding import Finding, listed

KEPT_LINES = 200


@dataclass
class Choice:
    """Of one log, which may hold several ranks' lines."""

    network: set[str] = field(default_factory=set)
    """ "IB", "Socket", or a plugin's name."""
    transports: set[str] = field(default_factory=set)
    """Of channels: "P2P", "SHM", "NET/IB", "NET/Socket"."""
    gpu_direct: bool = False
    """Some channel has GDRDMA: cards read GPU memory."""
    nvls: bool = False
    cards: tuple[str, ...] = ()
    """That NET/IB lists."""
    sockets: tuple[str, ...] = ()
    """Interfaces that NET/Socket lists."""
    version: str | None = None
    socket_links: dict[tuple[int, int], str] = field(default_factory=dict)
    """(from rank, to rank) of channels over sockets, and the machine whose line says so."""


def choices(text: str) -> str:
    """The lines of a log that say what was chosen: the rest is long, and travels to other ranks.

    >>> choices("n:1:1 [0] NCCL INFO comm 0x1 rank 0" + chr(10) + "n:1:1 [0] NCCL INFO Using network IB")
    'n:1:1 [0] NCCL INFO Using network IB'
    """
    words = ("NCCL version", "Using network", " via ", "NVLS", "nvls", "NET/IB : Using", "NET/Socket : Using")
    chosen = [line for line in text.splitlines() if any(word in line for word in words)]
    return "\n".join(chosen[:KEPT_LINES])


def parse(text: str) -> Choice:
    """Reads a log.

    >>> parse("n:1:1 [0] NCCL INFO Using network Socket").network
    {'Socket'}
    """
    choice = Choice()
    for line in text.splitlines():
        if match := re.search(r"NCCL version (\S+)", line):
            choice.version = match[1]
        if match := re.search(r"Using network (\S+)", line):
            choice.network.add(match[1])
        if match := re.search(r"via (P2P|SHM|NET/[A-Za-z_]+)", line):
            choice.transports.add(match[1])
            choice.gpu_direct |= "GDRDMA" in line
            link = re.search(r"(\d+)\[\w+\] -> (\d+)\[\w+\].* via NET/Socket", line)
            if link:
                host = re.search(r"([\w.\-]+):\d+:\d+ \[", line)
                choice.socket_links.setdefault((int(link[1]), int(link[2])), host[1] if host else "a machine")
        if "NVLS" in line and re.search(
            r"NVLS (multicast support is available|comm|head|Head)|[1-9]\d* nvls channels", line
        ):
            choice.nvls = True
        if match := re.search(r"NET/IB : Using (.*?)(?:; OOB|$)", line):
            choice.cards = tuple(re.findall(r"\[\d+\]\s*([\w.\-]+:\d+)", match[1]))
        if match := re.search(r"NET/Socket : Using (.*)", line):
            choice.sockets = tuple(re.findall(r"\[\d+\]\s*([\w.\-]+):", match[1]))
    return choice


def judge(choice: Choice, machines: int) -> list[Finding]:
    """Sockets between machines are a problem; network cards that cannot read GPU memory a warning."""
    if not choice.network and not choice.transports:
        return [
            Finding("NCCL", "not here", "no NCCL log with its choices: start with NCCL_DEBUG=INFO and give --nccl-log")
        ]
    found = []
    sockets = "Socket" in choice.network or "NET/Socket" in choice.transports
    where = f" ({', '.join(choice.sockets)})" if choice.sockets else ""
    if sockets and (machines > 1 or "NET/Socket" in choice.transports):
        found.append(
            Finding(
                "NCCL",
                "problem",
                f"{_links(choice)}machines talk over TCP sockets{where}, not InfiniBand or RoCE: look at NCCL_IB_DISABLE, NCCL_IB_HCA, "
                "the network plugin, and whether the container sees /dev/infiniband",
                tuple(sorted({rank for link in choice.socket_links for rank in link})),
            )
        )
    elif "NET/IB" in choice.transports and not choice.gpu_direct:
        found.append(
            Finding(
                "NCCL", "warning", "InfiniBand without GPUDirect RDMA: load nvidia-peermem, and see NCCL_NET_GDR_LEVEL"
            )
        )
    if not found:
        words = [*sorted(choice.network), *sorted(choice.transports)]
        words += ["GPUDirect RDMA"] * choice.gpu_direct + ["NVLS"] * choice.nvls + list(choice.cards)
        found.append(Finding("NCCL", "ok", ", ".join(words)))
    return found


def _links(choice: Choice) -> str:
    """Ranks that talk over sockets, by pair."""
    pairs = [f"rank {a} to rank {b} (log of {host})" for (a, b), host in sorted(choice.socket_links.items())]
    return f"{listed(pairs)}: " if pairs else ""
