"""PCIe access control (ACS): where a bridge has it on, GPUs and network cards talk through the CPU instead of with each other."""

from __future__ import annotations

import re
from typing import Any

from ottava.doctor.command import run_command
from ottava.doctor.finding import Check, Facts, Finding, listed


def bridges_with_acs(text: str) -> list[str]:
    """Devices of `lspci -vvv` whose ACSCtl has source validation on.

    >>> bridges_with_acs("00:01.0 PCI bridge: X" + chr(10) + "  ACSCtl: SrcValid+ TransBlk-")
    ['00:01.0']
    """
    found, device = [], ""
    for line in text.splitlines():
        if match := re.match(r"([0-9a-f:.]+) \S", line):
            device = match[1]
        elif "ACSCtl:" in line and "SrcValid+" in line:
            found.append(device)
    return found


def measure(options: Any) -> Facts:
    """Of this machine."""
    text = run_command(["lspci", "-vvv"])
    if text is None:
        return {"not here": "lspci is not here, so PCIe access control (ACS) is not known"}
    if "ACSCtl:" not in text:
        return {"not here": "lspci shows no ACS: no bridge has it, or this user may not see it (root may)"}
    return {"on": bridges_with_acs(text)}


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """On is a problem where GPUs talk over PCIe; a virtual machine cannot turn it off."""
    found = []
    for rank, (fact, name) in enumerate(zip(facts, names)):
        if fact["on"]:
            message = f"{name}: ACS is on at {listed(fact['on'])}, so devices talk through the CPU: turn it off (BIOS, setpci)"
            found.append(Finding("PCIe", "warning", message, (rank,)))
    return found or [Finding("PCIe", "ok", "access control (ACS) is off")]


CHECK = Check("PCIe", measure, judge)
