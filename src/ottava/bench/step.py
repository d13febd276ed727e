"""`ottava bench step`: whole training steps of a named model, Ottava's beside those of torch, torchao and TransformerEngine.

A step: forward, loss, backward, clipping, optimizer, FP8 copies of the weights; data in place. Ours is the loop of `ottava train`.
All start from the same weights and see the same tokens. First a plain torch model makes a few steps: every contender's losses and
first gradient norm are held against it before it is timed. Contenders do not fit side by side, so they come one after another, and
then again in the reverse order; the median is over the steps of all visits.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ottava.bench import report, timing
from ottava.bench.contenders import (
    OURS,
    PEERS,
    Contender,
    Outcome,
    Setting,
    open_contender,
    reference,
)
from ottava.bench.gates import GATE_FAILED, Gate, judge
from ottava.bench.gpu_profile import profile_step
from ottava.bench.options import count
from ottava.bench.peers import Unavailable
from ottava.bench.shapes import Workload, train_config, workloads
from ottava.models import LlamaConfig
from ottava.train.config import Config
from ottava.train.flops import Bound, device_peak
from ottava.train.listen import LOOPBACK, serve_store
from ottava.train.override import override
from ottava.train.token_file import write_token_file
from ottava.train.world import Place, World

LIMITS: dict[str | None, dict[str, float]] = {
    None: {"first_loss": 0.01, "grad_norm": 0.03, "last_loss": 0.02},
    "fp8": {"first_loss": 0.02, "grad_norm": 0.10, "last_loss": 0.04},
}
"""Largest relative difference from the plain model, by the precision of the layers' products: of the first loss, of the first
gradient norm (which, unlike the loss of small random weights, tells a wrong weight or layer; with delayed scaling of the last one,
since the first step has no scales), and of the loss after the last step that the plain model has made."""
WRONG = 1
"""Exit code where a contender's losses are."""
DOCUMENT = 1000
"""Mean length of the documents that the tokens come in, for those of ours that keep them apart (data.document_mask=true)."""


# -------------------------------------------------------------------------------------------------------------------- data


