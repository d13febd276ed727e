"""PCIe access control (ACS): where a bridge has it on, GPUs and network cards talk through the CPU instead of with each other."""

from __future__ import annotations

import re

from ottava.detect.command import run_command
from ottava.detect.finding import Finding


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


def read_bridges() -> list[str] | str:
    """Bridges of this machine that have it on, or why that is not known."""
    text = run_command(["lspci", "-vvv"])
    if text is None:
        return "lspci is not here, so PCIe access control (ACS) is not known"
    if "ACSCtl:" not in text:
        return "lspci shows no ACS: no bridge has it, or this user may not see it (root may)"
    return bridges_with_acs(text)


def check_acs(bridges: list[str] | str) -> list[Finding]:
    """What is said of bridges that have it on. A virtual machine cannot turn it off, so it is no error.

    >>> check_acs(read_bridges())
    []
    """
    if isinstance(bridges, str) or not bridges:
        return []
    named = ", ".join(bridges[:4]) + (f" and {len(bridges) - 4} more" if len(bridges) > 4 else "")
    message = f"ACS is on at {named}, so devices talk through the CPU: turn it off (BIOS, setpci)"
    return [Finding("warning", message, "ACS or wrong card")]
