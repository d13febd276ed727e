"""`ottava bench overlap`: tensor-parallel collectives under the products of a layer, one by one.

    ottava bench overlap --ranks 2                              CPU ranks, or two ranks on one GPU; it starts them itself
    torchrun --nproc-per-node 8 -m ottava bench overlap         one rank a GPU
    ottava bench overlap --model h200 --ranks 8                 on paper: nothing is run
    ottava bench overlap --beside-fsdp --trace trace.json       a training step, FSDP2's gathers beside it (`overlap_beside.py`)

For qkv, proj, fc1 and fc2 in forward, dgrad and wgrad: the collective alone, the product alone, one after the other, overlapped, what no
schedule can beat, and the share of the collective that is hidden. Then the crossing: by measurement, and by the estimate from which the
engine chooses. Outputs are compared before anything is timed, and all take turns; the median of the slowest rank counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ottava.bench import overlap_beside, report, timing
from ottava.bench.options import count
from ottava.bench.overlap_products import Case, Setting, cases
from ottava.bench.overlap_ranks import joined, start_ranks, under_launcher
from ottava.overlap.schedule import METHODS, TRANSPORTS
from ottava.overlap.transport import wrapping
from ottava.overlap.transports import transport_of
from ottava.overlap.virtual_link import VirtualLink
from ottava.plan.devices import RATE_OF_RECIPE, find_gpu
from ottava.plan.overlap_time import LLAMA3_8B, LayerShape, layer_overlap, table, total
from ottava.quant.quantization import Quantization
from ottava.train.config import PrecisionSection

SHAPES = {
    "8b": LLAMA3_8B,
    "small": LayerShape(hidden=512, qkv=768, fc1=2048, ffn=1024),
    "tiny": LayerShape(64, 96, 256, 128),
}
TOKENS = {"8b": 8192, "small": 2048, "tiny": 128}
# Overlapped against sequential: all-gathers to the bit on a CPU; sums of chunks in another order elsewhere.
LIMIT = 1e-2
COLUMNS = ("communication_ms", "gemm_ms", "sequential_ms", "overlapped_ms", "bound_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--ranks", type=count, default=None, help="tensor-parallel ranks to start here (default 2)")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default=None, help="sizes of a layer (default 8b; on a CPU small)"
    )
    parser.add_argument("--tokens", type=count, default=None, help="tokens of all ranks (default by shape)")
    parser.add_argument(
        "--method",
        choices=[m for m in METHODS if m != "none"],
        default="ring",
        help="as parallel.overlap (default ring)",
    )
    parser.add_argument(
        "--transport", choices=list(TRANSPORTS), default="auto", help="what moves the bytes (default auto)"
    )
    parser.add_argument(
        "--recipe", choices=list(RATE_OF_RECIPE), default="none", help="how operands are quantized (default none)"
    )
    parser.add_argument("--repeats", type=count, default=9, help="timed calls of each; the median counts (default 9)")
    parser.add_argument(
        "--link", type=float, default=None, metavar="MB/S", help="let the link seem to have this rate (a virtual link)"
    )
    parser.add_argument(
        "--sweep", default=None, help="numbers of tokens, with commas, for the crossing; none: leave it out"
    )
    parser.add_argument(
        "--trace", type=Path, default=None, help="Chrome/Perfetto trace of every overlapped product, of rank 0"
    )
    parser.add_argument(
        "--beside-fsdp",
        action="store_true",
        help=f"instead: a step of a small Llama, weights gathered by FSDP2 over {overlap_beside.SHARDS} times as many ranks",
    )
    parser.add_argument(
        "--model", metavar="GPU", default=None, help="print what the rates of this GPU promise, and run nothing"
    )
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="FILE",
        help="with --model: more rates, as `ottava bench gemm` writes them",
    )
    parser.add_argument(
        "--output", type=Path, default=None, help="JSON (default benchmarks/results/overlap-DEVICE-SHAPE.json)"
    )


def run(options: argparse.Namespace) -> int:
    """Starts the ranks, or is one of those that a launcher has started."""
    cuda = torch.cuda.is_available()
    options.shape = options.shape or ("8b" if cuda or options.model else "small")
    options.tokens = options.tokens or TOKENS[options.shape]
    try:
        if options.model is not None:
            return _print_model(options)
        if options.beside_fsdp:
            return _beside_fsdp(options)
        size = int(os.environ["WORLD_SIZE"]) if under_launcher() else options.ranks or 2
        sweep = _sweep(options, size)
        if size < 2:
            raise ValueError("one rank has no collectives: --ranks 2, or torchrun --nproc-per-node 2.")
        for tokens in (options.tokens, *sweep):
            if tokens % (size * 32):  # blocks of 32 and of 128 may not cross ranks, and pieces should be equal
                raise ValueError(f"{tokens} tokens cannot be cut for {size} ranks: take a multiple of {32 * size}.")
    except ValueError as error:
        print(f"ottava bench overlap: {error}", file=sys.stderr)
        return 2
    if under_launcher():
        with joined() as device:
            return measure(options, sweep, device)
    return start_ranks(size, measure, options, sweep)


def _beside_fsdp(options: argparse.Namespace) -> int:
    shards = overlap_beside.SHARDS
    if not under_launcher():
        return start_ranks(shards * (options.ranks or 2), overlap_beside.measure, options)
    world = int(os.environ["WORLD_SIZE"])
    options.ranks = options.ranks or world // shards
    if options.ranks < 2 or options.ranks * shards != world:
        raise ValueError(
            f"--beside-fsdp needs {shards} x --ranks processes, and --ranks 2 or more; the launcher has started {world}."
        )
    with joined() as device:
        return overlap_beside.measure(options, device)


def _sweep(options: argparse.Namespace, size: int) -> list[int]:
    if options.sweep == "none":
        return []
    if options.sweep is None:
        return [t for t in (options.tokens >> n for n in (6, 4, 2)) if t % (size * 32) == 0]
    return [int(word) for word in options.sweep.split(",")]


def _print_model(options: argparse.Namespace) -> int:
    gpu, size = find_gpu(options.model, options.table), options.ranks or 8
    kind = RATE_OF_RECIPE[options.recipe]
    if kind not in gpu.gemm_tflops:
        raise ValueError(f"the table has no rate of {options.recipe} on {gpu.name}: it would be emulated.")
    rows = layer_overlap(gpu, SHAPES[options.shape], options.tokens, size, kind, 2.0 if kind == "bf16" else 1.0)
    found = total(rows)
    print(f"{size} x {gpu.name}, {options.shape}, {options.tokens} tokens, {kind} ({gpu.source}):\n\n{table(rows)}\n")
    print(
        f"hidden: {found.hidden_share:.0%} of communication; {found.sequential * 1e3:.2f} -> {found.overlapped * 1e3:.2f} ms"
    )
    return 0


# ------------------------------------------------------------------------------------------------------------- in every rank


def measure(options: argparse.Namespace, sweep: list[int], device: torch.device) -> int:
    """Checks and times; rank 0 prints and writes."""
    setting = _setting(options, device)
    with ExitStack() as stack:
        if options.link is not None:
            rate = options.link * 1e6
            stack.enter_context(wrapping(lambda transport: VirtualLink(transport, rate)))
        carrier = transport_of(None, options.transport, device)
        if carrier is None:
            _say(
                f"ottava bench overlap: nothing can carry messages between these ranks ({dist.get_backend()}).",
                error=True,
            )
            return 1
        _say(
            f"{setting.size} ranks, {options.shape}, {options.tokens} tokens, {options.recipe}, {options.method}, {carrier.name}; ms\n"
        )
        _say(
            f"{'':14}{'collective':29}{'method':10}"
            + "".join(f"{name.removesuffix('_ms'):>15}" for name in COLUMNS)
            + f"{'hidden':>8}  chosen"
        )
        rows = [_row(case, options.repeats, device) for case in cases(setting)]
        crossing = _crossing(setting, sweep, options.repeats, device)
        if options.trace is not None:
            _trace(setting, options.trace)
    if dist.get_rank() == 0:
        document = {
            "shape": dataclasses.asdict(setting.shape), "ranks": setting.size, "tokens": options.tokens, "method": options.method,
            "recipe": options.recipe, "transport": carrier.name, "link_mb_per_s": options.link,
            "results": rows, "crossing": crossing,
        }  # fmt: skip
        path = options.output or report.default_path("overlap", f"{options.shape}-{setting.size}")
        report.write(path, "overlap", document)
        print(f"wrote {path}")
    return 0


def _setting(options: argparse.Namespace, device: torch.device) -> Setting:
    made = PrecisionSection(recipe=options.recipe).make_recipe()
    # On a CPU bf16 products are emulated and fifty times slower than float32.
    dtype = torch.bfloat16 if device.type == "cuda" or made is not None else torch.float32
    gloo_on_gpu = device.type == "cuda" and "nccl" not in dist.get_backend_config()
    return Setting(
        dist.group.WORLD, device, dtype, SHAPES[options.shape], options.tokens, options.method, options.transport,
        None if made is None else Quantization.of(made), by_transport=options.link is not None or gloo_on_gpu,
    )  # fmt: skip


def _say(text: str, error: bool = False) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True, file=sys.stderr if error else sys.stdout)


def check(case: Case) -> float:
    """The largest relative error of overlapped against sequential; SystemExit if it is too large."""
    if case.sequential is None or case.overlapped is None:
        return 0.0
    worst = 0.0
    for ours, expected in zip(case.overlapped(), case.sequential(), strict=True):
        difference = (ours.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)
        worst = max(worst, float(difference))
    if not worst <= LIMIT:
        raise SystemExit(f"bench overlap: {case.name} is wrong: relative error {worst:.4f} (limit {LIMIT}).")
    return worst


def meet() -> None:
    """Returns when all ranks are here. Over gloo, whatever carries tensors of a GPU."""
    dist.all_reduce(torch.zeros(1, dtype=torch.float32))


def slowest(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call that all ranks begin together: of the rank that ends last."""
    timing.wait()
    meet()
    begin = time.perf_counter()
    work()
    timing.wait()
    took = torch.tensor((time.perf_counter() - begin) * 1e3, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def medians(works: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds by name. All take turns, so that a machine that is busy for a while slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-1, repeats):  # the first warms up
        for name, work in works.items():
            took = slowest(work, device)
            if turn >= 0:
                times[name].append(took)
    return {name: timing.median(found) for name, found in times.items()}


def _row(case: Case, repeats: int, device: torch.device) -> dict[str, Any]:
    error = check(case)
    works: dict[str, Callable[[], Any]] = {"gemm_ms": case.multiply}
    if case.communicate is not None and case.sequential is not None and case.overlapped is not None:
        works |= {
            "communication_ms": case.communicate,
            "sequential_ms": case.sequential,
            "overlapped_ms": case.overlapped,
        }
    row: dict[str, Any] = {
        "product": case.product,
        "direction": case.direction,
        "collective": case.collective,
        "method": case.method,
    }
    row |= medians(works, repeats, device)
    if "communication_ms" in row:
        row["bound_ms"] = max(row["communication_ms"], row["gemm_ms"])
        row["hidden_share"] = min(
            (row["gemm_ms"] + row["communication_ms"] - row["overlapped_ms"]) / row["communication_ms"], 1.0
        )
        row |= {"bytes_sent": case.bytes_sent, "relative_error": error}
    if case.choice is not None:
        row |= {"chosen": case.choice.method, "why": case.choice.why, "crossing_tokens": case.crossing}
    elif case.collective:
        row["chosen"] = case.method  # a product that is not cut costs nothing
    cells = "".join(f"{row[name]:15.3f}" if name in row else f"{'-':>15}" for name in COLUMNS)
    share = f"{row['hidden_share']:8.0%}" if "hidden_share" in row else f"{'-':>8}"
    _say(f"{case.name:14}{case.collective:29}{case.method:10}{cells}{share}  {row.get('chosen', '-')}")
    return row


def _crossing(setting: Setting, sweep: list[int], repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """For products that are cut: measured at each number of tokens, and what the engine chooses there."""
    found: list[dict[str, Any]] = []
    for tokens in sorted({*sweep, setting.tokens}) if sweep else []:
        for case in cases(dataclasses.replace(setting, tokens=tokens), directions=("forward",)):
            if case.method in ("none", "") or case.sequential is None or case.overlapped is None or case.choice is None:
                continue
            works: dict[str, Callable[[], Any]] = {"sequential_ms": case.sequential, "overlapped_ms": case.overlapped}
            found.append({"product": case.product, "tokens": tokens, **medians(works, repeats, device), "chosen": case.choice.method,
                          "estimated_crossing": case.crossing})  # fmt: skip
    if found:
        _say(
            f"\n{'crossing':14}{'tokens':>10}{'sequential':>15}{'overlapped':>15}  the engine chooses (cut from, by estimate)"
        )
    for row in sorted(found, key=lambda row: row["product"]):
        estimate = "never" if row["estimated_crossing"] is None else f"{row['estimated_crossing']} tokens"
        _say(
            f"{row['product']:14}{row['tokens']:10}{row['sequential_ms']:15.3f}{row['overlapped_ms']:15.3f}  {row['chosen']} ({estimate})"
        )
    return found


def _trace(setting: Setting, path: Path) -> None:
    """One call of every overlapped product, under the names of the table."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setting.device.type == "cuda" else [])
    with profile(activities=kinds) as seen:
        for case in cases(setting):
            if case.overlapped is not None:
                meet()
                with record_function(f"{case.name}: {case.collective}, {case.method}"):
                    case.overlapped()
                    timing.wait()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path))
        ranges = sum(
            "ottava.overlap." in str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]
        )
        print(f"wrote {path}: {ranges} ranges of overlap; open it in ui.perfetto.dev or chrome://tracing")
