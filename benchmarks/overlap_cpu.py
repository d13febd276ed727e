"""Overlap on a real, slow link: two CPU ranks in two network namespaces, joined by a pair of virtual cards with a limited rate.

    python benchmarks/overlap_cpu.py                 about 10 minutes on two idle cores; figures in benchmarks/results

One thread a rank, float32. The rate is set so that a collective takes about as long as its product. Overlapped against one after the
other: medians of interleaved trials, each begun on an idle machine. Then a Llama of two layers is trained over the same link, steps
with overlap and without taking turns: how much of the time that tensor-parallel communication takes is hidden, and whether the losses
stay the same.

Exit codes: 0 all bars hold; 3 a bar was missed on an idle machine; 75 a bar was missed, but the machine was busy with something else;
77 there can be no such link here, and why is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import slow_link

MISSED, BUSY, NOT_ALLOWED = 3, 75, 77
BARS = {"pipeline": 0.75, "bulk": 0.80, "ring": 0.88}
"""Overlapped / sequential, at most."""
HIDDEN_BAR = 0.60
"""Of the time of tensor-parallel communication in training, at least."""
RATIO = (0.7, 1.4)
"""Of the collective to its product: outside of it there is little to hide, or nothing to hide it under."""
TARGET = 0.45
"""The same of the bytes alone, as the link's rate is set first. Gloo's collectives take half as long again, or twice as long; another
attempt sets it by what they took."""
IDLE = 0.15
"""Cores that others may use."""
ROOT = Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------------------------------------------------------- idleness


def busy_cores(seconds: float) -> float:
    """Cores that were busy while this process slept: with other programs, or taken by the host of a virtual machine."""

    def read() -> tuple[float, float]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(numbers) - numbers[3] - numbers[4], float(sum(numbers))  # without idle and iowait

    busy, whole = read()
    time.sleep(seconds)
    busy_then, whole_then = read()
    return (busy_then - busy) / max(whole_then - whole, 1.0) * (os.cpu_count() or 1)


def wait_until_idle(patience: float) -> bool:
    """Whether the machine came to rest within `patience` seconds."""
    deadline = time.monotonic() + patience
    while busy_cores(0.2) > IDLE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)
    return True


# ---------------------------------------------------------------------------------------------------------- in every rank


def rank_methods(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of each method, in milliseconds, and of the ratios of its trials."""
    import torch
    import torch.distributed as dist

    from ottava.bench import overlap
    from ottava.bench.overlap_products import Case, Setting, cases
    from ottava.plan.overlap_time import LayerShape

    h = options.hidden
    shape = LayerShape(hidden=h, qkv=2 * h, fc1=2 * h, ffn=2 * h)  # on two ranks every product is [tokens, h] x [h, h]
    found: dict[str, Case] = {}
    for method in ("ring", "pipeline"):
        setting = Setting(dist.group.WORLD, torch.device("cpu"), torch.float32, shape, options.tokens, method)
        for case in cases(setting, names=("fc1", "fc2")):
            if case.method in BARS and (method == "ring" or case.direction == "forward" or case.product == "fc2"):
                found[f"{case.method}: {case.name}, {case.collective}"] = case
    times: dict[str, dict[str, list[float]]] = {name: {} for name in found}
    idle = True
    for turn in range(-1, options.trials):  # the first warms up
        for name, case in found.items():
            idle &= rest(options) or turn < 0
            works = {
                "gemm": case.multiply,
                "communication": case.communicate,
                "sequential": case.sequential,
                "overlapped": case.overlapped,
            }
            for part, work in works.items():
                assert work is not None
                took = overlap.slowest(work, torch.device("cpu"))
                if turn >= 0:
                    times[name].setdefault(part, []).append(took)
    rows = {}
    for name, parts in times.items():
        ratios = [a / b for a, b in zip(parts["overlapped"], parts["sequential"])]
        rows[name] = {f"{part}_ms": statistics.median(values) for part, values in parts.items()}
        rows[name] |= {
            "ratio": statistics.median(ratios),
            "ratios": [round(r, 3) for r in ratios],
            "method": name.split(":")[0],
        }
        rows[name]["communication_to_gemm"] = rows[name]["communication_ms"] / rows[name]["gemm_ms"]
    return {"idle": idle, "rows": rows}


def rest(options: argparse.Namespace) -> bool:
    """Rank 0 waits until the machine is idle, the other for rank 0: whether it was. What it waited is gone from the patience."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    quiet = torch.tensor(1)
    if dist.get_rank() == 0:
        began = time.monotonic()
        quiet[...] = int(wait_until_idle(options.patience))
        options.patience = max(options.patience - (time.monotonic() - began), 0.0)
    dist.broadcast(quiet, 0)
    return bool(quiet)


def rank_gemm(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one product, with both ranks at it."""
    import torch
    import torch.distributed as dist

    from ottava.bench import overlap
    from ottava.nn.operand import Operand
    from ottava.nn.product import product

    quiet = rest(options)
    h = options.hidden
    x, w = Operand(torch.randn(options.tokens, h)), Operand(torch.randn(h, h))
    work: Callable[[], Any] = lambda: product([x], [w], [], torch.float32, False)  # noqa: E731
    times = [overlap.slowest(work, torch.device("cpu")) for _ in range(options.trials + 1)][1:]
    assert dist.is_initialized()
    return {"idle": quiet, "seconds": statistics.median(times) / 1e3}


