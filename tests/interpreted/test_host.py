"""What the host does for a launch, without launching."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import ottava
import pretended_cuda
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