def write_tokens(path: Path, workload: Workload, steps: int) -> str:
    """Tokens for `steps` steps in a token file: rare and frequent ones as in text, so that a loss can fall."""
    vocabulary = workload.model.vocab_size or 0
    count = (steps * workload.batch + 2) * workload.length
    random = np.random.default_rng(0)
    tokens = (
        np.floor(vocabulary ** random.random(count)).astype(np.int64) - 1
    )  # the share of token i is about 1 / (i + 1)
    ends = np.cumsum(random.geometric(1 / DOCUMENT, size=2 * count // DOCUMENT + 2))
    documents = np.split(np.minimum(tokens, vocabulary - 2), ends[ends < count])
    write_token_file(path, documents, vocabulary, "none", end_token=vocabulary - 1)
    return str(path)


# ------------------------------------------------------------------------------------------------------------------- check


def check(contender: Contender, found: list[Outcome], expected: list[Outcome]) -> dict[str, float]:
    """Relative differences from the reference; raises ArithmeticError if one is above its limit or the loss does not fall."""
    limits = LIMITS[None if contender.quantized is None else "fp8"]
    last = len(expected) - 1
    # TransformerEngine's first step has no scales yet, and small gradients vanish in it.
    norm = last if contender.delayed else 0
    losses = [float(outcome.loss) for outcome in found]
    differences = {
        "first_loss": abs(losses[0] / float(expected[0].loss) - 1),
        "grad_norm": abs(float(found[norm].grad_norm) / float(expected[norm].grad_norm) - 1),
        "last_loss": abs(losses[last] / float(expected[last].loss) - 1),
    }
    for name, difference in differences.items():
        if name == "grad_norm" and contender.delayed and last == 0:
            continue  # its first step has no scales yet, and the plain model has made no other
        if not difference <= limits[name]:
            raise ArithmeticError(
                f"{name} differs from the plain model's by {difference:.2%} (limit {limits[name]:.0%}): losses {losses}, "
                f"plain {[float(o.loss) for o in expected]}; gradient norm {float(found[norm].grad_norm):.5g}, "
                f"plain {float(expected[norm].grad_norm):.5g}"
            )
    if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):
        raise ArithmeticError(f"the loss does not fall: {losses}")
    return differences


# ------------------------------------------------------------------------------------------------------------------- visits


class Entry:
    """One contender over all its visits."""

    def __init__(self, name: str, overrides: str | None) -> None:
        self.name, self.overrides = name, overrides
        self.times: list[float] = []
        self.host: list[float] = []
        self.figures: dict[str, Any] = {}
        self.quantized: str | None = None
        self.failed: str | None = None
        self.wrong = False

    def keeps_documents_apart(self, config: Config) -> bool:
        """Whether tokens see their own document only. A peer does what the configuration of all says."""
        return (config if self.overrides is None else override(config, self.overrides)).data.document_mask

    def visit(self, setting: Setting, options: argparse.Namespace, expected: list[Outcome], last: bool) -> None:
        """Builds it, checks it, times it and takes it away again. A failure is kept as its reason."""
        timing.reset_memory()
        try:
            with open_contender(self.name, self.overrides, setting) as contender:
                self._measure(contender, options, expected, last)
        except Unavailable as error:
            self.failed = str(error)
        except torch.cuda.OutOfMemoryError as error:
            self.failed = f"out of memory: {str(error).split('. ')[0]}"
        except (
            Exception
        ) as error:  # a contender's failure is a result: it is reported, with where it happened, and the others run
            self.wrong = isinstance(error, ArithmeticError)
            self.failed = f"{type(error).__name__}: {error}"
            if not self.wrong:
                traceback.print_exc()

    def _measure(self, contender: Contender, options: argparse.Namespace, expected: list[Outcome], last: bool) -> None:
        self.quantized = contender.quantized
        step = contender.step
        found = [step() for _ in range(max(len(expected), 3))]
        self.figures |= {"parameters": contender.parameters, "losses": [float(outcome.loss) for outcome in found]}
        self.figures["differences"] = check(contender, found, expected)
        for _ in range(options.warmup):
            step()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.times += timing.step_times(step, options.steps)
        self.figures |= timing.memory()
        if last:
            self.host = timing.host_times(step, 3)
            if torch.cuda.is_available():
                self._profile(contender, options)

    def _profile(self, contender: Contender, options: argparse.Namespace) -> None:
        try:
            seen = profile_step(contender.step)
        except RuntimeError as error:  # the profiler, not the contender: its figures stand
            self.figures["profile_failed"] = str(error)
            return
        self.figures |= {key: seen[key] for key in ("kernels", "launches", "busy_ms")}
        if options.profile:
            self.figures["profile"] = {key: seen[key] for key in ("kinds", "top", "gaps")}

    def result(self, workload: Workload, shape: LlamaConfig) -> dict[str, Any]:
        """Its row of the report."""
        if self.failed is not None:
            return {"failed": self.failed, **self.figures}
        ms = timing.median(self.times)
        rate = workload.tokens / ms * 1e3
        peak = device_peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        bound = Bound(peak, plain="bf16", quantized=self.quantized)
        return {
            "ms": ms, "min_ms": min(self.times), "max_ms": max(self.times), "steps": len(self.times), "tokens_per_s": rate,
            "mfu": bound.mfu(shape.flops_per_token(workload.length), rate), "host_ms": timing.median(self.host), **self.figures,
        }  # fmt: skip


def _collect() -> None:
    """What a contender leaves behind in cycles goes now, not in the middle of the next one."""
    for _ in range(
        2
    ):  # FP8 copies of weights are in cycles of their own, which a parameter holds until it is collected
        gc.collect()
    torch.compiler.reset()
    timing.reset_memory()


# ------------------------------------------------------------------------------------------------------------------ command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--shape", choices=list(workloads()), help="model and batch (default 1b; on a CPU tiny)")
    parser.add_argument(
        "--contenders",
        help=f"names, with commas: ours {', '.join(OURS)}; peers {', '.join(PEERS)} (default: bf16,current,delayed,block,torch,torchao,te)",
    )
    parser.add_argument(
        "--ours",
        action="append",
        default=[],
        metavar="[NAME:]KEYS",
        help="one more of ours: keys of `ottava train`, such as 'graph:precision.recipe=DelayedScaling,optimizer.name=fused_adam'",
    )
    parser.add_argument(
        "--all", dest="common", default="", metavar="KEYS", help="keys of `ottava train` for all of ours"
    )
    parser.add_argument(
        "--visits", type=count, default=2, help="times that each contender is built and timed (default 2)"
    )
    parser.add_argument(
        "--steps", type=count, default=10, help="timed steps of a visit; the median counts (default 10)"
    )
    parser.add_argument(
        "--warmup", type=count, default=3, help="steps after the checked ones that do not count (default 3)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="GPU time by kernel and by kind into the JSON, and printed"
    )
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        type=Gate.parse,
        metavar="[NAME:]FIGURE=VALUE",
        help="a bar: tokens_per_s, mfu or ratio_to_PEER at least, ms, host_ms, allocated_gib or reserved_gib at most; without a name "
        "for the fastest of ours. Missed: exit code 3",
    )
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/step-DEVICE-SHAPE.json)")


