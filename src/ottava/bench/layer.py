"""`ottava bench layer`: forward + backward of Llama-shaped layers, by recipe.

Outputs are checked in the same run, before anything is timed: Ottava's bf16 layer against the same layer written in plain torch
operations, every quantized recipe against Ottava's bf16 one, and all gradients for being finite.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava import recipe
from ottava.bench import report

RECIPES: dict[str, recipe.Recipe | None] = {
    "bf16": None,
    "DelayedScaling": recipe.DelayedScaling(),
    "Float8CurrentScaling": recipe.Float8CurrentScaling(),
    "Float8BlockScaling": recipe.Float8BlockScaling(),
}
# Largest relative error of what the layers add to their input (the residual stream itself would hide it) that still counts as
# right: bf16 against plain torch, FP8 against bf16. E4M3 keeps 4 significant bits, so each product is 2-4% off.
LIMITS = {"bf16": 0.02, "DelayedScaling": 0.15, "Float8CurrentScaling": 0.15, "Float8BlockScaling": 0.15}


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the batch."""

    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    batch: int = 1
    sequence: int = 8192


SMALL = Shape(layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, batch=1, sequence=128)


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


def _milliseconds(run: Callable[[], Any], repeats: int, cuda: bool) -> list[float]:
    times = []
    for _ in range(repeats):
        if cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def measure(model: Layers, x: Tensor, dy: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds and peak GiB by recipe."""
    cuda = x.is_cuda
    rows: dict[str, dict[str, float]] = {}
    for name, chosen in RECIPES.items():
        for _ in range(3 if cuda else 1):
            _step(model, x, dy, chosen)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times = _milliseconds(lambda chosen=chosen: _step(model, x, dy, chosen), repeats, cuda)  # type: ignore[misc]
        rows[name] = {"ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}
        if cuda:
            rows[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return rows


def _profile(model: Layers, x: Tensor, dy: Tensor, name: str) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        for _ in range(2):
            _step(model, x, dy, RECIPES[name])
        torch.cuda.synchronize()
    return run.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70)


def _count(text: str) -> int:
    """A command-line number that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--batch", type=_count, default=1, help="sequences in a batch (default 1)")
    parser.add_argument(
        "--sequence", type=_count, default=None, help="tokens in a sequence (default 8192, on a CPU 128)"
    )
    parser.add_argument("--repeats", type=_count, default=10, help="timed steps; the median counts (default 10)")
    parser.add_argument(
        "--recompute", choices=("none", "selective"), default="none", help="recompute norm and activation outputs"
    )
    parser.add_argument("--profile", metavar="RECIPE", choices=list(RECIPES), help="print the kernels of two steps")
    parser.add_argument(
        "--output", type=Path, default=None, help="JSON file (default benchmarks/results/layer-DEVICE.json)"
    )


def run(options: argparse.Namespace) -> int:
    """Checks, measures, prints a table and writes the JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.profile and device == "cpu":
        print("ottava bench layer: --profile lists GPU kernels, and there is no GPU here.", file=sys.stderr)
        return 2
    shape = Shape() if device == "cuda" else SMALL
    shape = Shape(**{**asdict(shape), "batch": options.batch, "sequence": options.sequence or shape.sequence})
    torch.manual_seed(0)
    model = Layers(shape, device, options.recompute)
    x = torch.randn(shape.sequence, shape.batch, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)
    errors = check(model, shape, x, dy)
    rows = measure(model, x, dy, options.repeats)
    where = report.machine()["device"]
    print(
        f"{shape.layers} layers, hidden {shape.hidden}, ffn {shape.ffn}, {shape.batch}x{shape.sequence} tokens, on {where}"
    )
    print(f"{'recipe':24}{'ms':>9}{'min':>9}{'max':>9}{'peak GiB':>10}{'rel. error':>12}")
    for name, row in rows.items():
        row["relative_error"] = errors[name]
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else "-"
        print(f"{name:24}{row['ms']:9.2f}{row['min_ms']:9.2f}{row['max_ms']:9.2f}{peak:>10}{errors[name]:12.4f}")
    if options.profile:
        print(_profile(model, x, dy, options.profile))
    slug = str(where).lower().replace(" ", "-")
    name = f"layer-{slug}-{shape.batch}x{shape.sequence}" + ("-recompute" if options.recompute != "none" else "")
    path = options.output or Path("benchmarks/results") / f"{name}.json"
    report.write(path, "layer", {"shape": asdict(shape), "recompute": options.recompute, "results": rows})
    print(f"wrote {path}")
    return 0
