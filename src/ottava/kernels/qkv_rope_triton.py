"""Split, merge and turn of qkv where whole heads turn, half against half: what nearly every model asks for. Called by `rope_triton`.

One program takes one token: its queries, then its keys, then its values, each as two tiles [heads, half a head] that are runs of memory,
so every read and write is of 16 bytes and the angles of the token are read once. `rope_triton` has the general kernel.

Speed of light: two bytes read and two written an element; 48 heads of 64 channels, 16,384 tokens: 201 MB, 47 us on an H200.
Compiled without fused multiply-add: the bytes are the reference's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launch, Launcher


@triton.jit
def _move(
    mixed_at, part_at, mask, cos_first, cos_second, sin_first, sin_second,
    TURN: tl.constexpr, MERGE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A tile of heads from qkv to q, k or v, turned; or back (MERGE), turned back. Addresses of the first half; mask: of the heads."""
    if MERGE:
        source, target = part_at, mixed_at
    else:
        source, target = mixed_at, part_at
    a = tl.load(source, mask=mask, other=0.0)
    b = tl.load(source + HALF, mask=mask, other=0.0)
    if TURN:
        kind: tl.constexpr = a.dtype
        a, b = a.to(tl.float32), b.to(tl.float32)
        if MERGE:  # the transposed rotation takes the sine of the partner's angle
            first, second = a * cos_first + b * sin_second, b * cos_second - a * sin_first
        else:
            first, second = a * cos_first - b * sin_first, b * cos_second + a * sin_second
        a, b = first.to(kind), second.to(kind)
    tl.store(target, a, mask=mask)
    tl.store(target + HALF, b, mask=mask)


@triton.jit
def _angles(cos_ptr, sin_ptr, row, rows, channel, HALF: tl.constexpr):
    """Cosines and sines [1, HALF] of both halves at a position; NaN beyond the table."""
    at = row * 2 * HALF + channel
    known = (row < rows) & (channel < HALF)
    nan: tl.constexpr = float("nan")
    return (
        tl.load(cos_ptr + at, mask=known, other=nan), tl.load(cos_ptr + at + HALF, mask=known, other=nan),
        tl.load(sin_ptr + at, mask=known, other=nan), tl.load(sin_ptr + at + HALF, mask=known, other=nan),
    )  # fmt: skip


