"""Triton versions of the ops in `rope.py`; imported only where a CUDA tensor meets them.

One program takes one token and a block of heads ("slots"), in the order they lie in qkv, so reads and writes are runs of
memory and the angles of a token are read once. Compiled without fused multiply-add: the bytes are the reference's.
The cosines and sines come from torch, as small tables [rows, rot], so that kernel and reference share them too.
A position beyond the table gives NaN, where the reference raises.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels import qkv_rope_triton
from ottava.kernels.launch import Launch, Launcher

MAX_SLOTS, WARPS = 8, 2  # heads that a program holds at once, and its warps: the fastest of those tried on an H200


@triton.jit
def _turned(here, there, cos, sin, first, turn, transposed: tl.constexpr):
    """here, there: a channel and its partner; `first`: it is the first of its pair; cos, sin as the direction needs them."""
    product = here * cos
    other = there * sin
    if transposed:  # a cos + b sin, b cos - a sin
        value = tl.where(first, product + other, product - other)
    else:  # a cos - b sin, b cos + a sin
        value = tl.where(first, product - other, product + other)
    return tl.where(turn, value, here)


@triton.jit
def _qkv_kernel(
    qkv, q, k, v, cos_q, sin_q, cos_k, sin_k, positions,
    q_token, q_head, k_token, k_head, v_token, v_head,
    seq_stride, seq_len, rows_q, rows_k, heads, groups, share, tokens, batch,
    batch_major: tl.constexpr, has_positions: tl.constexpr, turn_q: tl.constexpr, turn_k: tl.constexpr, by_group: tl.constexpr,
    interleaved: tl.constexpr, merge: tl.constexpr,
    dim: tl.constexpr, rot_q: tl.constexpr, rot_k: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """merge=False: qkv -> q, k, v, turned. merge=True: q, k, v -> qkv, turned back. Strides in elements, last is 1."""
    token = tl.program_id(0).to(tl.int64)
    slots = heads + 2 * groups
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    inside = (slot < slots) & (channel < dim)

    # which head of q, k or v a slot of qkv is
    if by_group:
        within = slot % (share + 2)
        group = slot // (share + 2)
        is_q = within < share
        is_k = within == share
        head = tl.where(is_q, group * share + within, group)
    else:
        is_q = slot < heads
        is_k = (slot >= heads) & (slot < heads + groups)
        head = tl.where(is_q, slot, tl.where(is_k, slot - heads, slot - heads - groups))
    is_v = (is_q == 0) & (is_k == 0)

    if has_positions:
        row = tl.load(positions + token).to(tl.int64)
    else:
        row = (token // seq_stride) % seq_len

    place = token  # of the token in q, k and v: as in qkv, or with the tokens of each row together
    if batch_major:
        place = token % batch * (tokens // batch) + token // batch
    flat = token * slots * dim + slot * dim
    at_q = place * q_token + head * q_head
    at_k = place * k_token + head * k_head
    at_v = place * v_token + head * v_head
    in_q, in_k, in_v = inside & is_q, inside & is_k, inside & is_v

    if merge:
        from_q = tl.load(q + at_q + channel, mask=in_q, other=0.0).to(tl.float32)
        from_k = tl.load(k + at_k + channel, mask=in_k, other=0.0).to(tl.float32)
        from_v = tl.load(v + at_v + channel, mask=in_v, other=0.0).to(tl.float32)
        x = tl.where(is_q, from_q, tl.where(is_k, from_k, from_v))  # not a sum: that would lose the sign of -0
    else:
        x = tl.load(qkv + flat + channel, mask=inside, other=0.0).to(tl.float32)

    # q and k, each by its own angles; a branch that does not turn leaves x as it is
    if turn_q:
        partner, first = _partner(channel, rot_q, interleaved)
        turn = in_q & (channel < rot_q)
        if merge:
            y = tl.load(q + at_q + partner, mask=turn, other=0.0).to(tl.float32)
        else:
            y = tl.load(qkv + flat + partner, mask=turn, other=0.0).to(tl.float32)
        sine = partner if merge else channel  # the transposed rotation takes the sine of the partner's angle
        cos = tl.load(cos_q + row * rot_q + channel, mask=(channel < rot_q) & (row < rows_q), other=float("nan"))
        sin = tl.load(sin_q + row * rot_q + sine, mask=(channel < rot_q) & (row < rows_q), other=float("nan"))
        x = _turned(x, y, cos, sin, first, turn, merge)
    if turn_k:
        partner, first = _partner(channel, rot_k, interleaved)
        turn = in_k & (channel < rot_k)
        if merge:
            y = tl.load(k + at_k + partner, mask=turn, other=0.0).to(tl.float32)
        else:
            y = tl.load(qkv + flat + partner, mask=turn, other=0.0).to(tl.float32)
        sine = partner if merge else channel
        cos = tl.load(cos_k + row * rot_k + channel, mask=(channel < rot_k) & (row < rows_k), other=float("nan"))
        sin = tl.load(sin_k + row * rot_k + sine, mask=(channel < rot_k) & (row < rows_k), other=float("nan"))
        x = _turned(x, y, cos, sin, first, turn, merge)

    if merge:
        tl.store(qkv + flat + channel, x.to(qkv.dtype.element_ty), mask=inside)
    else:
        tl.store(q + at_q + channel, x.to(q.dtype.element_ty), mask=in_q)
        tl.store(k + at_k + channel, x.to(k.dtype.element_ty), mask=in_k)
        tl.store(v + at_v + channel, x.to(v.dtype.element_ty), mask=in_v)


@triton.jit
def _partner(channel, rot: tl.constexpr, interleaved: tl.constexpr):
    """The other channel of the pair, and whether this one is the first."""
    if interleaved:
        first = channel % 2 == 0
        partner = tl.where(first, channel + 1, channel - 1)
    else:
        first = channel < rot // 2
        partner = tl.where(first, channel + rot // 2, channel - rot // 2)
    return partner, first


@triton.jit
def _rope_kernel(
    x, out, cos_table, sin_table, positions,
    x_token, x_head, seq_stride, seq_len, rows, heads,
    has_positions: tl.constexpr, interleaved: tl.constexpr, transposed: tl.constexpr,
    dim: tl.constexpr, rot: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """x [T, heads, dim] with strides x_token, x_head, 1 -> out, contiguous."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    inside = (head < heads) & (channel < dim)
    if has_positions:
        row = tl.load(positions + token).to(tl.int64)
    else:
        row = (token // seq_stride) % seq_len
    partner, first = _partner(channel, rot, interleaved)
    turn = inside & (channel < rot)
    at = token * x_token + head * x_head
    value = tl.load(x + at + channel, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + at + partner, mask=turn, other=0.0).to(tl.float32)
    sine = partner if transposed else channel
    cos = tl.load(cos_table + row * rot + channel, mask=(channel < rot) & (row < rows), other=float("nan"))
    sin = tl.load(sin_table + row * rot + sine, mask=(channel < rot) & (row < rows), other=float("nan"))
    value = _turned(value, other, cos, sin, first, turn, transposed)
    tl.store(out + (token * heads + head) * dim + channel, value.to(out.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------------- launchers


_ROPE, _QKV = Launcher(_rope_kernel), Launcher(_qkv_kernel)
_POINTERS = ("qkv", "q", "k", "v", "cos_q", "sin_q", "cos_k", "sin_k", "positions")
_MOST_LAUNCHES = 1024
_LAUNCHES: dict[tuple, Launch] = {}
"""Of `_qkv_kernel`, by all but the addresses."""


def _table(freqs: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor, int]:
    """cos and sin of the angles, and their width; placeholders where nothing turns."""
    if freqs is None:
        return like, like, 2
    if freqs.dim() == 3:
        cos, sin = freqs.contiguous().unbind()
        return cos, sin, freqs.shape[-1]
    freqs = freqs.float().contiguous()
    return torch.cos(freqs), torch.sin(freqs), freqs.shape[-1]


def _rowed(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rope(
    x: Tensor,
    freqs: Tensor,
    positions: Tensor | None,
    seq_stride: int,
    seq_len: int,
    interleaved: bool,
    transposed: bool,
) -> Tensor:
    """See `rope._rope`."""
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    x = _rowed(x)
    tokens, heads, dim = x.shape
    cos, sin, rot = _table(freqs, x)
    slots = min(MAX_SLOTS, triton.next_power_of_2(heads))
    _ROPE(
        (tokens, triton.cdiv(heads, slots)),
        WARPS,
        {
            "x": x, "out": out, "cos_table": cos, "sin_table": sin, "positions": x if positions is None else positions,
            "x_token": x.stride(0), "x_head": x.stride(1), "seq_stride": seq_stride, "seq_len": max(seq_len, 1),
            "rows": cos.shape[0], "heads": heads,
            "has_positions": positions is not None, "interleaved": interleaved, "transposed": transposed,
            "dim": dim, "rot": rot, "SLOTS": slots, "DIM": triton.next_power_of_2(dim),
        },
    )  # fmt: skip
    return out


def _launch_qkv(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, freqs_q: Tensor | None, freqs_k: Tensor | None,
    positions: Tensor | None, seq_stride: int, seq_len: int, by_group: bool, interleaved: bool, batch: int, merge: bool,
) -> None:  # fmt: skip
    tokens, heads, dim = q.shape
    groups = k.shape[1]
    if tokens == 0:
        return
    cos_q, sin_q, rot_q = _table(freqs_q, qkv)
    cos_k, sin_k, rot_k = (cos_q, sin_q, rot_q) if freqs_k is freqs_q else _table(freqs_k, qkv)
    turns = freqs_q is not None and freqs_k is not None
    if turns and qkv_rope_triton.fits(q, k, rot_q, rot_k, interleaved):
        qkv_rope_triton.launch(
            qkv, q, k, v, (cos_q, sin_q, cos_k, sin_k), positions, seq_stride, seq_len, by_group, batch, merge
        )
        return
    key = (
        q.shape, groups, q.stride(), k.stride(), v.stride(), qkv.dtype, q.dtype, k.dtype, v.dtype, cos_q.dtype, cos_k.dtype,
        None if positions is None else positions.dtype, seq_stride, seq_len, cos_q.shape[0], cos_k.shape[0], rot_q, rot_k,
        freqs_q is None, freqs_k is None, by_group, interleaved, batch, merge,
    )  # fmt: skip
    launch = _LAUNCHES.get(key)
    if launch is None:
        slots = min(MAX_SLOTS, triton.next_power_of_2(heads + 2 * groups))
        numbers = {
            "q_token": q.stride(0), "q_head": q.stride(1), "k_token": k.stride(0), "k_head": k.stride(1),
            "v_token": v.stride(0), "v_head": v.stride(1),
            "seq_stride": seq_stride, "seq_len": max(seq_len, 1), "rows_q": cos_q.shape[0], "rows_k": cos_k.shape[0],
            "heads": heads, "groups": groups, "share": heads // groups, "tokens": tokens, "batch": batch,
            "batch_major": batch > 1, "has_positions": positions is not None, "turn_q": freqs_q is not None, "turn_k": freqs_k is not None,
            "by_group": by_group, "interleaved": interleaved, "merge": merge,
            "dim": dim, "rot_q": rot_q, "rot_k": rot_k, "SLOTS": slots, "DIM": triton.next_power_of_2(dim),
        }  # fmt: skip
        launch = _QKV.prepare((tokens, triton.cdiv(heads + 2 * groups, slots)), WARPS, numbers, _POINTERS)
        if len(_LAUNCHES) >= _MOST_LAUNCHES:
            _LAUNCHES.clear()
        _LAUNCHES[key] = launch
    launch(qkv, q, k, v, cos_q, sin_q, cos_k, sin_k, qkv if positions is None else positions)


def split_qkv(
    qkv: Tensor, freqs_q: Tensor | None, freqs_k: Tensor | None, positions: Tensor | None,
    seq_stride: int, seq_len: int, heads: int, groups: int, by_group: bool, interleaved: bool, batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `rope._split_qkv`."""
    dim = qkv.shape[1] // (heads + 2 * groups)
    q, k, v = (qkv.new_empty(qkv.shape[0], count, dim) for count in (heads, groups, groups))
    _launch_qkv(
        qkv.contiguous(), q, k, v, freqs_q, freqs_k, positions, seq_stride, seq_len, by_group, interleaved, batch,
        merge=False,
    )  # fmt: skip
    return q, k, v


def merge_qkv(
    dq: Tensor, dk: Tensor, dv: Tensor, freqs_q: Tensor | None, freqs_k: Tensor | None, positions: Tensor | None,
    seq_stride: int, seq_len: int, by_group: bool, interleaved: bool, batch: int = 1,
) -> Tensor:  # fmt: skip
    """See `rope._merge_qkv`."""
    tokens, heads, dim = dq.shape
    out = dq.new_empty(tokens, (heads + 2 * dk.shape[1]) * dim)
    _launch_qkv(
        out, _rowed(dq), _rowed(dk), _rowed(dv), freqs_q, freqs_k, positions, seq_stride, seq_len, by_group, interleaved,
        batch, merge=True,
    )  # fmt: skip
    return out
