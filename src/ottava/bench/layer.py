"""`ottava bench layer`: forward + backward of Llama-shaped layers, by recipe.

Outputs are checked in the same run, before anything is timed: Ottava's bf16 layer against the same layer written in plain torch
operations, every quantized recipe against Ottava's bf16 one, peers against the plain layers, and all gradients for being finite.
Then all take turns, a few steps at a time; the median counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava import recipe
from ottava.bench import report, timing
from ottava.bench.layer_peers import PEERS, layer_peer
from ottava.bench.options import count
from ottava.bench.shape_of_layers import SMALL, Shape

RECIPES: dict[str, recipe.Recipe | None] = {
    "bf16": None,
    "DelayedScaling": recipe.DelayedScaling(),
    "Float8CurrentScaling": recipe.Float8CurrentScaling(),
    "Float8BlockScaling": recipe.Float8BlockScaling(),
}
# Largest relative error of what the layers add to their input (the residual stream itself would hide it) that still counts as
# right: bf16 against plain torch, FP8 against bf16. E4M3 keeps 4 significant bits, so each product is 2-4% off.
LIMITS = {"bf16": 0.02, "DelayedScaling": 0.15, "Float8CurrentScaling": 0.15, "Float8BlockScaling": 0.15}


def _unit_gain(weight: Tensor) -> Tensor:
    """Outputs as large as inputs, so that each layer adds about as much as the residual stream holds."""
    return nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


class Layers(nn.Module):
    """A stack of Llama-shaped `TransformerLayer`s, bf16 parameters, [s, b, hidden]."""

    def __init__(self, shape: Shape, device: str, recompute: str = "none") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ottava.TransformerLayer(
                shape.hidden, shape.ffn, shape.heads, num_gqa_groups=shape.kv_heads, hidden_dropout=0.0, attention_dropout=0.0,
                normalization="RMSNorm", activation="swiglu", bias=False, self_attn_mask_type="causal",
                params_dtype=torch.bfloat16, device=device, layer_number=i + 1, recompute=recompute,
                init_method=_unit_gain, output_layer_init_method=_unit_gain,
            )
            for i in range(shape.layers)
        )  # fmt: skip
        self.rotary = ottava.attention.RotaryPositionEmbedding(shape.hidden // shape.heads, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, hidden]."""
        angles = self.rotary(x.shape[0])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return x


def plain_torch(model: Layers, shape: Shape, x: Tensor) -> Tensor:
    """The same layers from torch's own operations, in bf16 (on a CPU in float32): what Ottava's bf16 output is checked against."""
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    x = x.to(dtype)
    d = shape.hidden // shape.heads
    angles = model.rotary(x.shape[0])[:, 0, 0].float()  # [s, d]
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]

    def norm(h: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(h.float(), (shape.hidden,), weight.float(), 1e-5).to(h.dtype)

    def rotate(t: Tensor) -> Tensor:
        a, b = t.float().chunk(2, dim=-1)
        return (t.float() * cos + torch.cat([-b, a], dim=-1) * sin).to(t.dtype)

    def times(h: Tensor, weight: Tensor) -> Tensor:
        return h @ weight.to(dtype).t()

    layers: Any = model.layers
    for layer in layers:
        qkv, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
        h = norm(x, qkv.layer_norm_weight)
        q = times(h, qkv.query_weight).unflatten(-1, (shape.heads, d))
        k = times(h, qkv.key_weight).unflatten(-1, (shape.kv_heads, d))
        v = times(h, qkv.value_weight).unflatten(-1, (shape.kv_heads, d))
        q, k = rotate(q), rotate(k)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, heads, s, d]
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        context = context.permute(2, 0, 1, 3).flatten(-2)
        x = x + times(context, layer.self_attention.proj.weight)
        gate, up = times(norm(x, mlp.layer_norm_weight), mlp.fc1_weight).chunk(2, dim=-1)
        x = x + times(nn.functional.silu(gate) * up, mlp.fc2_weight)
    return x


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def _step(model: Layers, x: Tensor, dy: Tensor, chosen: recipe.Recipe | None) -> Tensor:
    model.zero_grad(set_to_none=True)
    x.grad = None
    with ottava.autocast(enabled=chosen is not None, recipe=chosen):
        y = model(x)
    y.backward(dy)
    return y


