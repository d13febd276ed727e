"""Tokens put together by expert and back, as TransformerEngine's functions do it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottava import recipe
from ottava.compat import experts
from ottava.quant.state import autocast

TOKENS, EXPERTS, HIDDEN = 6, 4, 8


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, probabilities, mask with two experts a token; expert 2 has none)."""
    torch.manual_seed(0)
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32)
    for token in range(TOKENS):
        mask[token, [token % 2, 3]] = 1
    probs = torch.rand(TOKENS, EXPERTS)
    return torch.randn(TOKENS, HIDDEN, requires_grad=True), probs.requires_grad_(), mask


def merged(x: Tensor, probs: Tensor, mask: Tensor) -> Tensor:
    return (x.unsqueeze(1) * (probs * mask).unsqueeze(-1)).sum(1)


def test_a_mask_puts_tokens_together_and_back_with_gradients() -> None:
    x, probs, mask = routed()
    out, by_row, rows = experts.moe_permute_with_probs(x, probs, mask, 2 * TOKENS)
    order = [t for e in range(EXPERTS) for t in range(TOKENS) if mask[t, e]]
    assert torch.equal(out, x[order])
    assert torch.equal(by_row, torch.cat([probs[mask[:, e] > 0, e] for e in range(EXPERTS)]))
    back = experts.moe_unpermute(out, rows, probs, x.shape)
    torch.testing.assert_close(back, merged(x, probs, mask))
    weights = torch.randn_like(back)
    found = torch.autograd.grad((back * weights).sum() + by_row.square().sum(), (x, probs), retain_graph=True)
    square = ((probs * mask) ** 2).sum()
    expected = torch.autograd.grad((merged(x, probs, mask) * weights).sum() + square, (x, probs))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(experts.moe_unpermute(experts.moe_permute(x, mask, 2 * TOKENS)[0], rows), 2 * x)
    mask[0] = 0  # a token that goes nowhere, whose probabilities were divided by their sum
    nowhere = torch.where(mask.bool(), probs, torch.nan)
    out, rows = experts.moe_permute(x, mask, 10)
    torch.testing.assert_close(experts.moe_unpermute(out, rows, nowhere), merged(x, probs, mask))
    with pytest.raises(ValueError, match="num_out_tokens=5, but routing_map has 10 entries"):
        experts.moe_permute(x, mask, 5)


def test_experts_are_filled_up_to_a_multiple() -> None:
    x, probs, mask = routed()
    counts = mask.sum(0)
    out, by_row, rows, offsets, padded = experts.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)
    assert padded.tolist() == [4, 4, 0, 8] and out.shape == (16, HIDDEN) and not out[3].any() and by_row[3] == 0
    assert offsets is not None
    torch.testing.assert_close(
        experts.moe_unpermute(out, rows, probs, x.shape, pad_offsets=offsets), merged(x, probs, mask)
    )
    same = experts.moe_permute_and_pad_with_probs(x, probs, mask, counts, 1)
    assert same[3] is None and torch.equal(same[0], experts.moe_permute(x, mask, 12)[0])


def test_indices_may_drop_the_last_tokens() -> None:
    x, _, _ = routed()
    index, probs = torch.tensor([[1, 0], [0, 2], [2, 1], [0, 1], [1, 2], [2, 0]]), torch.rand(TOKENS, 2)
    out, rows = experts.moe_permute(x, index, 0, map_type="index")
    order = index.reshape(-1).argsort(stable=True) // 2
    assert torch.equal(out, x[order])
    torch.testing.assert_close(
        experts.moe_unpermute(out, rows, probs, map_type="index"), x * probs.sum(1, keepdim=True)
    )
    assert experts.moe_unpermute(out, rows, map_type="index").shape == (2 * TOKENS, HIDDEN)
    fewer, kept = experts.moe_permute(x, index, 8, map_type="index")
    assert torch.equal(fewer, x[order[:8]])
    without_2 = (probs * (index != 2)).sum(1, keepdim=True)
    torch.testing.assert_close(experts.moe_unpermute(fewer, kept, probs, map_type="index"), x * without_2)


def test_chunks_are_sorted_and_groups_padded() -> None:
    x = torch.arange(6.0).unsqueeze(1)
    sizes, order = torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1])
    assert experts.moe_sort_chunks_by_index(x, sizes, order).flatten().tolist() == [4, 5, 0, 1, 2, 3]
    assert experts.moe_sort_chunks_by_index_with_probs(x, x[:, 0], sizes, order)[1].tolist() == [4, 5, 0, 1, 2, 3]
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        padded, splits = experts.Fp8Padding(2)(x, [2, 4])
        assert splits == [32, 32] and padded.shape == (64, 1) and padded.sum() == x.sum()
        assert torch.equal(experts.Fp8Unpadding(2)(padded, [2, 4]), x)
    assert experts.Fp8Padding(2, align_size=2)(x, [2, 4])[0] is x
    with pytest.raises(ValueError, match="must have 2 numbers"):
        experts.Fp8Padding(2)(x, [6])
