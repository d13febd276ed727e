"""Who looks at ops instead of running them: modes, transforms, compilers, exports, fake tensors."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ottava import torch_private


def test_transforms_active() -> None:
    assert not torch_private.transforms_active()
    seen = []
    torch.func.vmap(lambda x: seen.append(torch_private.transforms_active()) or x)(torch.ones(2))
    assert seen == [True]


def _intercepting() -> set[str]:
    names = ("dispatch_modes", "function_modes", "transforms_active", "is_tracing", "profiler_enabled")
    return {name for name in names if getattr(torch_private, name)()}


def test_who_wants_to_see_ops_is_noticed() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    assert not _intercepting()
    with FlopCounterMode(display=False):
        assert "dispatch_modes" in _intercepting()
    with TorchFunctionMode():
        assert _intercepting() == {"function_modes"}
    with torch.profiler.profile():
        assert _intercepting() == {"profiler_enabled"}
    with torch_private.fake_mode():
        assert "dispatch_modes" in _intercepting()
    seen: list[set[str]] = []
    torch.func.vmap(lambda x: seen.append(_intercepting()) or x)(torch.ones(2))
    torch.jit.trace(lambda x: seen.append(_intercepting()) or x + 1, torch.ones(2), check_trace=False)
    assert "transforms_active" in seen[0] and "is_tracing" in seen[1] and not _intercepting()


def test_is_fake() -> None:
    with FakeTensorMode():
        fake = torch.empty(2)
    assert torch_private.is_fake(fake)
    assert not torch_private.is_fake(torch.empty(2)) and not torch_private.is_fake(torch.empty(2, device="meta"))


def test_is_compiled() -> None:
    module = torch.nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    module.compile(backend="eager")
    assert torch_private.is_compiled(module)


def test_is_exporting_tells_export_from_compile() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 if torch_private.is_exporting() else 3)

    one = torch.ones(1)
    assert torch.compile(Asks(), backend="eager", fullgraph=True)(one).item() == 3
    assert torch.export.export(Asks(), (one,)).module()(one).item() == 2


def test_constant_when_traced() -> None:
    calls = []

    @torch_private.constant_when_traced
    def seen(text: str) -> int:
        calls.append(text)
        return len(text)

    compiled = torch.compile(lambda x: x * seen("abc"), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0] and compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert calls == ["abc"]  # by the tracer, once
