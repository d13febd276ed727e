"""Which of torch's attention kernels may run on a GPU: what the user has switched off, or put in order, holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ottava.kernels import attention as kernel
from ottava.kernels import attention_backend as backends

CUDNN, FLASH, EFFICIENT, MATH = backends.CUDNN_FIRST


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SDPBackend]:
    """The kernels that torch was allowed, in its order, when attention was last called."""
    found: list[SDPBackend] = []
    real = F.scaled_dot_product_attention

    def look(*args: Any, **kwargs: Any) -> Any:
        order = torch._C._get_sdp_priority_order()
        found[:] = sorted(backends.allowed(backends.CUDNN_FIRST), key=lambda kind: order.index(int(kind)))
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    return found


def attend() -> torch.Tensor:
    """As on a GPU, by torch's kernels for a CPU."""
    q, k, v = torch.randn(3, 8, 2, 4, 16)
    return kernel._fused(q, k, v, 0.25, True, False, None, None, 0.0)


def test_cudnn_comes_first(seen: list[SDPBackend]) -> None:
    attend()
    assert seen == [CUDNN, FLASH, EFFICIENT, MATH]
    with backends.attention_backend("flash"):
        attend()
    assert seen == [FLASH, CUDNN, EFFICIENT, MATH]


@pytest.mark.parametrize("allowed", [[MATH], [FLASH, MATH], [EFFICIENT, CUDNN, MATH]])
def test_what_sdpa_kernel_allows(seen: list[SDPBackend], allowed: list[SDPBackend]) -> None:
    with sdpa_kernel(allowed):
        attend()
    assert set(seen) == set(allowed) and (CUDNN not in seen or seen[0] is CUDNN)
    attend()
    assert seen == [CUDNN, FLASH, EFFICIENT, MATH]  # torch's own order is what it was
    with sdpa_kernel(allowed, set_priority=True):
        attend()
    assert seen == allowed


def test_a_kernel_that_is_switched_off_stays_off(seen: list[SDPBackend]) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        attend()
        assert seen == [FLASH, EFFICIENT, MATH] and not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("asked", ["auto", "flash4"])
def test_flash4_does_not_replace_a_kernel_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(backends, "flash4_fits", lambda *tensors: True)
    monkeypatch.setattr(backends, "flash4", lambda: object())
    q = torch.empty(1, 4, backends.FLASH4_QUERIES, 64, device="meta")
    with backends.attention_backend(asked):
        assert backends.dense_kernels(q, q, q, True, False) is None
        with sdpa_kernel(MATH):
            assert backends.dense_kernels(q, q, q, True, False) == ([MATH] if asked == "auto" else None)


@pytest.mark.parametrize("allowed", [None, MATH])
def test_compiled_code_asks_when_it_is_traced(allowed: SDPBackend | None) -> None:
    order = torch._C._get_sdp_priority_order()
    with nullcontext() if allowed is None else sdpa_kernel(allowed):
        torch.manual_seed(0)
        want = attend()
        torch.manual_seed(0)
        got = torch.compile(attend, fullgraph=True, backend="eager")()
    torch.testing.assert_close(got, want)
    assert torch._C._get_sdp_priority_order() == order
