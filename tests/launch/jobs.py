"""Short runs for tests of launchers: a tiny configuration as a file, `ottava launch` as a user types it, and what came out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ottava.train.arguments import to_toml
from train.runs import tiny

EXACT = ("loss", "grad_norm", "lr", "tokens")
ROOT = Path(__file__).parents[2]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Processes find these sources, wherever they are started."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | dict(more or {})


LONG = 100_000
"""Steps of a run that does not end before a test has done something to it; `shorten` makes it end."""


def config_file(folder: Path, name: str, steps: int = LONG, **sections: Any) -> Path:
    """A run in folder/name, with a checkpoint every 5 steps. What a step does hangs on nothing that comes later.

    Deaths are the launcher's to see: nothing is survived in place.
    """
    sections = {"train": {}, "checkpoint": {}, "schedule": {"kind": "constant"}, "health": {"restarts": 0}} | sections
    sections["train"] = {"steps": steps, "evaluate_every": 0} | sections["train"]
    sections["checkpoint"] = {"every": 5} | sections["checkpoint"]
    path = folder / f"{name}.toml"
    path.write_text(to_toml(tiny(folder, name, **sections)))
    return path


def shorten(path: Path, run: Path, more: int = 15) -> int:
    """Makes the next start of a run, from the configuration at `path`, end `more` steps after those that are done. Returns the step."""
    steps = max(losses(run)) + more
    path.write_text(re.sub(rf"^steps = {LONG}$", f"steps = {steps}", path.read_text(), flags=re.MULTILINE))
    return steps


def ottava(
    *words: str, env: Mapping[str, str] | None = None, seconds: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """`ottava ...` until it ends."""
    call = [sys.executable, "-m", "ottava", *words]
    return subprocess.run(call, env=environment(env), capture_output=True, text=True, timeout=seconds)


def reference(folder: Path, steps: int, alone_after: int | None = None, **sections: Any) -> dict[int, tuple[Any, ...]]:
    """What one machine makes of the same run, with 2 ranks; from step `alone_after` on, with one that goes on from there."""
    ends = [(steps, 2)] if alone_after is None else [(alone_after, 2), (steps, 1)]
    for end, ranks in ends:
        path = config_file(folder, "reference", end, parallel={"ranks": ranks}, **sections)
        done = ottava("train", str(path))
        assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder / "reference")


def lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, as far as it is written."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.is_file() else []


def losses(run: Path) -> dict[int, tuple[Any, ...]]:
    """By step, to the bit."""
    return {line["step"]: tuple(line[key] for key in EXACT) for line in lines(run)}


def attempts(run: Path) -> set[int]:
    """Starts that steps were made in."""
    return {line["attempt"] for line in lines(run)}


def wait_until(true: Callable[[], Any], what: str, seconds: float = 900.0, otherwise: Callable[[], str] = str) -> None:
    """Looks again and again. otherwise: what to show if it does not come."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds:.0f} s\n{otherwise()}"
        time.sleep(0.1)


def resumed_after(run: Path) -> int:
    """The step that the second start went on from."""
    return min(line["step"] for line in lines(run) if line["attempt"] == 1) - 1


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    try:
        mine = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*mine, *(grandchild for child in mine for grandchild in children(child))]


def ranks_of(config: Path) -> list[int]:
    """Processes that train with a configuration, whoever has started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"train" in words
            and str(config).encode() in words
            and b"ottava.launch.agent" not in words
            and b"-c" not in words
        ):
            found.append(int(path.parent.name))
    return sorted(found)
