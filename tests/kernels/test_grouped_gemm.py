"""Grouped products on the CPU, and how operands are put together for a GPU."""

from __future__ import annotations

import pytest
import torch

import ottava  # noqa: F401
from ottava.kernels import grouped_gemm


@pytest.mark.parametrize("bias", [True, False])
def test_a_grouped_product_is_the_products_of_its_groups(bias: bool) -> None:
    a = list(torch.randn(40, 32).split([8, 0, 32]))
    b = [torch.randn(16, 32) for _ in a]
    added = [torch.randn(16) for _ in a] if bias else []
    out = torch.ops.ottava.grouped_mm(a, b, added, torch.float32)
    parts = [torch.ops.ottava.mm(x, y, added[g] if bias else None, torch.float32) for g, (x, y) in enumerate(zip(a, b))]
    assert torch.equal(out, torch.cat(parts))


def test_shapes_are_known_without_values() -> None:
    a, b = [torch.empty(m, 32, device="meta") for m in (8, 0, 32)], [torch.empty(16, 32, device="meta")] * 3
    assert torch.ops.ottava.grouped_mm(a, b, [], torch.bfloat16).shape == (40, 16)
    data, scale = [x.to(torch.uint8) for x in a], [torch.empty(1, device="meta")] * 3
    weights = [x.to(torch.uint8) for x in b]
    out = torch.ops.ottava.grouped_scaled_mm(
        data, scale, scale, weights, scale, scale, "e4m3:tensor", "e4m3:tensor", [], torch.bfloat16, True
    )
    assert (out.shape, out.dtype) == ((40, 16), torch.bfloat16)


def test_rows_that_follow_one_another_in_memory_are_not_copied() -> None:
    x = torch.randn(40, 32)
    for splits in ([8, 0, 32], [0, 40], [40], [0, 8, 0, 32, 0]):
        together = grouped_gemm._together(list(x.split(splits)))
        assert together.data_ptr() == x.data_ptr() and torch.equal(together, x)
    first, _, last = x.split([8, 8, 24])
    assert torch.equal(grouped_gemm._together([first, last]), torch.cat([first, last]))  # a gap
    assert torch.equal(grouped_gemm._together([last, first]), torch.cat([last, first]))  # another order
    assert torch.equal(grouped_gemm._together([first, x[8:].clone()]), x)  # another storage
    assert torch.equal(grouped_gemm._together([x[:8, :16], x[8:, :16]]), x[:, :16])  # not contiguous
    assert grouped_gemm._together(list(x[:0].split([0, 0]))).shape == (0, 32)
