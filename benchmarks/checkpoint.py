"""What safety costs: `Checkpoints` beside plain `torch.distributed.checkpoint`, the same tensors on the same disk.

    python benchmarks/checkpoint.py                     1 GB over 2 ranks, 5 rounds; writes benchmarks/results/checkpoint-MACHINE.json

Ours hashes every file, syncs files and directories, and verifies all hashes when it loads; DCP syncs its files and does neither of the
others. Rounds take turns in who begins, and each operation starts with nothing left to be written back, so that none pays for the
one before it. Numbers are seconds of the slower rank, medians over rounds.

`block` is how long an asynchronous save holds up a step of `ottava train`: the call, and what the optimizer's next step then waits for the
copy, which goes on behind a forward and backward pass (here: half a second in which the device computes and the host waits, as it
does for a GPU). `block at once` is the call that copies everything before it returns, for states that anyone may change: memory
bandwidth, and nothing else, decides it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ottava.checkpoint import Checkpoints

BARS = {"save": 1.15, "load": 1.20, "block": 0.10}
"""At most: our save and load in times of DCP's; our block in times of our save."""
COLUMNS = 4096
FORWARD_AND_BACKWARD_S = 0.5


def main() -> None:
    """Prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="of all tensors together")
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the temporary folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ottava-bench-") as folder:
        context = mp.get_context("spawn")
        queue = context.SimpleQueue()
        settings = (options.ranks, folder, options.megabytes, options.tensors, options.rounds, queue)
        mp.start_processes(run, args=settings, nprocs=options.ranks, start_method="spawn")
        rounds = queue.get()
    result = summary(rounds) | {
        "megabytes": options.megabytes,
        "ranks": options.ranks,
        "rounds": rounds,
        "machine": {"name": platform.node(), "cpus": os.cpu_count(), "processor": platform.machine()},
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "torch": torch.__version__,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rounds"}, indent=2))
    options.out.mkdir(exist_ok=True)
    path = options.out / f"checkpoint-{platform.machine()}-{os.cpu_count()}cpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians in seconds, ratios, and whether the bars are met."""
    seconds = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    ratios = {
        "save": statistics.median(r["ours save"] / r["dcp save"] for r in rounds),
        "load": statistics.median(r["ours load"] / r["dcp load"] for r in rounds),
        "block": statistics.median(r["ours block"] / r["ours save"] for r in rounds),
        "block at once": statistics.median(r["ours block at once"] / r["ours save"] for r in rounds),
    }
    return {"seconds": seconds, "ratios": ratios, "bars": BARS, "met": {n: ratios[n] <= bar for n, bar in BARS.items()}}


def run(rank: int, ranks: int, folder: str, megabytes: int, tensors: int, rounds: int, queue: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    rows = megabytes * 1_000_000 // (tensors * COLUMNS * 4)
    state = {
        f"w{i}": distribute_tensor(torch.randn(rows, COLUMNS), mesh, [Shard(0)], src_data_rank=None)
        for i in range(tensors)
    }
    measured = []
    with Checkpoints(f"{folder}/ours", keep_last=0) as checkpoints:
        for number in range(-1, rounds):  # the first is not counted: it allocates staging memory and imports
            who = [ours, theirs] if number % 2 else [theirs, ours]
            times: dict[str, float] = {}
            for each in who:
                times |= each(Path(folder), number + 1, state, checkpoints)
            measured += [times] if number >= 0 else []
    if rank == 0:
        queue.put(measured)
    dist.destroy_process_group()


def theirs(folder: Path, step: int, state: dict[str, Any], checkpoints: Checkpoints) -> dict[str, float]:
    """DCP: a save, a load."""
    path = folder / "dcp"
    found = {"dcp save": timed(lambda: dcp.save(state, checkpoint_id=path))}
    found["dcp load"] = timed(lambda: dcp.load(state, checkpoint_id=path))
    clear(path)
    return found


def ours(folder: Path, step: int, state: dict[str, Any], checkpoints: Checkpoints) -> dict[str, float]:
    """Checkpoints: a save, a load, an asynchronous save."""
    found = {"ours save": timed(lambda: checkpoints.save(step, state))}
    found["ours load"] = timed(lambda: checkpoints.load(state, step))
    clear(folder / "ours")
    found["ours block at once"] = timed(lambda: checkpoints.save_async(step, state))
    checkpoints.wait()
    clear(folder / "ours")
    optimizer = torch.optim.SGD(state.values(), lr=0.0)
    found["ours block"] = timed(lambda: checkpoints.save_async(step, state, until=optimizer))
    time.sleep(FORWARD_AND_BACKWARD_S)
    found["ours block"] += timed(optimizer.step)
    checkpoints.wait()
    clear(folder / "ours")
    return found


def clear(path: Path) -> None:
    """Removes what was written. The folder itself stays: a run makes its own once."""
    dist.barrier()
    if dist.get_rank() == 0:
        for inside in path.iterdir():
            shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
    dist.barrier()


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


if __name__ == "__main__":
    main()
