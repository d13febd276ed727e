"""PCIe access control (ACS) of this machine's bridges."""

from __future__ import annotations

from typing import Any

from ottava.detect.acs import check_acs, read_bridges
from ottava.doctor.finding import Check, Facts, Finding


def measure(options: Any) -> Facts:
    """Of this machine."""
    bridges = read_bridges()
    return {"not here": bridges} if isinstance(bridges, str) else {"on": bridges}


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """On is a warning: it matters where GPUs talk over PCIe, and a virtual machine cannot turn it off."""
    found = [
        Finding("PCIe", "warning", f"{name}: {said.message}", (rank,))
        for rank, (fact, name) in enumerate(zip(facts, names))
        for said in check_acs(fact["on"])
    ]
    return found or [Finding("PCIe", "ok", "access control (ACS) is off")]


CHECK = Check("PCIe", measure, judge)