def _entries(options: argparse.Namespace) -> list[Entry]:
    """The contenders that are asked for. A wrong name is a ValueError."""
    names = (options.contenders or "bf16,current,delayed,block,torch,torchao,te").split(",")
    unknown = [name for name in names if name not in OURS and name not in PEERS and name != "none"]
    if unknown:
        raise ValueError(f"there is no contender {unknown[0]!r}; there are {', '.join([*OURS, *PEERS])}, none.")
    ours = {name: OURS[name] for name in names if name in OURS}
    for text in options.ours:
        name, colon, keys = text.partition(":")
        ours[name if colon else text] = keys if colon else text
    entries = [Entry(name, ",".join(filter(None, (options.common, keys)))) for name, keys in ours.items()]
    entries += [Entry(name, None) for name in names if name in PEERS]
    if not entries:
        raise ValueError("there is nobody to time: name a contender, or give --ours.")
    return entries


def run(options: argparse.Namespace) -> int:
    """Checks, measures, prints a table and writes the JSON."""
    shape_name = options.shape or ("1b" if torch.cuda.is_available() else "tiny")
    workload = workloads()[shape_name]
    store = serve_store()
    with tempfile.TemporaryDirectory(prefix="ottava-bench-") as folder:
        steps = options.steps + options.warmup + 3 + 3 + 2
        tokens = write_tokens(Path(folder) / "bench.tokens", workload, steps)
        config = train_config(workload, tokens, str(Path(folder) / "run"))
        try:
            entries = _entries(options)
            for entry in entries:
                if entry.overrides is not None:
                    override(config, entry.overrides)  # before anything runs: what is wrong is said now
        except ValueError as error:
            print(f"ottava bench step: {error}", file=sys.stderr)
            return 2
        with World(Place(0, 1, 0, 1, LOOPBACK, store.port), timeout=600.0) as world:
            if world.device.type == "cpu":
                torch.set_num_threads(1)  # products this small lose by being shared out
            setting = Setting(workload, config, Path(folder), world)
            results = measure(entries, setting, options)
    document = {"shape": shape_name, "batch": workload.batch, "sequence": workload.length, "results": results}
    return _report(document, entries, options)