def rank_training(options: argparse.Namespace) -> dict[str, Any]:
    """Steps with overlap and without, in turns, from the same weights on the same tokens."""
    import torch
    import torch.distributed as dist

    from ottava.overlap.waits import TENSOR, comm_wait_hook

    runs = {overlap: make_run(options, overlap) for overlap in ("none", options.overlap)}
    waits: dict[str, list[float]] = {name: [] for name in runs}
    steps: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    idle = True
    for turn in range(-1, options.steps):
        for name, step in runs.items():
            idle &= rest(options) or turn < 0
            stopwatch = Stopwatch()
            began = time.perf_counter()
            with comm_wait_hook(lambda kind: stopwatch if kind == TENSOR else nullcontext()):  # noqa: B023
                loss = step()
            took = torch.tensor([time.perf_counter() - began, stopwatch.seconds], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            losses[name].append(loss)
            if turn >= 0:
                steps[name].append(float(took[0]))
                waits[name].append(float(took[1]))
    exposed = {name: statistics.median(values) for name, values in waits.items()}
    return {
        "idle": idle,
        "overlap": options.overlap,
        "step_s": {name: statistics.median(values) for name, values in steps.items()},
        "communication_s": exposed["none"],
        "exposed_s": exposed[options.overlap],
        "hidden_share": 1 - exposed[options.overlap] / exposed["none"],
        "losses": losses,
        "largest_difference": max(abs(a - b) for a, b in zip(losses["none"], losses[options.overlap])),
    }


class Stopwatch:
    """Seconds inside of it, of all threads together."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def make_run(options: argparse.Namespace, overlap: str) -> Callable[[], float]:
    """A step of a Llama of two layers, split over the two ranks: returns its loss."""
    import torch

    from ottava.distributed import ParallelPlan, parallelize
    from ottava.models.llama import Llama, LlamaConfig

    h = options.hidden
    config = LlamaConfig(512, h, 2 * h, layers=2, heads=h // 64, kv_heads=h // 64, max_length=options.tokens)
    torch.manual_seed(0)
    plan = ParallelPlan(
        tp=2,
        sequence_parallel=True,
        strategy="fsdp2",
        overlap=overlap,
        overlap_minimum_tokens=0,
        param_dtype=torch.float32,
    )
    model = parallelize(Llama(config, params_dtype=torch.float32, device="cpu"), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = torch.randint(512, (1, options.tokens), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


PARTS = {"gemm": rank_gemm, "methods": rank_methods, "training": rank_training}


def run_part(options: argparse.Namespace) -> int:
    """One part in this rank; rank 0 writes what came out."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = PARTS[options.part](options)
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


# ----------------------------------------------------------------------------------------------------------- the conductor


class Conductor:
    """Runs parts over the link until what they say can be believed, or attempts run out."""

    def __init__(self, link: slow_link.SlowLink, options: argparse.Namespace, folder: Path) -> None:
        self.link, self.options, self.folder, self.target = link, options, folder, TARGET

    def part(self, name: str) -> dict[str, Any]:
        """`name` in both ranks."""
        result = self.folder / f"{name}.json"
        kept = ("hidden", "tokens", "trials", "steps", "patience", "overlap")
        given = [word for key in kept for word in (f"--{key}", str(getattr(self.options, key)))]
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--result", str(result), *given]
        self.link.run(command, timeout=self.options.timeout)
        return json.loads(result.read_text())

    def calibrate(self) -> dict[str, Any]:
        """Sets the rate at which a collective takes about as long as its product."""
        found = self.part("gemm")
        sent = self.options.tokens // 2 * self.options.hidden * 4  # bytes: half of the tokens, float32
        self.link.limit(sent * 8 / (self.target * found["seconds"]) / 1e6)
        print(
            f"a product: {found['seconds'] * 1e3:.0f} ms; the link: {self.link.megabits:.0f} Mbit/s, {sent / 1e6:.1f} MB a collective",
            flush=True,
        )
        return found

    def methods(self) -> tuple[dict[str, Any], list[str]]:
        """(figures of the attempt that counts, what is wrong with it)."""
        wrong: list[str] = []
        found: dict[str, Any] = {}
        for attempt in range(self.options.attempts):
            self.calibrate()
            found = self.part("methods")
            wrong = judge_methods(found)
            show_methods(found)
            if not wrong:
                break
            self._again("methods", attempt, found, wrong)
            self.target /= statistics.geometric_mean(row["communication_to_gemm"] for row in found["rows"].values())
        return found, wrong

    def training(self) -> tuple[dict[str, Any], list[str]]:
        """The same of the training run."""
        wrong: list[str] = []
        found: dict[str, Any] = {}
        for attempt in range(self.options.attempts):
            found = self.part("training")
            wrong = judge_training(found)
            show_training(found)
            if not wrong:
                break
            self._again("training", attempt, found, wrong)
        return found, wrong

    def _again(self, name: str, attempt: int, found: dict[str, Any], wrong: list[str]) -> None:
        state = "the machine was idle" if found["idle"] else "the machine was busy with something else"
        print(f"{name}, attempt {attempt + 1} of {self.options.attempts}: {'; '.join(wrong)} ({state})", flush=True)


def judge_methods(found: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    wrong = []
    for name, row in found["rows"].items():
        if not RATIO[0] <= row["communication_to_gemm"] <= RATIO[1]:
            wrong.append(
                f"{name}: communication is {row['communication_to_gemm']:.2f} of the product, not {RATIO[0]} to {RATIO[1]}"
            )
        elif row["ratio"] > BARS[row["method"]]:
            wrong.append(f"{name}: {row['ratio']:.3f} of sequential, above {BARS[row['method']]}")
    return wrong


def judge_training(found: dict[str, Any]) -> list[str]:
    """The same of the training run."""
    wrong = []
    if found["hidden_share"] < HIDDEN_BAR:
        wrong.append(f"{found['hidden_share']:.0%} of communication is hidden, below {HIDDEN_BAR:.0%}")
    if found["largest_difference"] > 1e-5 * abs(found["losses"]["none"][0]):
        wrong.append(f"losses differ by {found['largest_difference']:.2e} from those without overlap")
    return wrong


def show_methods(found: dict[str, Any]) -> None:
    """A line a method."""
    for name, row in found["rows"].items():
        times = ", ".join(
            f"{part} {row[f'{part}_ms']:.0f}" for part in ("communication", "gemm", "sequential", "overlapped")
        )
        print(f"  {name:42} {times} ms: {row['ratio']:.3f} of sequential (bar {BARS[row['method']]})", flush=True)


def show_training(found: dict[str, Any]) -> None:
    """Two lines."""
    steps = found["step_s"]
    print(
        f"  training, overlap {found['overlap']!r}: a step {steps['none']:.2f} -> {steps[found['overlap']]:.2f} s; communication "
        f"{found['communication_s']:.2f} s, exposed {found['exposed_s']:.2f} s: {found['hidden_share']:.0%} hidden (bar {HIDDEN_BAR:.0%})\n"
        f"  losses {', '.join(f'{x:.5f}' for x in found['losses'][found['overlap']])}; "
        f"largest difference {found['largest_difference']:.1e}",
        flush=True,
    )


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hidden", type=int, default=2048, help="width of the products and of the model (default 2048)"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of both ranks together (default 1024)")
    parser.add_argument("--trials", type=int, default=11, help="of each method; medians count (default 11)")
    parser.add_argument(
        "--steps", type=int, default=5, help="of the training run, with and without overlap (default 5)"
    )
    parser.add_argument(
        "--overlap", default="pipeline", help="of the training run, as parallel.overlap (default pipeline)"
    )
    parser.add_argument("--attempts", type=int, default=3, help="before a missed bar counts (default 3)")
    parser.add_argument(
        "--patience",
        type=float,
        default=180.0,
        help="seconds to wait for an idle machine, in each attempt (default 180)",
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one attempt (default 1800)")
    parser.add_argument(
        "--output", type=Path, default=None, help="JSON (default benchmarks/results/overlap-cpu-MACHINE.json)"
    )
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> int:
    """The conductor, or one rank's part."""
    options = parse(sys.argv[1:])
    if options.part:
        return run_part(options)
    refusal = slow_link.why_not()
    if refusal is not None:
        print(f"overlap_cpu: there can be no slow link here: {refusal}.", file=sys.stderr)
        return NOT_ALLOWED
    slow_link.enter()
    with slow_link.SlowLink(megabits=1000) as link, tempfile.TemporaryDirectory(prefix="ottava-overlap-") as folder:
        conductor = Conductor(link, options, Path(folder))
        methods, wrong = conductor.methods()
        training, wrong_training = conductor.training()
        rate = link.megabits
    write(options, {"link_megabits": rate, "methods": methods, "training": training, "wrong": wrong + wrong_training})
    if not wrong + wrong_training:
        print("all bars hold")
        return 0
    idle = (methods["idle"] or not wrong) and (training["idle"] or not wrong_training)
    return MISSED if idle else BUSY


def write(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """The figures, with the machine."""
    from ottava.bench import report

    path = options.output or ROOT / report.default_path("overlap-cpu", f"{os.cpu_count()}cpu")
    command = " ".join(["python", "benchmarks/overlap_cpu.py", *sys.argv[1:]])
    report.write(path, "overlap_cpu", {"command": command, **figures})
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