def check(model: Layers, shape: Shape, x: Tensor, dy: Tensor) -> dict[str, float]:
    """Relative errors of the outputs by recipe; raises if one is too large or a gradient is not finite."""
    with torch.no_grad():
        expected = plain_torch(model, shape, x).float() - x.float()
    errors: dict[str, float] = {}
    outputs: dict[str, Tensor] = {}
    for name, chosen in RECIPES.items():
        for _ in range(2):  # delayed scaling has its scales from the second step on
            outputs[name] = _step(model, x, dy, chosen).detach().float() - x.detach().float()
        errors[name] = _relative(outputs[name], expected if name == "bf16" else outputs["bf16"])
        finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        if not finite or errors[name] > LIMITS[name]:
            raise SystemExit(
                f"bench layer: {name} is wrong: relative error {errors[name]:.4f} (limit {LIMITS[name]}), gradients finite: {finite}."
            )
    return errors


def measure(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step, and of the host's part of it, by name. All take turns, two steps at a time."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        timing.step_times(run, 3 if torch.cuda.is_available() else 1)
    for _ in range(-(-repeats // 2)):
        for name, run in runs.items():
            times[name] += timing.step_times(run, min(repeats, 2))
    return {
        name: {
            "ms": timing.median(found), "min_ms": min(found), "max_ms": max(found),
            "host_ms": timing.median(timing.host_times(runs[name], 3)),
        }
        for name, found in times.items()
    }  # fmt: skip


def peak(run: Callable[[], Any], besides: int) -> dict[str, float]:
    """Peak GiB of a step, without the `besides` bytes that others hold; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    run()
    timing.reset_memory()
    run()
    torch.cuda.synchronize()
    return {"peak_gib": (torch.cuda.max_memory_allocated() - besides) / 2**30}


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _profile(model: Layers, x: Tensor, dy: Tensor, name: str) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        for _ in range(2):
            _step(model, x, dy, RECIPES[name])
        torch.cuda.synchronize()
    return run.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--batch", type=count, default=1, help="sequences in a batch (default 1)")
    parser.add_argument(
        "--sequence", type=count, default=None, help="tokens in a sequence (default 8192, on a CPU 128)"
    )
    parser.add_argument("--repeats", type=count, default=10, help="timed steps; the median counts (default 10)")
    parser.add_argument(
        "--recompute",
        choices=("none", "selective"),
        default="none",
        help="recompute norm and activation outputs in what is timed; memory is measured with and without",
    )
    parser.add_argument(
        "--peers", default=None, help=f"names, with commas, of {', '.join(PEERS)} (default: all; on a CPU none)"
    )
    parser.add_argument("--profile", metavar="RECIPE", choices=list(RECIPES), help="print the kernels of two steps")
    parser.add_argument(
        "--output", type=Path, default=None, help="JSON file (default benchmarks/results/layer-DEVICE.json)"
    )


def _wanted_peers(options: argparse.Namespace, device: str) -> list[str]:
    words = options.peers if options.peers is not None else (",".join(PEERS) if device == "cuda" else "")
    names = [name for name in words.split(",") if name and name != "none"]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"there is no peer {unknown[0]!r}; there are {', '.join(PEERS)}, none.")
    return names


def run(options: argparse.Namespace) -> int:
    """Checks, measures, prints a table and writes the JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        names = _wanted_peers(options, device)
        if options.profile and device == "cpu":
            raise ValueError("--profile lists GPU kernels, and there is no GPU here.")
    except ValueError as error:
        print(f"ottava bench layer: {error}", file=sys.stderr)
        return 2
    shape = Shape() if device == "cuda" else SMALL
    shape = Shape(**{**asdict(shape), "batch": options.batch, "sequence": options.sequence or shape.sequence})
    torch.manual_seed(0)
    model = Layers(shape, device, options.recompute)
    x = torch.randn(shape.sequence, shape.batch, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)
    errors = check(model, shape, x, dy)
    runs: dict[str, Callable[[], Any]] = {
        name: lambda chosen=chosen: _step(model, x, dy, chosen)  # type: ignore[misc]
        for name, chosen in RECIPES.items()
    }
    memory = {name: peak(step, 0) for name, step in runs.items()}
    other = _memory_of_other(model, shape, x, dy, options.recompute)
    found, failed = _open_peers(names, model, shape, x, dy, errors, memory)
    rows = measure(runs | found, options.repeats)
    for name, row in rows.items():
        row |= {**memory[name], **other.get(name, {}), "relative_error": errors[name]}
    document = {
        "shape": asdict(shape),
        "recompute": options.recompute,
        "results": {name: rows[name] for name in runs},
        "peers": {name: failed[name] if name in failed else rows[name] for name in names},
    }
    _print(document)
    if options.profile:
        print(_profile(model, x, dy, options.profile))
    size = f"{shape.batch}x{shape.sequence}" + ("-recompute" if options.recompute != "none" else "")
    path = options.output or report.default_path("layer", size)
    report.write(path, "layer", document)
    print(f"wrote {path}")
    return 0


def _memory_of_other(model: Layers, shape: Shape, x: Tensor, dy: Tensor, recompute: str) -> dict[str, dict[str, float]]:
    """Peak GiB by recipe with the other setting of recompute."""
    if not x.is_cuda:
        return {}
    other = "selective" if recompute == "none" else "none"
    twin = Layers(shape, "cuda", other)
    model.zero_grad(set_to_none=True)
    # What stands before the twin is there for both; only the model's weights are not the twin's.
    weights = sum(p.nbytes for p in model.parameters())
    return {
        name: {f"peak_gib_{other}": found["peak_gib"]}
        for name, chosen in RECIPES.items()
        for found in [peak(lambda chosen=chosen: _step(twin, x, dy, chosen), weights)]  # type: ignore[misc]
    }


def _open_peers(
    names: list[str],
    model: Layers,
    shape: Shape,
    x: Tensor,
    dy: Tensor,
    errors: dict[str, float],
    memory: dict[str, dict[str, float]],
) -> tuple[dict[str, Callable[[], Any]], dict[str, dict[str, str]]]:
    """(steps of the peers that run, reasons of those that do not). Adds their errors and memory."""
    runs: dict[str, Callable[[], Any]] = {}
    failed: dict[str, dict[str, str]] = {}
    with torch.no_grad():
        expected = plain_torch(model, shape, x).float() - x.float()
    model.zero_grad(set_to_none=True)
    for name in names:
        before = _allocated() - x.nbytes - dy.nbytes
        try:
            step, quantized = layer_peer(name, model, shape, x, dy)
            output = step().detach().float() - x.detach().float()
            errors[name] = _relative(output, expected)
            limit = LIMITS["DelayedScaling" if quantized else "bf16"]
            if not errors[name] <= limit:
                raise ArithmeticError(f"relative error {errors[name]:.4f} (limit {limit})")
            memory[name] = peak(step, before)
            runs[name] = step
        except Exception as error:  # a peer's failure is a result: it is reported, and the others run
            failed[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return runs, failed


def _print(document: dict[str, Any]) -> None:
    """The table."""
    shape = document["shape"]
    print(
        f"{shape['layers']} layers, hidden {shape['hidden']}, ffn {shape['ffn']}, {shape['batch']}x{shape['sequence']} tokens, "
        f"on {report.machine()['device']}"
    )
    print(f"{'':24}{'ms':>9}{'min':>9}{'max':>9}{'host ms':>9}{'peak GiB':>10}{'rel. error':>12}")
    for name, row in (document["results"] | document["peers"]).items():
        if "failed" in row:
            print(f"{name:24}{row['failed']}")
            continue
        gib = f"{row['peak_gib']:.2f}" if "peak_gib" in row else "-"
        print(
            f"{name:24}{row['ms']:9.2f}{row['min_ms']:9.2f}{row['max_ms']:9.2f}{row['host_ms']:9.2f}{gib:>10}"
            f"{row['relative_error']:12.4f}"
        )
