"""The multi-tensor Adam step and norm give what the torch ops give on a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizers.adam_cases import ulps
from ottava.optimizers import FusedAdam

pytestmark = pytest.mark.gpu

BLOCKS = "float8_block128"
# One element, less than a block, more than a tile, rows that end inside of a block and with it, nothing, more than a chunk.
SHAPES = [(1,), (127,), (4097,), (3, 5), (2, 256), (9, 130), (), (0, 4), (300, 257), (129, 256)]
COMBINATIONS: list[tuple[torch.dtype, torch.dtype, Any, Any, dict[str, Any]]] = [
    (torch.float32, torch.float32, torch.float32, torch.float32, {}),
    (torch.float32, torch.bfloat16, torch.float32, torch.float32, {}),
    (torch.float32, torch.float16, torch.bfloat16, torch.float32, {}),
    (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16, {"bias_correction": False}),
    (torch.float32, torch.float32, BLOCKS, BLOCKS, {}),
    (torch.float32, torch.bfloat16, BLOCKS, torch.bfloat16, {"adam_w_mode": False}),
    (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, {"master_weights": True}),
    (torch.bfloat16, torch.float32, BLOCKS, BLOCKS, {"master_weights": True, "store_param_remainders": True}),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, {"master_weights": True, "betas": (0.3, 0.5)}),
    (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, {}),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, {"stochastic_rounding": True, "seed": 7}),
    (torch.bfloat16, torch.bfloat16, BLOCKS, BLOCKS, {"stochastic_rounding": True}),
    (torch.float16, torch.float16, torch.float32, torch.float32, {"adam_w_mode": False}),
]


def run(
    device: str, dtype: torch.dtype, grad: torch.dtype, first: Any, second: Any, steps: int = 1, **options: Any
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Parameters and state after some steps from the same start, on the CPU again."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(s, generator=generator) for s in SHAPES]
    params = [nn.Parameter(start.to(device, dtype)) for start in starts]
    if dtype == torch.float32:  # a view that begins 4 bytes into its memory
        base = torch.cat([torch.zeros(1), torch.randn(515, generator=generator)]).to(device)
        params.append(nn.Parameter(base[1:]))
    optimizer = FusedAdam(
        params,
        **({"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1} | options),
        exp_avg_dtype=first,
        exp_avg_sq_dtype=second,
    )
    for _ in range(steps):
        for p in params:
            value = (torch.randn(p.shape, generator=generator) * 0.1).to(device, grad)
            if grad != dtype:
                p.grad_dtype = grad
            p.grad = value
        optimizer.step(grad_scale=torch.tensor(0.7, device=device))
    states = [{k: t.cpu() for k, t in optimizer.state[p].items()} for p in params]
    return [p.detach().cpu() for p in params], states


def distance(actual: Tensor, expected: Tensor) -> int:
    """In steps of the stored numbers: bytes for uint8, float32 steps for floats."""
    if not expected.numel():
        return 0
    if expected.dtype == torch.uint8:
        return int((actual.int() - expected.int()).abs().max())
    if expected.dtype in (torch.bfloat16, torch.float16, torch.int16):
        return int((actual.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max())
    return ulps(actual, expected)


@pytest.mark.parametrize("dtype, grad, first, second, options", COMBINATIONS)
def test_a_step_on_a_gpu_is_that_of_the_cpu(
    dtype: torch.dtype, grad: torch.dtype, first: Any, second: Any, options: dict[str, Any]
) -> None:
    (actual, states), (expected, references) = (
        run(device, dtype, grad, first, second, **options) for device in ("cuda", "cpu")
    )
    for got, want, state, reference in zip(actual, expected, states, references, strict=True):
        # A CPU's float32 root may be one step off; what follows from it, too.
        assert distance(got, want) <= 2, (want.shape, distance(got, want))
        assert sorted(state) == sorted(reference)
        for name, value in reference.items():
            if value.dtype == torch.int16:  # of the masters, which are compared with the parameters
                master, wanted = (
                    (p.view(torch.int16).int() << 16) + r.int() for p, r in ((got, state[name]), (want, value))
                )
                assert not value.numel() or (master - wanted).abs().max() <= 2
            else:
                assert distance(state[name], value) <= (2 if name == "master_param" else 0), (name, want.shape)


def test_many_steps_stay_together() -> None:
    (actual, _), (expected, _) = (
        run(device, torch.float32, torch.float32, torch.float32, torch.float32, steps=20) for device in ("cuda", "cpu")
    )
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def mixed(count: int, device: str) -> list[nn.Parameter]:
    """Tensors of many sizes and two types."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(int(n),) for n in torch.randint(1, 5000, (count - 8,), generator=generator)] + [(257, 384)] * 8
    dtypes = [torch.float32, torch.bfloat16]
    params = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtypes[i % 2])) for i, s in enumerate(sizes)]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(device, p.dtype)
    return params


def kernels_of(function: Any) -> list[str]:
    """Names of the kernels that a call launches. Copies and fills by the driver are no kernels."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [n for n in names if not n.startswith(("Memcpy", "Memset"))]


def test_500_tensors_take_one_launch_for_each_kind_and_one_for_the_counts() -> None:
    params, reference = mixed(500, "cuda"), mixed(500, "cpu")
    optimizer, other = (FusedAdam(p, lr=1e-2, master_weights=True) for p in (params, reference))
    names = kernels_of(optimizer.step)  # two steps
    assert sorted(n.split("(")[0] for n in names) == ["_adam_kernel", "_adam_kernel", "_count_kernel"], names
    other.step()
    other.step()
    for p, q in zip(params, reference, strict=True):
        assert distance(p.detach().cpu(), q.detach()) <= 2
    assert all(optimizer.state[p]["step"].item() == 2 for p in params)


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0])
def test_a_scale_that_is_not_finite_does_what_it_does_on_a_cpu(scale: float) -> None:
    found = []
    for device in ("cuda", "cpu"):
        p = nn.Parameter(torch.ones(300, device=device))
        p.grad = torch.tensor([1.0, math.inf, 0.0], device=device).repeat(100)
        FusedAdam([p], lr=0.5).step(grad_scale=torch.tensor(scale, device=device))
        found.append(p.detach().cpu())
    torch.testing.assert_close(found[0], found[1], equal_nan=True)


def test_a_version_is_counted_so_that_copies_of_a_weight_are_renewed() -> None:
    p = nn.Parameter(torch.ones(300, device="cuda"))
    p.grad = torch.ones_like(p)
    before = p._version
    FusedAdam([p]).step()
    assert p._version > before


def test_a_capturable_step_replays_with_a_new_learning_rate() -> None:
    params = [nn.Parameter(torch.ones(300, 256, device="cuda"))]
    optimizer = FusedAdam(params, lr=0.5, capturable=True, exp_avg_dtype=BLOCKS, exp_avg_sq_dtype=BLOCKS)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(params[0].detach(), torch.full_like(params[0], 0.25), rtol=1e-5, atol=1e-5)
    assert optimizer.state[params[0]]["step"].item() == 2
