"""TransformerEngine's functions for mixtures of experts, in plain torch ops: tokens are put together by expert, and back.

`row_id_map` is for `moe_unpermute` alone. Of a mask [tokens, experts] it is [tokens, experts], of indices [tokens, k] it is [tokens * k]:
the row that a token has at an expert, -1 where it has none. Sums are made in float32, in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ottava.compat.support import FP8GlobalStateManager, get_align_size_for_quantization
from ottava.nn.attention_mask import one_of
from ottava.quant.tensor import QuantizedTensor

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]


class _Rows(torch.autograd.Function):
    """x[source], zeros where source is -1. users [rows of x, n]: where each row went, -1 for none; so backward adds in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, users: Tensor) -> Tensor:
        ctx.save_for_backward(users)
        return _taken(x, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (users,) = ctx.saved_tensors
        total = grad.new_zeros(users.shape[0], grad.shape[1], dtype=torch.float32)
        for one in users.unbind(1):
            total += _taken(grad, one)
        return total.to(grad.dtype), None, None


def _taken(x: Tensor, source: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(source.numel(), x.shape[1])
    return torch.where((source >= 0).unsqueeze(1), x.index_select(0, source.clamp(min=0)), x.new_zeros(()))


def _plain(x: Tensor) -> Tensor:
    """FP8 tokens as values: rows of several scales are no quantized tensor here."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _packed(table: Tensor) -> tuple[Tensor, Tensor]:
    """table [n, experts] with -1 for none -> (its other entries [n, most of them in a row], their columns), filled up with -1."""
    there = table >= 0
    most = int(there.sum(1).max()) if table.numel() else 0
    columns = there.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    return table.gather(1, columns), columns


def _sources(rows: Tensor, count: int) -> Tensor:
    """rows [n, k], -1 for none -> [count]: which place of the flat table each row has, -1 if none."""
    flat = rows.reshape(-1)
    places = torch.arange(flat.numel(), device=rows.device)
    found = torch.full((count,), -1, dtype=torch.long, device=rows.device)
    kept = flat >= 0
    found[flat[kept]] = places[kept]
    return found


def _rows_by_expert(routing_map: Tensor) -> Tensor:
    """routing_map [tokens, experts] -> the row of each token at each expert, -1 for none."""
    chosen = routing_map.bool().t()
    rows = chosen.reshape(-1).cumsum(0).reshape(chosen.shape) - 1
    return torch.where(chosen, rows, -1).t().contiguous()


def _permuted(inp: Tensor, table: Tensor, count: int) -> Tensor:
    packed, _ = _packed(table)
    source = _sources(packed, count)
    return _Rows.apply(_plain(inp), source.div(max(packed.shape[1], 1), rounding_mode="floor"), packed)


def _check_map(inp: Tensor, routing_map: Tensor) -> None:
    if inp.dim() != 2 or routing_map.dim() != 2 or inp.shape[0] != routing_map.shape[0]:
        raise ValueError(
            f"Tokens [n, hidden] and a routing_map [n, experts or k] of the same n are expected, got {tuple(inp.shape)} and "
            f"{tuple(routing_map.shape)}."
        )


def _check_count(needed: int, num_out_tokens: int) -> int:
    if num_out_tokens < needed:
        raise ValueError(
            f"num_out_tokens={num_out_tokens}, but routing_map has {needed} entries: give at least as many."
        )
    return num_out_tokens


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """(tokens put together by expert, row_id_map). routing_map: 1 at the experts of each token ("mask"), or their numbers [tokens, k]
    ("index"); then num_out_tokens cuts off the last ones, and 0 cuts none. max_token_num sizes a workspace there; here there is none."""
    _check_map(inp, routing_map)
    if one_of("map_type", map_type, ("mask", "index")) == "mask":
        table = _rows_by_expert(routing_map)
        return _permuted(inp, table, _check_count(int((table >= 0).sum()), num_out_tokens)), table
    order = routing_map.reshape(-1).argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    count = num_out_tokens or rows.numel()
    rows = torch.where(rows < count, rows, -1)
    return _permuted(inp, rows.reshape(routing_map.shape), count), rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens by expert, their probabilities, row_id_map). probs: [tokens, experts]."""
    out, table = moe_permute(inp, routing_map, num_out_tokens)
    return out, _permuted_probs(probs, table, num_out_tokens), table


def _permuted_probs(probs: Tensor, table: Tensor, count: int) -> Tensor:
    kept = table >= 0
    return probs.new_zeros(count).index_put((table[kept],), probs[kept])


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """As `moe_permute_with_probs`, with the rows of each expert filled up by zeros to a multiple of align_size. Also gives what
    `moe_unpermute` takes as pad_offsets (None if nothing was filled up), and the rows of each expert."""
    if align_size < 1:
        raise ValueError(f"align_size must be at least 1, got {align_size}.")
    _check_map(inp, routing_map)
    counts = tokens_per_expert.to(inp.device, torch.long)
    padded = (counts + align_size - 1) // align_size * align_size
    table, offsets = _rows_by_expert(routing_map), None
    rows = table
    if not torch.equal(padded, counts):
        offsets = (padded - counts).cumsum(0) - (padded - counts)
        rows = torch.where(table >= 0, table + offsets, -1)
    total = int(padded.sum())
    return _permuted(inp, rows, total), _permuted_probs(probs, rows, total), table, offsets, padded


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Tokens in their old order: the sum of each token's rows, times merging_probs [tokens, experts or k] if given. Indices without
    probabilities: [tokens * k], not summed. restore_shape: is known from row_id_map. probs: an older name of merging_probs."""
    weights = probs if merging_probs is None else merging_probs
    if map_type == "index":
        rows = row_id_map.reshape(-1, 1) if weights is None else row_id_map.reshape(weights.shape)
    else:
        one_of("map_type", map_type, ("mask", "index"))
        rows = row_id_map if pad_offsets is None else torch.where(row_id_map >= 0, row_id_map + pad_offsets, -1)
    packed, columns = _packed(rows)
    x = _plain(inp)
    users = _sources(packed, x.shape[0]).unsqueeze(1)
    parts = _Rows.apply(x, packed.reshape(-1), users).reshape(*packed.shape, x.shape[1]).float()
    if weights is not None:
        # Of experts that a token does not go to nothing is read: programs divide by the sum of a token's probabilities, which may be 0.
        own = torch.where(packed >= 0, weights.gather(1, columns).float(), 0.0)
        parts = parts * own.unsqueeze(-1)
    return parts.sum(1).to(x.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """inp, cut into chunks of split_sizes rows, in the order of sorted_index."""
    return _sorted_chunks(_plain(inp), split_sizes, sorted_index)


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of inp and of probs [rows]."""
    order = (split_sizes, sorted_index)
    return _sorted_chunks(_plain(inp), *order), _sorted_chunks(probs, *order)


def _sorted_chunks(x: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    chunks = x.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


class _Aligned(nn.Module):
    """What rows of each group are a multiple of: align_size, or what the recipe in force needs."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, m_splits: Sequence[int]) -> list[int]:
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"m_splits must have {self.num_gemms} numbers, one a group, got {list(m_splits)}.")
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        return [-(-m // self.align_size) * self.align_size for m in m_splits]


class Fp8Padding(_Aligned):
    """Fills the rows of each group up by zeros, to a multiple of what the recipe needs. `GroupedLinear` does not need it."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """(rows, their number by group)."""
        padded = self._padded(m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        rows = inp.reshape(-1, inp.shape[-1]).split(list(m_splits))
        filled = [nn.functional.pad(x, (0, 0, 0, n - x.shape[0])) for x, n in zip(rows, padded, strict=True)]
        return torch.cat(filled), padded


class Fp8Unpadding(_Aligned):
    """Undoes `Fp8Padding`."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """m_splits: rows of each group before they were filled up."""
        padded = self._padded(m_splits)
        if padded == list(m_splits):
            return inp
        rows = inp.reshape(-1, inp.shape[-1]).split(padded)
        return torch.cat([x[:m] for x, m in zip(rows, m_splits, strict=True)])