@triton.jit
def _qkv_halves_kernel(
    qkv, q, k, v, cos_q, sin_q, cos_k, sin_k, positions,
    q_token, q_head, k_token, k_head, v_token, v_head, seq_stride, seq_len, rows_q, rows_k, tokens, batch,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, BY_GROUP: tl.constexpr, POSITIONS: tl.constexpr, BATCH_MAJOR: tl.constexpr,
    SAME: tl.constexpr, MERGE: tl.constexpr, HALF: tl.constexpr, Q_SLOTS: tl.constexpr, K_SLOTS: tl.constexpr,
):  # fmt: skip
    """Strides in elements, the last is 1. SAME: keys turn by the angles of queries."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, HALF)[None, :]
    if POSITIONS:
        row = tl.load(positions + token).to(tl.int64)
    else:
        row = (token // seq_stride) % seq_len
    place = token  # of the token in q, k and v: as in qkv, or with the tokens of each row together
    if BATCH_MAJOR:
        place = token % batch * (tokens // batch) + token // batch
    mixed = qkv + token * ((HEADS + 2 * GROUPS) * 2 * HALF) + channel
    SHARE: tl.constexpr = HEADS // GROUPS

    c1, c2, s1, s2 = _angles(cos_q, sin_q, row, rows_q, channel, HALF)
    head = tl.arange(0, Q_SLOTS)[:, None]
    slot = head // SHARE * (SHARE + 2) + head % SHARE if BY_GROUP else head
    at = q + place * q_token + head * q_head + channel
    _move(mixed + slot * (2 * HALF), at, head < HEADS, c1, c2, s1, s2, True, MERGE, HALF)

    if not SAME:
        c1, c2, s1, s2 = _angles(cos_k, sin_k, row, rows_k, channel, HALF)
    head = tl.arange(0, K_SLOTS)[:, None]
    slot = head * (SHARE + 2) + SHARE if BY_GROUP else HEADS + head
    at = k + place * k_token + head * k_head + channel
    _move(mixed + slot * (2 * HALF), at, head < GROUPS, c1, c2, s1, s2, True, MERGE, HALF)
    slot = slot + 1 if BY_GROUP else slot + GROUPS
    at = v + place * v_token + head * v_head + channel
    _move(mixed + slot * (2 * HALF), at, head < GROUPS, c1, c2, s1, s2, False, MERGE, HALF)


_KERNEL = Launcher(_qkv_halves_kernel)
_MOST_LAUNCHES = 1024
_LAUNCHES: dict[tuple, Launch] = {}
"""By all that the launch depends on but the addresses."""


def fits(q: Tensor, k: Tensor, rot_q: int, rot_k: int, interleaved: bool) -> bool:
    """Whether this kernel serves: whole heads turn, of a power of two channels, half against half."""
    dim = q.shape[-1]
    return not interleaved and rot_q == rot_k == dim and 16 <= dim <= 256 and dim & (dim - 1) == 0 and k.shape[1] > 0


def launch(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor, Tensor, Tensor], positions: Tensor | None,
    seq_stride: int, seq_len: int, by_group: bool, batch: int, merge: bool,
) -> None:  # fmt: skip
    """Fills q, k and v from qkv, or qkv from them (merge). tables: cosines and sines [rows, dim] of queries, of keys."""
    same = tables[2] is tables[0]
    rows = (tables[0].shape[0], tables[2].shape[0])
    key = (
        q.shape, k.shape[1], q.stride(), k.stride(), v.stride(), qkv.dtype, rows, same,
        None if positions is None else positions.dtype, seq_stride, seq_len, by_group, batch, merge,
    )  # fmt: skip
    prepared = _LAUNCHES.get(key)
    if prepared is None:
        if len(_LAUNCHES) >= _MOST_LAUNCHES:
            _LAUNCHES.clear()
        prepared = _LAUNCHES[key] = _prepare(
            q, k, v, rows, same, positions is not None, seq_stride, seq_len, by_group, batch, merge
        )
    tensors = (qkv, q, k, v, *tables)
    prepared(*tensors) if positions is None else prepared(*tensors, positions)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, rows: tuple[int, int], same: bool, has_positions: bool, seq_stride: int, seq_len: int,
    by_group: bool, batch: int, merge: bool,
) -> Launch:  # fmt: skip
    tokens, heads, dim = q.shape
    groups = k.shape[1]
    arguments = {
        "positions": None, "q_token": q.stride(0), "q_head": q.stride(1), "k_token": k.stride(0), "k_head": k.stride(1),
        "v_token": v.stride(0), "v_head": v.stride(1), "seq_stride": seq_stride, "seq_len": max(seq_len, 1),
        "rows_q": rows[0], "rows_k": rows[1], "tokens": tokens, "batch": batch,
        "HEADS": heads, "GROUPS": groups, "BY_GROUP": by_group, "POSITIONS": has_positions, "BATCH_MAJOR": batch > 1,
        "SAME": same, "MERGE": merge, "HALF": dim // 2,
        "Q_SLOTS": triton.next_power_of_2(heads), "K_SLOTS": triton.next_power_of_2(groups),
    }  # fmt: skip
    pointers = ("qkv", "q", "k", "v", "cos_q", "sin_q", "cos_k", "sin_k", *["positions"] * has_positions)
    # 32 elements a thread of the queries' tile: two reads of 16 bytes in each half.
    warps = min(8, max(1, triton.next_power_of_2(heads) * dim // 1024))
    return _KERNEL.prepare((tokens,), warps, arguments, pointers)
