"""Versions that must be the same in every rank: Python, torch, CUDA, driver, NCCL, Triton, Ottava."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from typing import Any

import torch

import ottava
from ottava.detect.command import run_command
from ottava.doctor.finding import Check, Facts, Finding, differing, listed


def measure(options: Any) -> Facts:
    """Of this process. None: not there."""
    cuda = torch.cuda.is_available()
    driver = run_command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if cuda else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ottava": ottava.__version__,
        "cuda": torch.version.cuda,
        "driver": driver.splitlines()[0].strip() if driver else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else None,
    }


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """Every difference is a problem."""
    found = []
    for name in facts[0]:
        usual, odd = differing([f.get(name) for f in facts], names)
        for value, ranks in odd.items():
            who = listed([names[r] for r in ranks])
            found.append(
                Finding("versions", "problem", f"{who}: {name} {value}; the others have {usual}", tuple(ranks))
            )
    if not found:
        known = ", ".join(f"{name} {value}" for name, value in facts[0].items() if value is not None)
        found.append(Finding("versions", "ok", known))
    return found


CHECK = Check("versions", measure, judge)
