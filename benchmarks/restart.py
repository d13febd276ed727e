"""How long a restart in place takes: ranks of a small run are killed, and the seconds until the next step is done are measured.

python benchmarks/restart.py --ranks 4 --times 5 [--launcher torchrun] [--output benchmarks/results/restart-x86_64-2cpu.json]

The seconds are from SIGKILL to the first line of metrics of the next attempt: noticing, meeting, a new rank, the model, the state from
a neighbour's memory, and the first step. On a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ottava.train.arguments import parse, to_toml

CONFIG = Path(__file__).parent / "chaos.toml"


def last_line(run: Path) -> dict[str, Any]:
    """Of metrics.jsonl; empty if there is none."""
    try:
        content = (run / "metrics.jsonl").read_bytes()
        return json.loads(content[: content.rfind(b"\n")].rpartition(b"\n")[2])
    except (OSError, ValueError):
        return {}


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids by rank: of the descendants that are called "ottava rank N"."""
    found, seen = {}, [launcher]
    while seen:
        pid = seen.pop()
        try:
            seen += [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("ottava rank "):
            found[int(name.split()[-1])] = pid
    return found


def wait_for(run: Path, key: str, value: int) -> float:
    """Until the last line of metrics has at least `value`: the time."""
    while last_line(run).get(key, -1) < value:
        time.sleep(0.005)
    return time.monotonic()


def measure(ranks: int, times: int, launcher: str) -> list[float]:
    """Seconds of each restart."""
    config, _ = parse([str(CONFIG)])
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train = replace(config.train, run=str(run), steps=10**6, evaluate_every=0)
        config = replace(config, train=train, parallel=replace(config.parallel, ranks=ranks))
        config = replace(config, checkpoint=replace(config.checkpoint, every=0))
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [sys.executable, *(torchrun if launcher == "torchrun" else []), "-m", "ottava", "train", str(path)]
        with (Path(folder) / "log").open("wb") as log:
            job = subprocess.Popen(words, stdout=log, stderr=log)
        found = []
        for attempt in range(1, times + 1):
            wait_for(run, "step", last_line(run).get("step", 0) + 30)
            victim = ranks_of(job.pid)[chance.randrange(ranks)]
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            found.append(wait_for(run, "attempt", attempt) - began)
            print(f"restart {attempt}: {found[-1]:.2f} s", flush=True)
        job.send_signal(signal.SIGTERM)
        job.wait()
    return found


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--launcher", choices=("ottava", "torchrun"), default="ottava")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    seconds = measure(options.ranks, options.times, options.launcher)
    print(f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s (load before: {load:.1f})")
    if options.output:
        result = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}",
            "ranks": options.ranks,
            "launcher": options.launcher,
            "restart_s": seconds,
            "median_s": statistics.median(seconds),
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
