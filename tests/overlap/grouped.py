"""A layer of experts whose tokens are spread over ranks, beside the same layer in one process: what ranks run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import ottava
from distributed.tp_ranks import RECIPES
from ottava.nn.options import OverlapOptions

IN, OUT, SPLITS = 256, 512, [256, 768]  # rows of each of two experts, of all ranks


def _parts(whole: Tensor, rank: int, size: int) -> Tensor:
    """A rank's rows of each expert."""
    return torch.cat([group.chunk(size)[rank] for group in whole.split(SPLITS)])


def grouped_as_one_process(recipe: str) -> dict[str, float]:
    """Relative errors of column and row experts on this rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(sum(SPLITS), n, generator=generator) for n in (IN, OUT))
    weights = [torch.randn(OUT, IN, generator=generator) * 0.1 for _ in SPLITS]
    biases = [torch.randn(OUT, generator=generator) for _ in SPLITS]
    errors: dict[str, float] = {}

    def run(layer: ottava.GroupedLinear, x: Tensor, splits: list[int], dy: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        with ottava.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = layer(x, splits)
        y.backward(dy)
        assert x.grad is not None
        return y.detach(), x.grad

    def compare(name: str, found: Tensor | None, expected: Tensor | None) -> None:
        assert found is not None and expected is not None
        errors[name] = float((found - expected).norm() / expected.norm())

    whole = ottava.GroupedLinear(2, IN, OUT, device="cpu")
    with torch.no_grad():
        for g in range(2):
            getattr(whole, f"weight{g}").copy_(weights[g])
            getattr(whole, f"bias{g}").copy_(biases[g])
    y, dx = run(whole, x, SPLITS, dy)
    local_splits = [rows // size for rows in SPLITS]
    for mode, dim in (("column", 0), ("row", 1)):
        layer = ottava.GroupedLinear(
            2, IN, OUT, device="cpu", parallel_mode=mode, sequence_parallel=True, tp_size=size, tp_group=None
        )
        layer.overlap = OverlapOptions(method="ring", minimum_tokens=0)
        layer.set_tensor_parallel_group(dist.group.WORLD)
        with torch.no_grad():
            for g in range(2):
                getattr(layer, f"weight{g}").copy_(weights[g].chunk(size, dim)[rank])
                getattr(layer, f"bias{g}").copy_(biases[g].chunk(size)[rank] if mode == "column" else biases[g])
        if mode == "column":
            columns = dy.chunk(size, 1)[rank]
            found, dfound = run(layer, _parts(x, rank, size), local_splits, columns)
            compare("column y", found, y.chunk(size, 1)[rank])
            compare("column dx", dfound, _parts(dx, rank, size))
        else:
            found, dfound = run(layer, x.chunk(size, 1)[rank], SPLITS, _parts(dy, rank, size))
            compare("row y", found, _parts(y, rank, size))
            compare("row dx", dfound, dx.chunk(size, 1)[rank])
        for g in range(2):
            weight, bias = getattr(layer, f"weight{g}"), getattr(layer, f"bias{g}")
            compare(f"{mode} weight{g}", weight.grad, getattr(whole, f"weight{g}").grad.chunk(size, dim)[rank])
            expected = getattr(whole, f"bias{g}").grad
            compare(f"{mode} bias{g}", bias.grad, expected.chunk(size)[rank] if mode == "column" else expected)
    return errors
