"""The multi-tensor Adam step and norm give what the torch ops give on a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from optimizers.test_left_out_step import left_out
from ottava import recipe
from ottava.optimizers import FusedAdam
from ottava.optimizers.gradient_norm import norm_and_scale
from ottava.quant.weight import Weight
from ottava.quant.weight_state import note_made

pytestmark = pytest.mark.gpu

BLOCKS = "float8_block128"
LR = 1e-2
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
        **({"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1} | options),
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


def assert_near(actual: Tensor, expected: Tensor, steps: int = 1) -> None:
    """Values: a CPU's float32 root may be one step off, so an update may be, of LR at most; where it nearly cancels a value of LR's size,
    that value's own rounding comes on top. bf16 and fp16 then round to a neighbour."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2.0**-22, atol=steps * 2 * 2.0**-23 * LR)
    elif expected.numel():
        assert (actual.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max() <= 1


def assert_same(name: str, actual: Tensor, expected: Tensor) -> None:
    """Moments, scales and counts: equal where a CPU fuses multiplications and additions as the kernel does, else a step off."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=2.0**-22, atol=1e-12 if name == "exp_avg_sq" else 1e-9)
    elif expected.numel():
        kind = torch.uint8 if expected.dtype == torch.uint8 else torch.int16
        apart = (actual.view(kind).int() - expected.view(kind).int()).abs()
        assert apart.max() <= 1 and (apart > 0).double().mean() < 1e-2, (name, int((apart > 0).sum()), expected.shape)


def joined(param: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The master that a bf16 parameter and its remainder stand for."""
    return ((param.view(torch.int16).int() << 16) + state["master_param"].int()).view(torch.float32)


@pytest.mark.parametrize("dtype, grad, first, second, options", COMBINATIONS)
def test_a_step_on_a_gpu_is_that_of_the_cpu(
    dtype: torch.dtype, grad: torch.dtype, first: Any, second: Any, options: dict[str, Any]
) -> None:
    (actual, states), (expected, references) = (
        run(device, dtype, grad, first, second, **options) for device in ("cuda", "cpu")
    )
    for got, want, state, reference in zip(actual, expected, states, references, strict=True):
        assert_near(got, want)
        assert sorted(state) == sorted(reference)
        for name, value in reference.items():
            if value.dtype == torch.int16:
                assert_near(joined(got, state), joined(want, reference))
            elif name == "master_param":
                assert_near(state[name], value)
            else:
                assert_same(name, state[name], value)


def test_many_steps_stay_together() -> None:
    (actual, _), (expected, _) = (
        run(device, torch.float32, torch.float32, torch.float32, torch.float32, steps=20) for device in ("cuda", "cpu")
    )
    for got, want in zip(actual, expected, strict=True):
        assert_near(got, want, steps=20)


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
    optimizer, other = (FusedAdam(p, lr=LR, master_weights=True) for p in (params, reference))
    names = kernels_of(optimizer.step)  # two steps
    assert sorted(n.split("(")[0] for n in names) == ["_adam_kernel", "_adam_kernel", "_count_kernel"], names
    other.step()
    other.step()
    for p, q in zip(params, reference, strict=True):
        assert_near(p.detach().cpu(), q.detach(), steps=2)
    assert all(optimizer.state[p]["step"].item() == 2 for p in params)


def test_the_norm_of_500_tensors_takes_three_launches_and_clips_as_torch_does() -> None:
    grads = [p.grad for p in mixed(500, "cuda")]
    grads.append(torch.randn(4001, device="cuda")[1:])  # 4 bytes into its memory
    held = [(grad, ()) for grad in grads]
    names = kernels_of(lambda: norm_and_scale(held, 1.0))
    assert sorted(n.split("(")[0] for n in names) == ["_bins_kernel", "_norm_kernel", "_partials_kernel"], names
    found = norm_and_scale(held, 1.0)
    exact = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found[1].double(), 1.0 / (exact + 1e-6), rtol=1e-6, atol=0.0)
    assert torch.equal(norm_and_scale(held, 1.0), found)  # one order, always
    assert norm_and_scale(held, 1e9)[1] == 1.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_seen(bad: float) -> None:
    grads = [torch.ones(70000, device="cuda"), torch.ones(5, device="cuda", dtype=torch.bfloat16)]
    grads[0][-1] = bad
    found = norm_and_scale([(g, ()) for g in grads], 1.0)
    torch.testing.assert_close(found[0].cpu(), torch.tensor(bad), equal_nan=True)
    torch.testing.assert_close(found[1].cpu(), torch.tensor(0.0 if bad == math.inf else bad), equal_nan=True)


def test_sums_by_bins_are_those_of_the_cpu() -> None:
    tensors = [torch.randn(n) for n in (1, 127, 65536, 65537, 200000)] + [torch.zeros(0), torch.randn(3, 5).half()]
    bins = [0, 2, 1, 0, 2, 1, 3]
    found = torch.ops.ottava.sums_of_squares([t.cuda() for t in tensors], bins, 5)
    torch.testing.assert_close(
        found.double().cpu(), torch.ops.ottava.sums_of_squares(tensors, bins, 5), rtol=1e-5, atol=0.0
    )
    assert found[4] == 0


@pytest.mark.parametrize("moments", ["float32", BLOCKS])
def test_a_weight_of_fp8_bytes_is_quantized_from_the_master_that_the_kernel_wrote(moments: str) -> None:
    by = recipe.Float8CurrentScaling()
    found = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        with ottava.quantized_model_init(recipe=by):
            layer = ottava.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, device="cpu")
        layer.to(device)
        optimizer = FusedAdam(layer.parameters(), lr=LR, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
        generator = torch.Generator().manual_seed(1)
        layer.weight.grad = torch.randn(128, 256, generator=generator).bfloat16().to(device)
        optimizer.step()
        master = optimizer.state[layer.weight]["master_param"]
        wanted = ottava.quantize(master, by, role="weight")
        assert torch.equal(layer.weight.rowwise_data, wanted.rowwise_data)
        found.append(master.cpu())
    assert_near(found[0], found[1])


def test_the_master_of_a_weight_with_an_fp8_copy_is_stepped_and_its_copy_is_old_then() -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    plain, weight = nn.Parameter(values.cuda()), nn.Parameter(Weight.mastered("w", values.cuda()))
    for param in (plain, weight):
        param.grad = torch.ones(64, 128, device="cuda")
    note_made(weight)
    FusedAdam([plain, weight], lr=LR).step()
    assert torch.equal(weight.master, plain) and not torch.equal(weight.master.cpu(), values)
    assert not weight.memory.made_from  # so `refresh` makes the copy again


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


def test_a_step_whose_scale_is_nan_is_left_out() -> None:
    left_out("cuda")
