"""RotaryPositionEmbedding and apply_rotary_pos_emb: angles, layouts, positions, mistakes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottava.nn.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb, split_qkv_rope


def angles(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """Float64 [positions, dim / 2]."""
    return positions.double()[:, None] / base ** (torch.arange(0, dim, 2).double() / dim)


def by_hand(heads: Tensor, position: Tensor, dim: int) -> Tensor:
    """heads [n, h, d] at `position` [n], rotated as complex numbers in float64."""
    d = heads.shape[-1]
    pair = torch.complex(heads[..., : dim // 2].double(), heads[..., dim // 2 : dim].double())
    turned = pair * torch.exp(1j * angles(position, dim))[:, None]
    return torch.cat([turned.real, turned.imag, heads[..., dim:d].double()], dim=-1)


def test_angles_and_offset() -> None:
    freqs = RotaryPositionEmbedding(16, device="cpu")(10, offset=3)
    assert freqs.shape == (10, 1, 1, 16) and freqs.dtype is torch.float32
    expected = angles(torch.arange(3, 13), 16)
    torch.testing.assert_close(freqs[:, 0, 0].double(), torch.cat([expected, expected], 1), rtol=1e-5, atol=1e-6)


def test_interleaved_angles_repeat_side_by_side() -> None:
    freqs = RotaryPositionEmbedding(8, interleaved=True, device="cpu")(5)[:, 0, 0]
    assert torch.equal(freqs[:, 0::2], freqs[:, 1::2])
    torch.testing.assert_close(freqs[:, 0::2].double(), angles(torch.arange(5), 8), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length,divisor", [(8, 2.0), (16, 2.0), (32, 4.0)])
def test_position_interpolation(length: int, divisor: float) -> None:
    rope = RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8, rotary_base=500.0, device="cpu"
    )
    expected = angles(torch.arange(length) / divisor, 8, 500.0)
    torch.testing.assert_close(rope(length)[:, 0, 0, :4].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_formats_agree_with_complex_rotation(percent: float) -> None:
    s, b, h, d = 6, 3, 2, 8
    dim = int(d * percent)
    freqs = RotaryPositionEmbedding(d, rotary_percent=percent, device="cpu")(10)
    t = torch.randn(s, b, h, d)
    expected = torch.stack([by_hand(t[:, i], torch.arange(s), dim) for i in range(b)], dim=1)
    torch.testing.assert_close(apply_rotary_pos_emb(t, freqs).double(), expected, rtol=1e-5, atol=1e-5)
    first = apply_rotary_pos_emb(t.transpose(0, 1), freqs, "bshd")
    torch.testing.assert_close(first.transpose(0, 1).double(), expected, rtol=1e-5, atol=1e-5)


def test_start_positions_shift_each_sequence() -> None:
    t, starts = torch.randn(4, 3, 2, 8), torch.tensor([0, 5, 2])
    freqs = RotaryPositionEmbedding(8, device="cpu")(16)
    expected = torch.stack([by_hand(t[:, i], torch.arange(4) + starts[i], 8) for i in range(3)], dim=1)
    torch.testing.assert_close(apply_rotary_pos_emb(t, freqs, "sbhd", starts).double(), expected, rtol=1e-5, atol=1e-5)


def test_packed_positions_restart_and_empty_sequences_are_fine() -> None:
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    position = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    t = torch.randn(10, 2, 8)  # two tokens more than the sequences have
    freqs = RotaryPositionEmbedding(8, device="cpu")(6)
    y = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=cu)
    torch.testing.assert_close(y[:8].double(), by_hand(t[:8], position, 8), rtol=1e-5, atol=1e-5)
    assert torch.equal(y[8:], t[8:])


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_context_parallel_ranks_hold_their_chunks(layout: str) -> None:
    size, length = 2, 8
    freqs = RotaryPositionEmbedding(8, device="cpu")(length)
    whole = torch.randn(length, 1, 2, 8)
    expected = by_hand(whole[:, 0], torch.arange(length), 8)
    chunk = length // (2 * size)
    for rank in range(size):
        mine = torch.cat([torch.arange(chunk) + rank * chunk, torch.arange(chunk) + (2 * size - 1 - rank) * chunk])
        t = whole[mine] if layout == "sbhd" else whole[mine, 0]
        cu = None if layout == "sbhd" else torch.tensor([0, length])
        y = apply_rotary_pos_emb(t, freqs, layout, cu_seqlens=cu, cp_size=size, cp_rank=rank).reshape(-1, 2, 8)
        torch.testing.assert_close(y.double(), expected[mine], rtol=1e-5, atol=1e-5)


def test_gradient_is_the_opposite_rotation() -> None:
    freqs = RotaryPositionEmbedding(6, device="cpu")(5)
    t = torch.randn(5, 2, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_pos_emb(x, freqs), (t,))


def test_split_of_a_packed_projection_uses_packed_positions() -> None:
    cu = torch.tensor([0, 2, 5])
    freqs = RotaryPositionEmbedding(8, device="cpu")(4)
    qkv = torch.randn(5, (2 + 2) * 8)
    q, k, v = split_qkv_rope(qkv, 2, 1, by_group=False, tensor_format="thd", freqs=(freqs, freqs), cu_seqlens=cu)
    position = torch.tensor([0, 1, 0, 1, 2])
    torch.testing.assert_close(q.double(), by_hand(qkv[:, :16].view(5, 2, 8), position, 8), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k.double(), by_hand(qkv[:, 16:24].view(5, 1, 8), position, 8), rtol=1e-5, atol=1e-5)
    assert torch.equal(v, qkv[:, 24:].view(5, 1, 8))


def test_mistakes_are_named() -> None:
    freqs = RotaryPositionEmbedding(8, device="cpu")(4)
    t = torch.randn(5, 1, 2, 8)
    with pytest.raises(ValueError, match="must be even"):
        RotaryPositionEmbedding(10, rotary_percent=0.5)
    with pytest.raises(ValueError, match="5 positions"):
        apply_rotary_pos_emb(t, freqs)
    with pytest.raises(ValueError, match="position 6 is used"):
        apply_rotary_pos_emb(t[:4], freqs, start_positions=torch.tensor([3]))
    with pytest.raises(ValueError, match="'sdbh'"):
        apply_rotary_pos_emb(t[:4], freqs, "sdbh")
    with pytest.raises(ValueError, match="cu_seqlens"):
        apply_rotary_pos_emb(t[:4, 0], freqs, "thd")
    with pytest.raises(ValueError, match="does not fit a tensor"):
        apply_rotary_pos_emb(t[:4, 0], freqs)
    with pytest.raises(ValueError, match="do not fit heads of 4"):
        apply_rotary_pos_emb(t[:4, ..., :4], freqs)
    with pytest.raises(ValueError, match="context parallelism"):
        apply_rotary_pos_emb(t[:4], freqs, start_positions=torch.tensor([0]), cp_size=2)
