"""What every benchmark writes: figures as JSON, with the command and the machine."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import ottava


def machine() -> dict[str, Any]:
    """The device and the versions that a figure depends on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "ottava": ottava.__version__,
    }


def default_path(name: str, shape: str = "") -> Path:
    """Where a benchmark's figures go if nobody says otherwise: benchmarks/results/NAME-DEVICE[-SHAPE].json."""
    words = [name, str(machine()["device"]).lower().replace(" ", "-"), shape]
    return Path("benchmarks/results") / f"{'-'.join(filter(None, words))}.json"


def _command() -> str:
    """The command line, without where the file went."""
    words = sys.argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    return " ".join(["ottava", *words])


def write(path: Path, name: str, results: dict[str, Any]) -> None:
    """Writes `results` with the machine and the command to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": name,
        "command": _command(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        **results,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
