"""Who may attend to whom: mask types, sliding windows, padding, packed sequences and position biases.

Positions are counted from the top left corner of the [queries, keys] matrix, or from the bottom right corner (the last query is
level with the last key), as the mask type says. In masks that users give, True means "masked out"; in those made here
(`allowed`), True means "may attend", which is what torch's attention takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ottava.notices import did_you_mean

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


def one_of(what: str, given: str, valid: tuple[str, ...]) -> str:
    """`given`, or an error that lists what is valid."""
    if given not in valid:
        raise ValueError(f"{what} must be one of {', '.join(valid)}; got {given!r}.{did_you_mean(given, valid)}")
    return given


def canonical_mask_type(name: str) -> str:
    """One spelling for a mask type: "padding,causal" and "causal,padding" are "padding_causal"."""
    spelled = str(name).replace(",", "_")
    return one_of("attn_mask_type", "padding_causal" if spelled == "causal_padding" else spelled, MASK_TYPES)


def is_bottom_right(mask_type: str, bottom_right_diagonal: bool | None) -> bool:
    """Which corner the diagonal starts from: the mask type decides where it says so, then the argument, then bottom right."""
    if mask_type in ("causal", "padding_causal"):
        return False
    if "bottom_right" in mask_type or bottom_right_diagonal is None:
        return True
    return bottom_right_diagonal


def check_window(mask_type: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) as given, with -1 for no limit; a causal mask has nothing to its right."""
    left, right = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be (left, right) with -1 for no limit, got {window}.")
    if "causal" in mask_type:
        return left, 0
    if (left, right) == (-1, 0):
        raise ValueError(
            f"window_size (-1, 0) is a causal mask, but attn_mask_type is {mask_type!r}: use attn_mask_type='causal', or (-1, -1)."
        )
    return left, right


# ---------------------------------------------------------------------------------------------------------------- padding


@dataclass
class Valid:
    """Which queries and keys are real, bool [b, s] and [b, t], and how many, [b]. `same`: both sides are known to be equal."""

    queries: Tensor
    keys: Tensor
    query_count: Tensor
    key_count: Tensor
    right_padded: bool
    same: bool


