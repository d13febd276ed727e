"""Rotary position embedding: the table of angles, and applying it to heads or to a fused qkv projection.

The arithmetic is in `ottava.kernels.rope`; this file knows layouts (sbhd, bshd, thd), positions and what a user may get wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.kernels import rope
from ottava.kernels.registry import plain_functions
from ottava.nn.base import default_device
from ottava.nn.core import refuse_double_backward

FORMATS = ("sbhd", "bshd", "thd")


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles for rotary embedding: `angle[p, i] = p / rotary_base ** (2 i / dim)`.

    Arguments:
        dim: channels of a head; with `rotary_percent` below 1 only the first `int(dim * rotary_percent)` turn.
        seq_len_interpolation_factor, pretrained_max_position_embeddings: position interpolation, when both are given.
            Positions are divided by the factor, or, for sequences longer than factor x pretrained length, by
            `max_seq_len / pretrained_max_position_embeddings`.
        interleaved: the pairs that turn together are (2i, 2i+1) instead of (i, i + dim/2).
        device: where the table is made; by default where modules are (the GPU, if there is one).

    Example:
        >>> RotaryPositionEmbedding(64, device="cpu")(max_seq_len=16).shape
        torch.Size([16, 1, 1, 64])
    """

    inv_freq: Tensor  # [dim / 2] float32

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rotary_percent < 1.0:
            dim = int(dim * rotary_percent)
        if dim <= 0 or dim % 2:
            raise ValueError(
                f"RotaryPositionEmbedding turns pairs of channels, so dim x rotary_percent must be even, got {dim}."
            )
        self.rotary_base = rotary_base
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=default_device(device)) / dim
        self.register_buffer("inv_freq", 1.0 / (rotary_base**exponent))

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of positions offset ... offset + max_seq_len - 1, float32 [max_seq_len, 1, 1, dim]."""
        position = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        factor, pretrained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and pretrained is not None:
            shrink = max_seq_len / pretrained if max_seq_len > pretrained * factor else factor
            position = position * (1 / shrink)
        angle = position[:, None] * self.inv_freq.float()[None, :]
        if self.interleaved:
            angle = angle.repeat_interleave(2, dim=-1)
        else:
            angle = torch.cat((angle, angle), dim=-1)
        return angle[:, None, None, :]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Turns the heads of `t` ([s, b, h, d], [b, s, h, d] or [t, h, d]) by the angles `freqs` [s2, 1, 1, d2], d2 <= d.

    start_positions [b]: sequence i starts at position start_positions[i]. cu_seqlens [b + 1]: for "thd", where sequences
    begin; positions restart with each. cp_size, cp_rank: `t` holds the two chunks that this rank of a context-parallel group
    owns (of 2 cp_size chunks, numbers cp_rank and 2 cp_size - 1 - cp_rank). `fused` changes nothing: there is one path.

    Example:
        >>> t = torch.ones(4, 1, 2, 8)
        >>> freqs = RotaryPositionEmbedding(8, device="cpu")(4)
        >>> bool((apply_rotary_pos_emb(t, freqs)[0] == t[0]).all())  # position 0 does not turn
        True
    """
    table = check_freqs(freqs, t.shape[-1], t.dtype)
    where = token_positions(t.shape, table, tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    flat = t.reshape(-1, *t.shape[-2:])  # [T, h, d]
    return rope.rope(flat, table, *where, interleaved, False).view(t.shape)


def split_qkv_rope(
    qkv: Tensor,
    heads: int,
    groups: int,
    *,
    by_group: bool,
    tensor_format: str = "sbhd",
    freqs: tuple[Tensor | None, Tensor | None] = (None, None),
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [..., (heads + 2 groups) d] -> q [..., heads, d], k and v [..., groups, d], contiguous; q, k turned by `freqs`.

    batch_first: from [s, b, ...] to [b, s, ...] on the way, which costs nothing here and a copy later.
    The heads lie in qkv as [q | k | v], or, `by_group`, as [heads/groups of q, one of k, one of v] for each group.
    qkv itself is not kept for backward. heads = 0 splits a fused key-value projection; q is then empty.
    """
    dim = qkv.shape[-1] // (heads + 2 * groups)
    tables = [None if f is None else check_freqs(f, dim, qkv.dtype) for f in freqs]
    if freqs[1] is freqs[0]:
        tables[1] = tables[0]  # one object, so that the kernel sees that they are one
    where: tuple[Tensor | None, int, int] = (None, 1, 1)
    for table in tables:
        if table is not None:
            where = token_positions((*qkv.shape[:-1], 1, dim), table, tensor_format, None, cu_seqlens)
    batch = qkv.shape[1] if batch_first else 1
    lead = (qkv.shape[1], qkv.shape[0]) if batch_first else tuple(qkv.shape[:-1])
    return _split(qkv, lead, *tables, *where, heads, groups, by_group, interleaved, batch)


class _Split(torch.autograd.Function):
    """`split_qkv` and its gradient, straight: torch.library puts some forty Python calls around an op that has one, and autograd would
    record every change of shape."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, lead: tuple[int, ...], *options: Any) -> Any:
        freqs_q, freqs_k, positions, seq_stride, seq_len, _, _, by_group, interleaved, batch = options
        ctx.save_for_backward(freqs_q, freqs_k, positions)
        ctx.options, ctx.shape = (seq_stride, seq_len, by_group, interleaved, batch), qkv.shape
        made = plain_functions(qkv).split_qkv(qkv.reshape(-1, qkv.shape[-1]), *options)
        return tuple(part.view(*lead, *part.shape[1:]) for part in made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward()
        tokens = ctx.shape[:-1].numel()
        rows = [grad.reshape(tokens, *grad.shape[-2:]) for grad in grads]
        merged = plain_functions(rows[0]).merge_qkv(*rows, *ctx.saved_tensors, *ctx.options)
        return merged.view(ctx.shape), *(None,) * 11


def _split(qkv: Tensor, lead: tuple[int, ...], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`rope.split_qkv` of qkv [..., (heads + 2 groups) d], the results as [*lead, heads or groups, d]."""
    if torch.compiler.is_compiling() or plain_functions(qkv) is torch.ops.ottava:  # somebody wants to see the op
        q, k, v = rope.split_qkv(qkv.reshape(-1, qkv.shape[-1]), *options)
        return q.view(*lead, *q.shape[1:]), k.view(*lead, *k.shape[1:]), v.view(*lead, *v.shape[1:])
    return _Split.apply(qkv, lead, *options)


# ---------------------------------------------------------------------------------------------------------- positions


def check_freqs(freqs: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The angle table as float32 [rows, rot]; on a GPU its cosines and sines [2, rows, rot], see `_shared_tables`.

    dtype: of what turns. float64 has its cosines in float64, so it takes the angles.
    """
    rot = freqs.shape[-1]
    if freqs.dim() not in (2, 4) or freqs.numel() != freqs.shape[0] * rot:
        raise ValueError(
            f"rotary angles must have the shape [positions, 1, 1, channels], got {tuple(freqs.shape)}; "
            "RotaryPositionEmbedding makes them."
        )
    if rot > dim or rot % 2:
        raise ValueError(f"rotary angles for {rot} channels do not fit heads of {dim}: an even number, at most {dim}.")
    shares = freqs.is_cuda and freqs.dtype is torch.float32 and dtype is not torch.float64
    if shares and not torch.compiler.is_compiling():
        return _shared_tables(freqs)
    return freqs.detach().reshape(freqs.shape[0], rot).float()


def _shared_tables(freqs: Tensor) -> Tensor:
    """Cosines and sines of `freqs`, made at its first use and kept with it, so that all layers that get it share them.

    They live and die with the tensor object that the model hands to its layers, and are made again if it is written to: nothing can be
    stale, and a captured graph that reads them reads memory of a tensor that it depends on anyway.
    """
    version = None if freqs.is_inference() else freqs._version
    kept = getattr(freqs, "_ottava_tables", None)
    if kept is None or kept[0] != version or version is None:
        kept = (version, rope.tables(freqs.detach().reshape(freqs.shape[0], freqs.shape[-1])))
        freqs._ottava_tables = kept  # type: ignore[attr-defined]
    return kept[1]


def token_positions(
    shape: torch.Size | tuple[int, ...],
    table: Tensor,
    tensor_format: str,
    start_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor | None, int, int]:
    """(positions, seq_stride, seq_len) as the ops take them, for heads of `shape` [s, b, h, d], [b, s, h, d] or [t, h, d]."""
    if tensor_format not in FORMATS:
        raise ValueError(f"tensor_format must be one of {', '.join(FORMATS)}, got {tensor_format!r}.")
    if len(shape) != (3 if tensor_format == "thd" else 4):
        raise ValueError(f"tensor_format {tensor_format!r} does not fit a tensor of shape {tuple(shape)}.")
    if cp_size > 1 and start_positions is not None:
        raise ValueError("start_positions cannot be combined with context parallelism (cp_size > 1).")
    if tensor_format == "thd":
        return _thd_positions(shape[0], table, start_positions, cu_seqlens, cp_size, cp_rank), 1, 1
    seq_dim = 0 if tensor_format == "sbhd" else 1
    length, batch = shape[seq_dim], shape[1 - seq_dim]
    if length * cp_size > table.shape[-2]:
        raise ValueError(
            f"rotary angles reach position {table.shape[-2] - 1}, but the sequence has {length * cp_size} positions: "
            "make them with a larger max_seq_len."
        )
    if start_positions is None and cp_size == 1:
        return None, batch if seq_dim == 0 else 1, length
    index = torch.arange(length, device=table.device)
    lengths = torch.full((batch,), length, dtype=torch.int64, device=table.device)
    grid = _local_position(index[:, None], lengths[None, :], cp_size, cp_rank)  # [s, b]
    if start_positions is not None:
        grid = grid + start_positions.to(table.device)[None, :]
    _check_reach(grid, table)
    return (grid if seq_dim == 0 else grid.t()).reshape(-1).to(torch.int32), 1, 1


def _thd_positions(
    tokens: int, table: Tensor, start_positions: Tensor | None, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int
) -> Tensor:
    """Position of each token in its own sequence, [t]. Tokens after the last sequence get 0."""
    if cu_seqlens is None:
        raise ValueError("tensor_format 'thd' needs cu_seqlens, the [batch + 1] offsets at which sequences begin.")
    starts = cu_seqlens.to(device=table.device, dtype=torch.int64) // cp_size
    token = torch.arange(tokens, device=table.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=max(starts.numel() - 2, 0))
    lengths = starts[1:] - starts[:-1]
    position = _local_position(token - starts[sequence], lengths[sequence], cp_size, cp_rank)
    if start_positions is not None:
        position = position + start_positions.to(table.device)[sequence]
    position = torch.where(token < starts[-1], position, 0)
    _check_reach(position, table)
    return position.to(torch.int32)


def _local_position(index: Tensor, length: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Global position of the `index`-th token that a context-parallel rank holds of a sequence with `length` local tokens."""
    if cp_size == 1:
        return index.expand(torch.broadcast_shapes(index.shape, length.shape))
    chunk = length // 2
    return torch.where(index < chunk, cp_rank * chunk + index, (2 * cp_size - cp_rank - 2) * chunk + index)


def _check_reach(position: Tensor, table: Tensor) -> None:
    # Reading the largest position waits for the device, so only where that is free; on CUDA the kernel answers with NaN.
    if position.device.type != "cpu" or torch.compiler.is_compiling() or position.numel() == 0:
        return
    last = int(position.max())
    if last >= table.shape[-2]:
        raise ValueError(
            f"rotary angles reach position {table.shape[-2] - 1}, but position {last} is used: "
            "make them with a larger max_seq_len."
        )
