"""`ottava bench kernels`: every kernel that is bound by memory, against the rate of a plain copy in the same run.

A kernel's bytes are those of the tensors it is given and of those it returns, each counted once: what a perfect kernel would move.
Each is first compared with the reference on the CPU, byte by byte where numerics.md fixes bytes, at a number of rows that does not
divide tiles as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ottava.bench import report, timing
from ottava.bench.gates import GATE_FAILED
from ottava.bench.options import count, counts
from ottava.kernels import activation, cast, grid, head_loss, many, norm, residual, rope
from ottava.optimizers import FusedAdam
from ottava.quant.scheme import Scheme
from ottava.recipe import DelayedScaling, Float8BlockScaling

LARGE = 400e6
"""Bytes from which a kernel is expected at 80% of the copy's rate; below, at 65%."""
SHARES = (0.80, 0.65)
CHECKED_ROWS = (256, 200)


@dataclass(frozen=True)
class Sizes:
    """Of the tensors, besides their rows."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256


SMALL = Sizes(hidden=128, ffn=256, heads=4, kv_heads=2, vocabulary=512)


@dataclass(frozen=True)
class Case:
    """A kernel: `run(*inputs(rows, device))`. exact: its result has the reference's bytes; else it is near it."""

    name: str
    inputs: Callable[[int, str], tuple[Any, ...]]
    run: Callable[..., Any]
    exact: bool = True


