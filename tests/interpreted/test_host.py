"""What the host does for a launch, without launching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ottava
import pretended_cuda
from ottava import torch_private
from ottava.kernels import launch
from quant_cases import casting

NOT_OURS = (pretended_cuda.__file__, __file__)


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_a_forward_of_a_linear_is_fewer_than_forty_python_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/gpu/test_host.py counts them; a launch, which is one call, does nothing."""
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *tensors: None)
    seen: list[str] = []

    def look(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename not in NOT_OURS:
            seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")

    with pretended_cuda.pretended_cuda(), casting(name):
        module = ottava.Linear(256, 512, device="cpu", params_dtype=torch.bfloat16)
        x = torch.randn(128, 256, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3):
            module(x).sum().backward()
        launches: list[Any] = []
        monkeypatch.setattr(launch.Launch, "__call__", lambda self, *tensors: launches.append(self))
        sys.setprofile(look)
        try:
            module(x)
        finally:
            sys.setprofile(None)
        assert len(launches) == {"none": 0, "delayed": 2, "current": 4, "block": 2}[name]
    assert len(seen) + len(launches) < 40, "\n".join(seen)


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_kernels_run_on_the_device_of_their_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the first GPU while the second is the current one, as `torch.cuda.set_device` or another part of the model leaves it."""
    current, launched_on = [0], list[int]()

    @contextlib.contextmanager
    def switched(device: Any) -> Iterator[None]:
        before = current[0]
        current[0] = device if isinstance(device, int) else device.index
        yield
        current[0] = before

    real = launch.Launcher.__call__

    def look(self: Any, *args: Any, **options: Any) -> Any:
        launched_on.append(current[0])
        return real(self, *args, **options)

    def losses(device: int) -> list[torch.Tensor]:
        current[0] = device
        torch.manual_seed(0)
        with pretended_cuda.pretended_cuda(), casting(name):
            monkeypatch.setattr(torch.cuda, "device", switched)
            monkeypatch.setattr(torch_private, "current_device", lambda: current[0])
            module = ottava.LayerNormMLP(128, 256, device="cpu", params_dtype=torch.bfloat16, activation="swiglu")
            optimizer = ottava.optimizers.FusedAdam(module.parameters(), lr=0.1)
            x, found = torch.randn(128, 128, dtype=torch.bfloat16), []
            for _ in range(2):
                found.append(module(x).square().mean())
                found[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            monkeypatch.undo()
        return [loss.detach() for loss in found]

    want = losses(0)
    monkeypatch.setattr(launch.Launcher, "__call__", look)
    assert all(map(torch.equal, losses(1), want))
    # A call that finds another device calls again on the right one.
    assert launched_on.count(0) >= launched_on.count(1) and launched_on[-1] == 0 and current == [1]
