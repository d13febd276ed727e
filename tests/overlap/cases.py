"""Layers on tensor-parallel ranks with their collectives under their products, beside the same layers without: what ranks run.

`compare(case)` gives, for each tensor of a step, the largest difference and whether every bit is equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ottava
from distributed.tp_ranks import ALL_RECIPES
from ottava.nn.options import OverlapOptions
from ottava.overlap import VirtualLink, measuring, wrapping

HIDDEN = 256
GROUPS = 2


@dataclass(frozen=True)
class Case:
    """One layer, one recipe, one schedule."""

    kind: str
    """ "column", "row", "mlp" or "grouped column", "grouped row"."""
    recipe: str
    method: str
    bias: bool = True
    tokens: int = 256
    """Of all ranks."""
    dtype: torch.dtype = torch.float32
    steps: int = 1
    recompute: bool = False


def build(case: Case, overlap: OverlapOptions, device: str = "cpu") -> nn.Module:
    """The rank's part of the layer; the same values whatever the overlap."""
    size, group = dist.get_world_size(), dist.group.WORLD
    common: dict[str, Any] = {
        "device": device, "sequence_parallel": True, "tp_size": size, "params_dtype": case.dtype, "bias": case.bias,
    }  # fmt: skip
    mode = case.kind.split()[-1]
    layer: nn.Module
    if case.kind == "mlp":
        recompute = {"recompute": "selective"} if case.recompute else {}
        layer = ottava.LayerNormMLP(
            HIDDEN, 2 * HIDDEN, activation="swiglu", set_parallel_mode=True, **common, **recompute
        )
    elif case.kind.startswith("grouped"):
        layer = ottava.GroupedLinear(GROUPS, HIDDEN, 2 * HIDDEN, parallel_mode=mode, **common)
    else:
        layer = ottava.Linear(HIDDEN, 2 * HIDDEN, parallel_mode=mode, **common)
    layer.overlap = overlap
    layer.set_tensor_parallel_group(group)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = torch.randn(parameter.shape, generator=generator) * 0.1
            if name == "bias" and mode == "row":
                value = torch.linspace(-1, 1, parameter.numel())
            parameter.copy_(value)
    return layer


def splits_of(case: Case, rows: int) -> list[int]:
    """Rows of each group: unequal ones, multiples of the ranks."""
    first = rows // 4 // 4 * 4
    return [first, rows - first]


def run(case: Case, overlap: OverlapOptions, device: str = "cpu") -> dict[str, Tensor]:
    """Outputs and gradients of some steps."""
    layer = build(case, overlap, device)
    size = dist.get_world_size()
    rows = case.tokens // size if "row" not in case.kind else case.tokens
    features = HIDDEN // size if "row" in case.kind else HIDDEN
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    found: dict[str, Tensor] = {}
    for step in range(case.steps):
        x = torch.randn(rows, features, generator=generator) * torch.linspace(0.2, 2.0, rows)[:, None]
        x = x.to(device, case.dtype).requires_grad_()
        chosen = ALL_RECIPES[case.recipe]
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x, splits_of(case, rows)) if case.kind.startswith("grouped") else layer(x)
        weight = torch.randn(y.shape, generator=generator).to(device, case.dtype)
        (y * weight).sum().backward()
        assert x.grad is not None
        found |= {f"{step} y": y.detach(), f"{step} dx": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        found[f"d{name}"] = parameter.grad
    return found


def expected_flows(case: Case) -> set[str]:
    """What the method must have moved at least."""
    column = {
        "bulk": {"bulk_all_gather", "bulk_reduce_scatter"},
        "ring": {"ring_all_gather", "bulk_all_gather", "bulk_reduce_scatter"},
        "pipeline": {"pipelined_all_gather", "bulk_all_gather", "pipelined_reduce_scatter"},
    }
    row = {
        "bulk": set(),
        "ring": {"ring_all_gather", "pipelined_reduce_scatter"},
        "pipeline": {"pipelined_all_gather", "pipelined_reduce_scatter"},
    }
    found: set[str] = set() if "row" in case.kind else column[case.method]
    found = found if "column" in case.kind else found | row[case.method]
    # Blocks that would cross ranks: the gradient is gathered first, in high precision, and quantized after.
    crossing = "row" in case.kind and case.recipe != "none" and case.tokens // dist.get_world_size() % 128 != 0
    return found - {"ring_all_gather", "pipelined_all_gather"} if crossing else found


def options(method: str, **more: Any) -> OverlapOptions:
    return OverlapOptions(method=method, minimum_tokens=0, **more)


def compare(cases: list[Case], device: str = "cpu") -> list[tuple[Case, str, float, bool]]:
    """(case, tensor, relative error, bits are equal) of every case against the same without overlap; and that bytes were moved."""
    results = []
    for case in cases:
        expected = run(case, options("none"), device)
        with measuring() as meter:
            found = run(case, options(case.method), device)
        results += [
            (case, name, _error(found[name], value), torch.equal(found[name], value))
            for name, value in expected.items()
        ]
        results.append((case, f"moved by {sorted(meter.by_name)}", 0.0, expected_flows(case) <= set(meter.by_name)))
    return results


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


__all__ = ["Case", "VirtualLink", "compare", "options", "run", "wrapping"]
