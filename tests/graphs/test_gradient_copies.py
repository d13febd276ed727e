"""Gradients that a replay overwrites are copied in few operations; the copies are tensors like any others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottava.graphs import gradient_copies
from ottava.graphs.gradient_copies import ALIGNMENT, GradientCopies


def _gradients() -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        made(4, 8),  # of an input
        made(16, 8),
        made(3, 8),
        None,
        made(16),
        made(8),
        made(16, 8, dtype=torch.bfloat16),
        made(7),  # 28 bytes: what came after it would not be aligned
        made(8, 16).t(),
        made(),
        made(0, 8),
    ]


def test_copies_have_the_values_and_strides_and_an_aligned_address() -> None:
    gradients = _gradients()
    copies = GradientCopies(gradients, [True] * len(gradients), apart=1)
    found = copies()
    for gradient, copy in zip(gradients, found, strict=True):
        if gradient is None:
            assert copy is None
            continue
        assert copy is not None and torch.equal(gradient, copy) and copy.dtype == gradient.dtype
        assert copy.stride() == gradient.stride() and copy.data_ptr() % ALIGNMENT == 0
        assert copy.numel() == 0 or copy.data_ptr() != gradient.data_ptr()
        assert not copy._is_view()
    again = copies()
    assert again[1].data_ptr() != found[1].data_ptr()
    gradients[1].zero_()
    assert found[1].any() and again[1].any() and not copies()[1].any()


def test_rows_of_one_width_share_memory_and_inputs_have_their_own() -> None:
    gradients = _gradients()
    found = GradientCopies(gradients, [True] * len(gradients), apart=1)()
    storages = [None if copy is None else copy.untyped_storage().data_ptr() for copy in found]
    assert storages[1] == storages[2] and storages[4] == storages[5]
    others = [storages[i] for i in (0, 1, 4, 6, 7, 8, 9)]
    assert len(set(others)) == len(others)


def test_what_need_not_be_copied_is_handed_out_itself() -> None:
    gradients = _gradients()
    found = GradientCopies(gradients, [False] * len(gradients), apart=1)()
    assert all(a is b for a, b in zip(gradients, found, strict=True))


def test_one_concatenation_stays_within_the_size_that_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_copies, "LARGEST", 100)
    gradients: list[Tensor | None] = [torch.full((rows, 4), float(rows)) for rows in (8, 16, 4, 64, 8)]
    found = GradientCopies(gradients, [True] * 5, apart=0)()
    assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))
    storages = [copy.untyped_storage().data_ptr() for copy in found]
    assert storages[0] == storages[1] and len(set(storages)) == 4
