"""RoPE ops against float64 rotations written channel by channel; split and merge of every qkv layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ottava.kernels import rope


def turned(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """x [..., d] as complex pairs times exp(i angle), in float64; angle [rot]."""
    x, angle = x.double(), angle.double()
    rot = angle.numel()
    out = x.clone()
    for i in range(rot // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rot // 2)
        out[..., a] = x[..., a] * torch.cos(angle[a]) - x[..., b] * torch.sin(angle[a])
        out[..., b] = x[..., b] * torch.cos(angle[b]) + x[..., a] * torch.sin(angle[b])
    return out


def table(rows: int, rot: int, interleaved: bool) -> Tensor:
    half = torch.rand(rows, rot // 2) * 20
    return half.repeat_interleave(2, dim=1) if interleaved else torch.cat([half, half], dim=1)


@given(
    tokens=st.integers(0, 9),
    heads=st.integers(1, 5),
    dim=st.integers(2, 12),
    stride=st.integers(1, 3),
    interleaved=st.booleans(),
    data=st.data(),
)
def test_rotation_is_that_of_complex_numbers(
    tokens: int, heads: int, dim: int, stride: int, interleaved: bool, data
) -> None:
    rot = 2 * data.draw(st.integers(1, dim // 2))
    x = torch.randn(tokens, heads, dim)
    length = max(tokens, 1)
    freqs = table(length, rot, interleaved)
    y = rope.rope(x, freqs, None, stride, length, interleaved, False)
    for t in range(tokens):
        torch.testing.assert_close(
            y[t].double(), turned(x[t], freqs[(t // stride) % length], interleaved), rtol=1e-5, atol=1e-5
        )
    back = rope.rope(y, freqs, None, stride, length, interleaved, True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_result_is_rounded_once_to_the_input_dtype() -> None:
    x = torch.randn(6, 2, 8)
    freqs = table(6, 8, False)
    low = rope.rope(x.bfloat16(), freqs, None, 1, 6, False, False)
    exact = rope.rope(x.bfloat16().float(), freqs, None, 1, 6, False, False)
    assert torch.equal(low, exact.bfloat16())


def test_noncontiguous_input_and_given_positions() -> None:
    x = torch.randn(3, 5, 8).transpose(0, 1)  # [T=5, heads=3, 8]
    freqs = table(7, 4, True)
    positions = torch.tensor([6, 0, 3, 3, 1], dtype=torch.int32)
    y = rope.rope(x, freqs, positions, 1, 1, True, False)
    assert y.is_contiguous()
    for t in range(5):
        torch.testing.assert_close(y[t].double(), turned(x[t], freqs[positions[t]], True), rtol=1e-5, atol=1e-5)


def pieces(qkv: Tensor, heads: int, groups: int, by_group: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a fused projection, head by head."""
    slots = list(qkv.reshape(qkv.shape[0], heads + 2 * groups, -1).unbind(1))
    q, k, v = [], [], []
    if by_group:
        share = heads // groups
        for g in range(groups):
            mine = slots[g * (share + 2) : (g + 1) * (share + 2)]
            q, k, v = q + mine[:share], [*k, mine[share]], [*v, mine[share + 1]]
    else:
        q, k, v = slots[:heads], slots[heads : heads + groups], slots[heads + groups :]
    return tuple(torch.stack(p, 1) if p else qkv.new_zeros(qkv.shape[0], 0, slots[0].shape[-1]) for p in (q, k, v))


@pytest.mark.parametrize("heads,groups", [(4, 4), (4, 2), (6, 1), (0, 3)])
@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("turn", [False, True])
def test_split_and_its_gradient(heads: int, groups: int, by_group: bool, turn: bool) -> None:
    tokens, dim, length = 10, 8, 5
    qkv = torch.randn(tokens, (heads + 2 * groups) * dim, dtype=torch.float64, requires_grad=True)
    freqs_q, freqs_k = (table(length, 8, False), table(length, 4, False)) if turn else (None, None)
    args = (freqs_q, freqs_k, None, 2, length, heads, groups, by_group, False)
    q, k, v = rope.split_qkv(qkv, *args)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    expected = pieces(qkv.detach(), heads, groups, by_group)
    for got, want, freqs in zip((q, k, v), expected, (freqs_q, freqs_k, None), strict=True):
        for t in range(tokens):
            row = want[t] if freqs is None else turned(want[t], freqs[t // 2], False)
            torch.testing.assert_close(got[t].detach(), row)
    assert torch.autograd.gradcheck(lambda x: rope.split_qkv(x, *args), (qkv,))


def test_split_keeps_nothing_but_the_angles_for_backward() -> None:
    qkv = torch.randn(4, 8 * 6, requires_grad=True)
    freqs = table(4, 6, False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        q, _, v = rope.split_qkv(qkv, freqs, freqs, None, 1, 4, 4, 2, False, False)
    assert {x.data_ptr() for x in saved} == {freqs.data_ptr()}
    (q.sum() + v.sum()).backward()  # k is unused: its gradient is zero
    assert qkv.grad is not None and qkv.grad.is_contiguous()
    assert torch.equal(qkv.grad.view(4, 8, 6)[:, 4:6], torch.zeros(4, 2, 6))


@pytest.mark.parametrize("op", ["rope", "split_qkv", "merge_qkv"])
def test_ops_pass_torch_opcheck(op: str) -> None:
    freqs, positions = table(5, 4, False), torch.tensor([0, 4, 2], dtype=torch.int32)
    q, kv = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    samples = {
        "rope": (q.clone().requires_grad_(), freqs, positions, 1, 1, False, False),
        "split_qkv": (torch.randn(3, 64, requires_grad=True), freqs, None, None, 1, 5, 4, 2, True, False),
        "merge_qkv": (q, kv, kv, freqs, freqs, positions, 1, 1, False, True),
    }
    torch.library.opcheck(getattr(torch.ops.ottava, op).default, samples[op])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_tables_of_cosines_turn_as_their_angles_do(interleaved: bool, transposed: bool) -> None:
    """On a GPU all layers share one table [2, rows, rot]; the reference takes it too."""
    x = torch.randn(12, 3, 8)
    angles = torch.rand(6, 6) * 40
    by_angles = rope.rope(x, angles, None, 2, 6, interleaved, transposed)
    by_tables = rope.rope(x, rope.tables(angles), None, 2, 6, interleaved, transposed)
    torch.testing.assert_close(by_tables, by_angles, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("by_group", [False, True])
def test_splitting_to_rows_that_lie_together_is_splitting_and_a_copy(turns: bool, by_group: bool) -> None:
    length, batch, heads, groups, dim = 5, 3, 4, 2, 6
    qkv = torch.randn(length * batch, (heads + 2 * groups) * dim, requires_grad=True)
    angles = torch.rand(length, 4) if turns else None
    where = (angles, angles, None, batch, length, heads, groups, by_group, False)
    parts = [x.unflatten(0, (length, batch)).transpose(0, 1).flatten(0, 1) for x in rope.split_qkv(qkv, *where)]
    together = rope.split_qkv(qkv, *where, batch)
    grads = [torch.randn_like(x) for x in parts]
    for a, b in zip(together, parts, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
    wanted = torch.autograd.grad(parts, qkv, grads)
    assert torch.equal(torch.autograd.grad(together, qkv, grads)[0], wanted[0])