def measure(entries: list[Entry], setting: Setting, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All visits, in turn forwards and backwards. {contender: figures}."""
    config = setting.config
    shape = config.model.shape(0, config.data.length)
    assert isinstance(shape, LlamaConfig)
    expected = _references(entries, setting)
    for visit in range(options.visits):
        for entry in entries if visit % 2 == 0 else entries[::-1]:
            if entry.failed is not None:
                continue
            before = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            entry.visit(
                setting, options, expected[entry.keeps_documents_apart(config)], last=visit == options.visits - 1
            )
            if torch.cuda.is_available():
                entry.figures["allocated_before_gib"] = before  # what others have left behind: should be about 0
            _collect()
            state = entry.failed or f"{timing.median(entry.times):.1f} ms"
            print(f"visit {visit + 1} of {options.visits}, {entry.name}: {state}", flush=True)
    results = {entry.name: entry.result(setting.workload, shape) for entry in entries}
    for entry in entries:
        row = results[entry.name]
        row["ours"] = entry.overrides is not None
        if entry.overrides is not None:
            row["overrides"] = entry.overrides
    _add_ratios(results)
    return results


def _references(entries: list[Entry], setting: Setting) -> dict[bool, list[Outcome]]:
    """What the plain model does, by whether it keeps documents apart: as far as a contender does."""
    expected = {}
    for apart in sorted({entry.keeps_documents_apart(setting.config) for entry in entries}):
        documents = override(setting.config, f"data.document_mask={str(apart).lower()}")
        expected[apart] = reference(replace(setting, config=documents), setting.workload.reference_steps)
        losses = ", ".join(f"{float(outcome.loss):.4f}" for outcome in expected[apart])
        print(f"plain model{', documents apart' if apart else ''}: losses {losses}", flush=True)
        _collect()
    return expected


def _add_ratios(results: dict[str, dict[str, Any]]) -> None:
    """Tokens/s of each contender over those of each peer."""
    peers = {name: row for name, row in results.items() if not row["ours"] and "ms" in row}
    for row in results.values():
        if "ms" in row:
            row["ratio_to"] = {name: row["tokens_per_s"] / peer["tokens_per_s"] for name, peer in peers.items()}


def _report(document: dict[str, Any], entries: list[Entry], options: argparse.Namespace) -> int:
    results = document["results"]
    print(table(document))
    if options.profile:
        for name, row in results.items():
            print(profile_table(name, row))
    verdicts = judge(options.gate, results)
    document["gates"] = [verdict.row() for verdict in verdicts]
    for verdict in verdicts:
        print(verdict)
    path = options.output or report.default_path("step", document["shape"])
    report.write(path, "step", document)
    print(f"wrote {path}")
    if any(entry.wrong for entry in entries):
        return WRONG
    return 0 if all(verdict.passed for verdict in verdicts) else GATE_FAILED


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(document: dict[str, Any]) -> str:
    """The results as text."""
    head = f"{document['shape']}, {document['batch']}x{document['sequence']} tokens, on {report.machine()['device']}\n"
    columns = (
        ("ms", 9, ".2f"), ("tokens_per_s", 13, ",.0f"), ("mfu", 7, ".3f"), ("allocated_gib", 14, ".2f"), ("reserved_gib", 13, ".2f"),
        ("host_ms", 9, ".1f"), ("launches", 9, "d"), ("busy_ms", 9, ".1f"),
    )  # fmt: skip
    peers = [name for name, row in document["results"].items() if not row["ours"] and "ms" in row]
    width = max([20, *(len(name) + 2 for name in document["results"])])
    lines = [f"{'':{width}}" + "".join(f"{n:>{w}}" for n, w, _ in columns) + "".join(f"{'/ ' + p:>16}" for p in peers)]
    for name, row in document["results"].items():
        if "failed" in row:
            lines.append(f"{name:{width}}{row['failed']}")
            continue
        cells = "".join(f"{_cell(row.get(n), form):>{w}}" for n, w, form in columns)
        lines.append(f"{name:{width}}{cells}" + "".join(f"{row['ratio_to'][p]:16.3f}" for p in peers))
    return head + "\n".join(lines)


def profile_table(name: str, row: dict[str, Any]) -> str:
    """GPU time by kind and by kernel, as text."""
    if "profile" not in row:
        return f"{name}: no profile ({row.get('failed') or row.get('profile_failed') or 'there is no GPU'})"
    lines = [f"{name}: {row['busy_ms']:.1f} ms in {row['kernels']} kernels"]
    lines += [f"  {k:32}{v['ms']:9.2f} ms {v['calls']:6d}" for k, v in row["profile"]["kinds"].items()]
    lines += [f"    {k['ms']:9.3f} ms {k['calls']:6d}  {k['name'][:100]}" for k in row["profile"]["top"]]
    idle = row["profile"]["gaps"]
    lines.append(f"  nothing ran for {idle['ms']:.2f} ms; longest:")
    lines += [
        f"    {g['ms']:9.3f} ms at {g['at_ms']:8.2f}  {g['after'][:45]} -> {g['before'][:45]}" for g in idle["top"]
    ]
    return "\n".join(lines)