def _random(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same numbers for every device."""
    generator = torch.Generator().manual_seed(sum(shape))
    if device == "cpu":
        return torch.randn(*shape, dtype=torch.float32, generator=generator).to(dtype)
    if len(shape) > 1 and shape[0] > max(CHECKED_ROWS):  # to be timed, not compared
        return torch.randn(*shape, device=device, dtype=dtype)
    return torch.randn(*shape, dtype=torch.float32, generator=generator).to(dtype).to(device)


def cases(sizes: Sizes) -> Iterator[Case]:
    """All of them."""
    yield from _quantizing(sizes)
    yield from _others(sizes)
    yield Case("cross-entropy and its gradient", *_loss(sizes), exact=False)
    yield Case("FusedAdam", *_adam(sizes), exact=False)


def _loss(sizes: Sizes) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Logits are read, and their gradient takes their place; what is read a second time should come from the cache."""
    terms = head_loss.Terms(0, sizes.vocabulary, sizes.vocabulary, -100, 0.0, 0.0)

    def inputs(rows: int, device: str) -> tuple[Any, ...]:
        targets = torch.arange(rows, device=device) * 7 % sizes.vocabulary
        return _random(rows, sizes.vocabulary, device=device), targets

    def run(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return head_loss.loss_fused_(logits, targets, *terms), logits

    return inputs, run


def _adam(sizes: Sizes) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """float32 weights, gradients and moments: 28 bytes a weight."""

    def inputs(rows: int, device: str) -> tuple[Any, ...]:
        weight = torch.nn.Parameter(_random(rows, sizes.hidden, device=device, dtype=torch.float32))
        weight.grad = _random(rows, sizes.hidden, device=device, dtype=torch.float32)
        optimizer = FusedAdam([weight], lr=1e-3)
        optimizer.step()  # makes the moments
        state = optimizer.state[weight]
        return optimizer, weight.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"]

    def run(optimizer: FusedAdam, weight: Tensor, _: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        optimizer.step()
        return weight, first, second

    return inputs, run


def _quantizing(sizes: Sizes) -> Iterator[Case]:
    schemes = {
        "tensor": str(Scheme.of(DelayedScaling(), "input")),
        "1x128": str(Scheme.of(Float8BlockScaling(), "input")),
        "128x128": str(Scheme.of(Float8BlockScaling(), "weight")),
    }
    hidden, ffn = sizes.hidden, sizes.ffn
    for kind, scheme in schemes.items():

        def scale(device: str, kind: str = kind) -> Tensor | None:
            return torch.full((1,), 32.0, dtype=torch.float32, device=device) if kind == "tensor" else None

        def x(rows: int, device: str, scheme: str = scheme, scale: Any = scale) -> tuple[Any, ...]:
            return _random(rows, hidden, device=device), scheme, scale(device), None, True, True

        def normed(rows: int, device: str, scheme: str = scheme, scale: Any = scale) -> tuple[Any, ...]:
            gain, root = _random(hidden, device=device), _random(rows, device=device, dtype=torch.float32).abs()
            given = (
                _random(rows, hidden, device=device),
                gain,
                None,
                torch.empty(0, dtype=torch.float32, device=device),
                root,
                False,
            )
            return *given, scheme, scale(device), None, True, True

        def gated(rows: int, device: str, scheme: str = scheme, scale: Any = scale) -> tuple[Any, ...]:
            return _random(rows, 2 * ffn, device=device), "swiglu", scheme, scale(device), None, True, True

        def gradient(rows: int, device: str, gated: Any = gated) -> tuple[Any, ...]:
            return _random(rows, ffn, device=device), *gated(rows, device), False

        def both(rows: int, device: str, gradient: Any = gradient) -> tuple[Any, ...]:
            given = gradient(rows, device)
            return *given, given[3], given[4], None

        yield Case(f"cast {kind}", x, cast.quantize)
        yield Case(f"norm + cast {kind}", normed, norm.quantize)
        yield Case(f"swiglu + cast {kind}", gated, activation.quantize)
        yield Case(f"dswiglu + cast {kind}", gradient, activation.backward_quantize)
        if kind == "tensor":  # two kernels elsewhere
            yield Case(f"dswiglu + swiglu + cast {kind}", both, activation.backward_with_output)


def _others(sizes: Sizes) -> Iterator[Case]:
    hidden, channels = sizes.hidden, sizes.hidden // sizes.heads
    width = (sizes.heads + 2 * sizes.kv_heads) * channels

    def x(rows: int, device: str) -> tuple[Any, ...]:
        return (_random(rows, hidden, device=device),)

    def stats(rows: int, device: str) -> tuple[Any, ...]:
        return _random(rows, hidden, device=device), _random(hidden, device=device), None, "RMSNorm", 1e-5, False, False

    def backward(rows: int, device: str) -> tuple[Any, ...]:
        dy, root = _random(rows, hidden, device=device), _random(rows, device=device, dtype=torch.float32).abs()
        empty = torch.empty(0, dtype=torch.float32, device=device)
        return dy, _random(rows, hidden, device=device), _random(hidden, device=device), empty, root, False, False

    def biased(rows: int, device: str) -> tuple[Any, ...]:
        return (
            _random(rows, hidden, device=device),
            _random(hidden, device=device),
            _random(rows, hidden, device=device),
        )

    def qkv(rows: int, device: str) -> tuple[Any, ...]:
        angles = _random(rows, channels, device=device, dtype=torch.float32)
        return (
            _random(rows, width, device=device),
            angles,
            angles,
            None,
            1,
            rows,
            sizes.heads,
            sizes.kv_heads,
            True,
            False,
        )

    def data(rows: int, device: str) -> tuple[Any, ...]:
        return _random(rows, hidden, device=device).view(torch.uint8), str(Scheme.of(DelayedScaling(), "weight"))

    def weights(rows: int, device: str) -> tuple[Any, ...]:
        return [_random(rows // 4, hidden, device=device, dtype=torch.float32) for _ in range(4)], [], [0] * 8

    yield Case("amax", x, cast.amax)
    yield Case("amax of many weights", weights, many.amax_many)
    yield Case("transpose of bytes", data, grid.transpose)
    yield Case("norm statistics", stats, norm.stats, exact=False)
    yield Case("norm backward", backward, norm.backward, exact=False)
    yield Case("bias + residual", biased, residual.bias_residual)
    yield Case("split qkv + RoPE", qkv, rope.split_qkv, exact=False)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in a call's arguments or results, each once."""
    given = [values]
    found: dict[int, Tensor] = {}
    for value in given:  # which grows by what lies in lists
        if isinstance(value, tuple | list):
            given += value
        elif isinstance(value, Tensor) and value.numel():
            found[id(value)] = value
    return list(found.values())


def moved_bytes(inputs: Any, outputs: Any) -> int:
    """Of all tensors, each once.

    >>> moved_bytes((torch.zeros(4),), torch.zeros(4, dtype=torch.bfloat16))
    24
    """
    return sum(tensor.nbytes for tensor in (*_tensors(inputs), *_tensors(outputs)))


def _as_bytes(x: Tensor) -> Tensor:
    return x.cpu().reshape(-1).contiguous().view(torch.uint8)


def check(case: Case, device: str) -> None:
    """Raises SystemExit if the kernel's result is not the reference's."""
    for rows in CHECKED_ROWS if device != "cpu" else CHECKED_ROWS[1:]:
        expected = _tensors(case.run(*case.inputs(rows, "cpu")))
        found = _tensors(case.run(*case.inputs(rows, device)))
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if case.exact:
                same = a.dtype == b.dtype and torch.equal(_as_bytes(a), _as_bytes(b))
            else:
                same = float((a.cpu().float() - b.float()).norm() / b.float().norm()) < 0.01
            if not same:
                raise SystemExit(f"bench kernels: {case.name} differs from its reference in result {i} at {rows} rows.")


def milliseconds(run: Callable[[], Any], rounds: int, device: str) -> float:
    """Median. On a GPU the caches are emptied before each call, and the host's part hides behind that."""
    if device == "cpu":
        return timing.median(timing.step_times(run, rounds))
    sweep = torch.empty(2**30, dtype=torch.uint8, device=device)
    run()
    pairs = []
    for _ in range(rounds):
        sweep.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return timing.median([begin.elapsed_time(end) for begin, end in pairs])


def copy_rate(size: int, rounds: int, device: str) -> float:
    """Bytes/s of a plain copy of `size` bytes: read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), rounds, device) * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--rows", type=counts, default=None, help="rows of the tensors, with commas (default 8192,32768; on a CPU 200)"
    )
    parser.add_argument("--only", default="", help="kernels whose name contains this (default: all)")
    parser.add_argument("--rounds", type=count, default=30, help="timed calls of each; the median counts (default 30)")
    parser.add_argument(
        "--gate", action="store_true", help="exit with 3 if a kernel is below 80%% (65%%) of the copy's rate"
    )
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/kernels-DEVICE.json)")


def run(options: argparse.Namespace) -> int:
    """Checks, measures, prints a table and writes the JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = Sizes() if device == "cuda" else SMALL
    rows = options.rows or ([8192, 32768] if device == "cuda" else [200])
    chosen = [case for case in cases(sizes) if options.only in case.name]
    if not chosen:
        print(f"ottava bench kernels: no kernel's name contains {options.only!r}.", file=sys.stderr)
        return 2
    for case in chosen:
        check(case, device)
    rate = copy_rate(2**29 if device == "cuda" else 2**20, options.rounds, device)
    print(f"copy {rate / 1e9:.0f} GB/s\n{'kernel':32}{'rows':>7}{'MB':>8}{'ms':>9}{'GB/s':>8}{'of copy':>9}")
    results = [measure(case, each, rate, options.rounds, device) for case in chosen for each in rows]
    for row in results:
        print(
            f"{row['kernel']:32}{row['rows']:7}{row['bytes'] / 1e6:8.0f}{row['ms']:9.4f}{row['gb_per_s']:8.0f}{row['share']:9.2f}"
            + ("" if row["reached"] or device == "cpu" else f"  below {row['bar']:.0%}")
        )
    path = options.output or report.default_path("kernels")
    report.write(path, "kernels", {"copy_gb_per_s": rate / 1e9, "results": results})
    print(f"wrote {path}")
    return GATE_FAILED if options.gate and not all(row["reached"] for row in results) else 0


def measure(case: Case, rows: int, copy: float, rounds: int, device: str) -> dict[str, Any]:
    """One line of the table. copy: bytes/s."""
    inputs = case.inputs(rows, device)
    size = moved_bytes(inputs, case.run(*inputs))
    ms = milliseconds(lambda: case.run(*inputs), rounds, device)
    rate = size / ms * 1e3
    bar = SHARES[0] if size >= LARGE else SHARES[1]
    return {
        "kernel": case.name, "rows": rows, "bytes": size, "ms": ms, "gb_per_s": rate / 1e9, "share": rate / copy, "bar": bar,
        "reached": rate / copy >= bar,
    }  # fmt: skip
