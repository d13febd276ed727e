"""Splitting, turning and merging qkv in tiles of half heads: the bytes of the reference, also where heads fill no tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ottava.kernels import rope

pytestmark = pytest.mark.gpu
ops = torch.ops.ottava
HEADS = [(32, 8, 64), (32, 8, 128), (12, 4, 64), (3, 1, 32), (5, 5, 128)]  # queries, groups, channels


def _same(a: Tensor, b: Tensor) -> bool:
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return a.shape == b.shape and torch.equal(a.view(kind), b.view(kind))


def _on_gpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    moved: dict[int, Tensor] = {}  # one table stays one
    return tuple(moved.setdefault(id(a), a.cuda()) if isinstance(a, Tensor) else a for a in args)


@pytest.mark.parametrize("heads,groups,dim", HEADS)
@pytest.mark.parametrize("by_group", [True, False])
def test_the_bytes_of_the_reference(heads: int, groups: int, dim: int, by_group: bool) -> None:
    generator = torch.Generator().manual_seed(dim + heads)
    length, batch = 11, 3
    tokens = length * batch
    # Cosines and sines that were made on a CPU: those of two devices may differ in the last bit.
    tables = [rope.tables(torch.randn(rows, dim, generator=generator)) for rows in (length, length + 2)]
    positions = torch.randint(0, length, (tokens,), generator=generator, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        qkv = torch.randn(tokens, (heads + 2 * groups) * dim, generator=generator).to(dtype)
        grads = [torch.randn(tokens, n, dim, generator=generator).to(dtype) for n in (heads, groups, groups)]
        for keys in tables:
            for where in ((None, batch, length), (positions, 1, 1)):
                for rows in (1, batch):
                    given = (tables[0], keys, *where)
                    found = ops.split_qkv(qkv.cuda(), *_on_gpu(given), heads, groups, by_group, False, rows)
                    expected = rope._split_qkv(qkv, *given, heads, groups, by_group, False, rows)
                    assert all(map(_same, found, expected)), (dtype, where[1:], rows)
                    merged = ops.merge_qkv(*(g.cuda() for g in grads), *_on_gpu(given), by_group, False, rows)
                    assert _same(merged, rope._merge_qkv(*grads, *given, by_group, False, rows))


def test_gradients_that_lie_strided_as_attention_leaves_them() -> None:
    table = rope.tables(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    wide = torch.randn(33, 8, 3 * 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    def grads(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return wide[:, :, :64], wide[:, ::4, 64:128], wide[:, 1::4, 128:]

    args = (None, 3, 11, True, False)
    expected = rope._merge_qkv(*grads(wide), table, table, *args)
    assert _same(ops.merge_qkv(*grads(wide.cuda()), *_on_gpu((table, table)), *args), expected)


def test_a_position_beyond_the_table_is_nan() -> None:
    table = rope.tables(torch.randn(4, 64)).cuda()
    qkv = torch.randn(2, 3 * 64, device="cuda")
    positions = torch.tensor([3, 4], dtype=torch.int32, device="cuda")
    q, k, v = ops.split_qkv(qkv, table, table, positions, 1, 1, 1, 1, True, False)
    assert q[0].isfinite().all() and q[1].isnan().all() and k[1].isnan().all() and v.isfinite().all()