def lengths_of(cu_seqlens: Tensor) -> Tensor:
    """[b + 1] cumulative lengths -> [b] lengths."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def valid_from_lengths(queries: int, keys: int, query_count: Tensor, key_count: Tensor, same: bool) -> Valid:
    """Sequences that begin at 0 and are padded on the right to `queries` and `keys`."""
    device = query_count.device
    return Valid(
        torch.arange(queries, device=device) < query_count[:, None],
        torch.arange(keys, device=device) < key_count[:, None],
        query_count,
        key_count,
        right_padded=True,
        same=same,
    )


def valid_from_masks(attention_mask: Tensor | tuple[Tensor, Tensor], batch: int, queries: int, keys: int) -> Valid:
    """attention_mask: bool [b, 1, 1, s] for self-attention, or a pair ([b, 1, 1, s], [b, 1, 1, t]); True is padding."""
    pair = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask, attention_mask)
    if len(pair) != 2:
        raise ValueError(f"attention_mask for a padding mask is one tensor or a pair (queries, keys), got {len(pair)}.")
    real = []
    for mask, length, side in zip(pair, (queries, keys), ("queries", "keys"), strict=True):
        if mask.dtype is not torch.bool or mask.numel() != batch * length or mask.shape[-1] != length:
            raise ValueError(
                f"attention_mask for {length} {side} in a batch of {batch} must be bool [{batch}, 1, 1, {length}] with True for "
                f"padding, got {mask.dtype} {tuple(mask.shape)}; for cross-attention give a pair (queries, keys)."
            )
        real.append(~mask.reshape(batch, length))
    return Valid(real[0], real[1], real[0].sum(1), real[1].sum(1), right_padded=False, same=pair[0] is pair[1])


# ------------------------------------------------------------------------------------------------------------------- mask


def relative_positions(
    queries: int, keys: int, bottom_right: bool, valid: Valid | None, device: torch.device
) -> Tensor:
    """Query position minus key position, int [1 or b, 1, s, t]. With padding the bottom right corner is that of the real tokens."""
    relative = (torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device))[None, None]
    if not bottom_right:
        return relative
    if valid is None:
        return relative + (keys - queries)
    return relative + (valid.key_count - valid.query_count).view(-1, 1, 1, 1)


def build(
    window: tuple[int, int],
    bottom_right: bool,
    queries: int,
    keys: int,
    valid: Valid | None,
    attention_mask: Tensor | None,
    device: torch.device,
) -> tuple[bool, Tensor | None]:
    """(causal, allowed): a plain top-left causal mask as a flag, which fused kernels like; anything else as bool [b, h, s, t]."""
    left, right = window
    square = (queries == keys and valid is None) or (valid is not None and valid.same and queries == keys)
    only_causal = (left, right) == (-1, 0) and (not bottom_right or square)
    allowed = None
    if valid is not None and not (only_causal and valid.same and valid.right_padded):
        # With equal, right-padded sides a causal query never reaches the padding keys, so the flag alone is right.
        allowed = valid.keys[:, None, None, :]
    if attention_mask is not None:
        allowed = ~attention_mask if allowed is None else allowed & ~attention_mask
    if only_causal:
        return True, allowed
    if (left, right) != (-1, -1):
        relative = relative_positions(queries, keys, bottom_right, valid, device)
        inside = relative >= -right if right >= 0 else relative <= left
        if right >= 0 and left >= 0:
            inside = inside & (relative <= left)
        allowed = inside if allowed is None else allowed & inside
    return False, allowed


# ---------------------------------------------------------------------------------------------------------------- biases


def default_alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """2^(-8 i / n) for the n heads up to a power of two, then every second one of the series for 2n. float32 [heads]."""
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_bias(slopes: Tensor, relative: Tensor) -> Tensor:
    """-slope * distance, float32 [b or 1, h, s, t]. slopes: [h] or [b, h]."""
    return -relative.abs() * slopes.float().view(-1, slopes.shape[-1], 1, 1)


# ---------------------------------------------------------------------------------------------------------------- packing


@dataclass
class Packed:
    """Sequences packed into one row of tokens: where each begins, and how many real tokens it has. Padding may lie between."""

    starts: Tensor  # [b + 1]
    lengths: Tensor  # [b]
    longest: int

    def spread(self, tokens: Tensor) -> Tensor:
        """[t, ...] -> [b, longest, ...], zero where a sequence has ended."""
        index = torch.arange(self.longest, device=tokens.device)
        source = (self.starts[:-1, None] + index).clamp(max=max(tokens.shape[0] - 1, 0))
        real = index < self.lengths[:, None]
        if tokens.shape[0] == 0:
            return tokens.new_zeros(*real.shape, *tokens.shape[1:])
        spread = tokens.index_select(0, source.reshape(-1)).view(*real.shape, *tokens.shape[1:])
        return torch.where(real.view(*real.shape, *(1,) * (tokens.dim() - 1)), spread, spread.new_zeros(()))

    def gather(self, padded: Tensor, tokens: int) -> Tensor:
        """[b, longest, ...] -> [tokens, ...], zero for tokens of no sequence."""
        token = torch.arange(tokens, device=padded.device)
        batch = self.lengths.shape[0]
        sequence = torch.searchsorted(self.starts[1:].contiguous(), token, right=True).clamp_(max=max(batch - 1, 0))
        index = token - self.starts[:-1][sequence]
        real = index < self.lengths[sequence]
        source = sequence * self.longest + index.clamp(max=max(self.longest - 1, 0))
        rows = padded.reshape(batch * self.longest, *padded.shape[2:])
        if rows.shape[0] == 0:
            return padded.new_zeros(tokens, *padded.shape[2:])
        gathered = rows.index_select(0, source)
        return torch.where(real.view(-1, *(1,) * (padded.dim() - 2)), gathered, gathered.new_zeros(()))


def before(end: Tensor, tokens: Tensor) -> Tensor:
    """Which rows of tokens [t, h, d] lie before `end`, a number on the device: bool [t, 1, 1]."""
    return (torch.arange(tokens.shape[0], device=tokens.device) < end)[:, None, None]


def bounds_of(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """int32 [1, tokens] each: where each token's sequence begins, and where the next one does. What comes after the last is one, too.

    >>> [x.tolist() for x in bounds_of(torch.tensor([0, 2, 3]), 4)]
    [[[0, 0, 2, 3]], [[2, 2, 3, 4]]]
    """
    offsets = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), tokens)])
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, index, right=True)  # 1 for the first
    return offsets[sequence - 1].to(torch.int32)[None], offsets[sequence].to(torch.int32)[None]


def packed(
    cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, longest: int | None, tokens: int, side: str
) -> Packed:
    """Reads cumulative lengths. Without `longest` it is read from the device; while compiling, `tokens` bounds it instead."""
    if cu_seqlens is None:
        raise ValueError(f"qkv_format 'thd' needs cu_seqlens_{side}, the [batch + 1] cumulative sequence lengths.")
    for what, offsets in ((f"cu_seqlens_{side}", cu_seqlens), (f"cu_seqlens_{side}_padded", cu_seqlens_padded)):
        if offsets is not None and (offsets.dim() != 1 or offsets.shape != cu_seqlens.shape or offsets.numel() < 2):
            raise ValueError(f"{what} must be [batch + 1] integers starting at 0, got shape {tuple(offsets.shape)}.")
    lengths = lengths_of(cu_seqlens).long()
    starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    if torch.compiler.is_compiling():
        return Packed(starts, lengths, tokens if longest is None else longest)
    if longest is None:
        longest = int(lengths.max())
    if starts.device.type == "cpu":
        _check_packed(starts, lengths, longest, tokens, side)
    return Packed(starts, lengths, longest)


def _check_packed(starts: Tensor, lengths: Tensor, longest: int, tokens: int, side: str) -> None:
    """On the CPU reading values costs nothing, so wrong ones are named."""
    if int(starts[-1]) > tokens or int((starts[:-1] + lengths).max()) > tokens:
        raise ValueError(f"cu_seqlens_{side} end at {int(starts[-1])}, but there are {tokens} tokens.")
    if int(lengths.max()) > longest or int(lengths.min()) < 0:
        raise ValueError(
            f"cu_seqlens_{side} has lengths {lengths.tolist()}; they must lie in 0 ... max_seqlen_{side} = {longest}."
        )
