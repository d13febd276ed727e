"""The order in which torch tries its attention kernels."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ottava import torch_private

MATH, FLASH, CUDNN = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION


def test_sdpa_priority_is_what_sdpa_kernel_was_given() -> None:
    assert torch_private.sdpa_priority() is None
    with sdpa_kernel([MATH, CUDNN]):
        assert torch_private.sdpa_priority() is None
    with sdpa_kernel([MATH, CUDNN], set_priority=True):
        found = torch_private.sdpa_priority()
        assert found is not None and found[:2] == [MATH, CUDNN]
    assert torch_private.sdpa_priority() is None


def test_sdpa_in_order_leaves_what_it_found() -> None:
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel([MATH, FLASH]):
        with torch_private.sdpa_in_order([MATH, FLASH]):
            inside = torch._C._get_sdp_priority_order()
            assert inside[:2] == [int(MATH), int(FLASH)] and sorted(inside) == sorted(before)
        assert torch._C._get_sdp_priority_order() == before
