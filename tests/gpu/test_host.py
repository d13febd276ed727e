"""Launches that are prepared once and replayed, and modules that call their ops as plain functions, give the same bytes every time."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava.kernels import registry
from quant_cases import QUANTIZING, all_same, casting, delayed_state, gradients, same

pytestmark = pytest.mark.gpu
ops = torch.ops.ottava


def misplaced(x: Tensor) -> Tensor:
    """x on the GPU, one element behind a 16-byte boundary, with rows that are 16 elements longer than they need to be."""
    m, k = x.shape
    memory = torch.zeros(m * (k + 16) + 1, dtype=x.dtype, device="cuda")
    moved = memory[1:].view(m, k + 16)[:, :k]
    assert moved.data_ptr() % 16
    return moved.copy_(x)


@pytest.mark.parametrize(
    "scheme", ["e4m3:tensor:f32", "e5m2:tensor", "e4m3:1x128:pow2", "e4m3:128x128:pow2", "e4m3:1x32"]
)
@pytest.mark.parametrize("shape", [(256, 512), (33, 144)])
def test_a_replayed_cast_has_the_bytes_of_the_reference(scheme: str, shape: tuple[int, int]) -> None:
    scales = torch.tensor([1.0, 3.0, 0.5, 2.0, 7.0])
    per_tensor = "tensor" in scheme
    for seed in range(3):  # the first call compiles, the next ones replay, each time with other tensors
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for place, given in ((x.cuda(), 0), (misplaced(x), 1), (x.cuda(), 3)):
            for scale, amax in ((given, None), (None, None), (None, 4.0)):
                if not per_tensor and (scale is not None or amax is not None):
                    continue
                small = [
                    None if scale is None else scales[scale : scale + 1],
                    None if amax is None else torch.tensor([amax]),
                ]
                large = [
                    None if scale is None else scales.cuda()[scale : scale + 1],
                    None if amax is None else small[1].cuda(),
                ]
                for copies in ((True, True), (True, False), (False, True)):
                    got, want = ops.quantize(place, scheme, *large, *copies), ops.quantize(x, scheme, *small, *copies)
                    assert all(same(a.cpu(), b) for a, b in zip(got, want, strict=True)), (seed, scale, amax, copies)


def test_an_amax_is_recorded_as_the_reference_does() -> None:
    history = torch.tensor([[1.0, 2.0, float("nan")], [9.0, 9.0, 9.0]])
    for amax in (1.5, 0.5, float("nan"), 3.0):
        for column in range(3):
            large = history.cuda()
            ops.record_amax_(large, torch.tensor([amax], device="cuda"), column, 0)
            ops.record_amax_(history, torch.tensor([amax]), column, 0)
            assert same(large.cpu(), history)


def test_replays_go_to_the_stream_in_force() -> None:
    """A graph captures what is launched on its stream: a launch on another one would not be in it."""
    x, scale = torch.randn(128, 256, device="cuda").bfloat16(), torch.ones(1, device="cuda")
    for _ in range(2):
        ops.quantize(x, "e4m3:tensor:f32", scale, None, True, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row = ops.quantize(x, "e4m3:tensor:f32", scale, None, True, True)[0]
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert same(row, ops.quantize(x, "e4m3:tensor:f32", scale, None, True, True)[0])


def test_who_hooks_into_launches_is_told_of_replays() -> None:
    from triton import knobs

    x, scale = torch.randn(128, 256, device="cuda").bfloat16(), torch.ones(1, device="cuda")
    ops.quantize(x, "e4m3:tensor:f32", scale, None, True, True)
    seen: list[object] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        ops.quantize(x, "e4m3:tensor:f32", scale, None, True, True)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["linear", "layernorm linear", "mlp"])
@pytest.mark.parametrize("name", [n for n in QUANTIZING if n != "nvfp4"])
def test_plain_functions_give_the_bits_of_the_ops(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"device": "cuda", "params_dtype": torch.bfloat16}
    torch.manual_seed(0)
    module = {
        "linear": lambda: ottava.Linear(128, 256, **options),
        "layernorm linear": lambda: ottava.LayerNormLinear(128, 256, **options),
        "mlp": lambda: ottava.LayerNormMLP(128, 256, activation="swiglu", **options),
    }[kind]()
    other = copy.deepcopy(module)

    def trained(one: torch.nn.Module) -> list[Tensor | None]:
        seen: list[Tensor | None] = []
        for step in range(3):
            x = torch.randn(128, 128, generator=torch.Generator().manual_seed(step)).bfloat16().cuda().requires_grad_()
            with casting(name):
                y = one(x)
            y.float().square().mean().backward()
            seen += [y, x.grad, *gradients(one)]
        return [*seen, *delayed_state(one).values()]

    plain = trained(module)
    monkeypatch.setattr(registry, "FUNCTIONS", {})  # no device is known: everything goes through the dispatcher
    assert all_same(plain, trained(other))


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_a_forward_of_a_linear_is_fewer_than_forty_python_calls(name: str) -> None:
    """Inside of an `autocast` that stands already, with everything that Python does for its launches."""
    module = ottava.Linear(256, 512, device="cuda", params_dtype=torch.bfloat16)
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    seen: list[str] = []

    def look(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")

    with casting(name):
        for _ in range(3):
            module(x).sum().backward()
        sys.setprofile(look)
        try:
            module(x)
        finally:
            sys.setprofile(None)
    assert len(seen) < 40, "\n".join(seen)
