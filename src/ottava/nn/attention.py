"""`DotProductAttention`: softmax(q k^T) v over heads, for every layout and mask of TransformerEngine's module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.attention import attention
from ottava.nn import attention_fp8 as fp8
from ottava.nn import attention_mask as masks
from ottava.nn.attention_bias import added_to_scores, check_bias
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.attention_packed import attend_packed
from ottava.nn.attention_padding import unpacked, valid_of_batch
from ottava.nn.attention_request import (
    FORMATS,
    Request,
    Sequences,
    check_heads,
    check_tensors,
    refuse_context_parallel,
    refuse_what_is_not_offered,
)
from ottava.nn.base import default_device
from ottava.nn.follows_autocast import FollowsAutocast
from ottava.nn.parallel_module import join_meshes
from ottava.nn.random_replay import own_stream, perhaps_again
from ottava.nn.strategy import ALONE, Layout, Strategy, backend, local
from ottava.notices import warn_once

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")

_WHOLE = ((-1, -1), (-1, 0))  # windows that leave out nothing but what a causal mask does


class DotProductAttention(FollowsAutocast, torch.nn.Module):
    """Multi-head attention without its projections.

    Arguments:
        num_attention_heads: of the whole model; the tensors hold num_attention_heads / tp_size.
        kv_channels: channels of a head, or (of keys, of values).
        num_gqa_groups: heads of keys and values, each shared by num_attention_heads / num_gqa_groups queries.
        attention_dropout: probability of dropping an attention weight, in training.
        qkv_format: "sbhd", "bshd", or "thd" for sequences packed end to end.
        attn_mask_type: no_mask, padding, causal, padding_causal, causal_bottom_right, padding_causal_bottom_right, arbitrary.
        window_size: (left, right) keys around the diagonal that a query may see; -1 is no limit.
        bottom_right_diagonal: the corner that window and ALiBi count from, for masks whose type does not say.
        softmax_scale: 1 / sqrt(channels of a key) if not given.
        softmax_type: "vanilla"; "off-by-one" adds 1 to the sum; "learnable" adds exp(softmax_offset), a parameter a head.

    Inside `autocast` with a recipe that has `fp8_dpa=True` forward runs in FP8, where nothing is in its way; else a warning says what is.
    Not offered: context parallelism (cp_group) and return_max_logit; asking for them is an error.

    Example:
        >>> attend = DotProductAttention(num_attention_heads=4, kv_channels=16, num_gqa_groups=2)
        >>> q, kv = torch.randn(8, 1, 4, 16), torch.randn(8, 1, 2, 16)
        >>> attend(q, kv, kv).shape
        torch.Size([8, 1, 64])
    """

    softmax_offset: Tensor | None
    layouts = {"softmax_offset": Layout(0)}

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        *,
        device: torch.device | str | None = None,
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        super().__init__()
        if cp_group is not None or return_max_logit:
            raise ValueError("DotProductAttention offers neither context parallelism (cp_group) nor return_max_logit.")
        if not 0.0 <= attention_dropout <= 1.0:
            raise ValueError(f"attention_dropout is a probability, got {attention_dropout}.")
        tp_size = tp_size if tp_group is None else tp_group.size()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_heads(num_attention_heads, groups, tp_size)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = groups
        self.num_gqa_groups_per_partition = groups // tp_size
        self.heads_per_partition = num_attention_heads // tp_size
        key_channels, value_channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k = key_channels
        self.hidden_size_per_attention_head_v = value_channels
        self.attention_dropout = attention_dropout
        self.qkv_format = masks.one_of("qkv_format", qkv_format, FORMATS)
        self.attn_mask_type = masks.canonical_mask_type(attn_mask_type)
        masks.check_window(self.attn_mask_type, window_size)
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.sequence_parallel = sequence_parallel
        self.tp_size = tp_size
        self._ranks: Strategy = ALONE
        """Those that have other heads, once they are known. Nothing is communicated."""
        self.get_rng_state_tracker = get_rng_state_tracker
        self.layer_number = 1 if layer_number is None else layer_number
        self.attention_type = masks.one_of("attention_type", attention_type, ("self", "cross"))
        self.softmax_scale = 1.0 / math.sqrt(key_channels) if softmax_scale is None else softmax_scale
        self.softmax_type = masks.one_of("softmax_type", softmax_type, SOFTMAX_TYPES)
        self.name = name
        self._last_context = {}
        # "off-by-one" is a sink with logit 0: a constant, so it is not part of the state dict.
        offset = None
        if softmax_type != "vanilla":
            offset = torch.zeros(self.heads_per_partition, device=default_device(device), dtype=torch.float32)
        if softmax_type == "learnable":
            assert offset is not None
            self.softmax_offset = torch.nn.Parameter(offset)
        else:
            self.register_buffer("softmax_offset", offset, persistent=False)
        join_meshes(self, tp_group, tp_mesh, weight_mesh)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_context": {}}  # which may hold a process group

    @property
    def tp_group(self) -> Any:
        """The ranks that have other heads; None for one rank, or where they are not known."""
        return getattr(self._ranks, "group", None)

    @property
    def tp_rank(self) -> int:
        """This process's place among them."""
        return self._ranks.rank

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Checks the size, and keeps whose heads these are: each rank attends with heads of its own, so nothing is communicated."""
        size = 1 if tp_group is None else tp_group.size()
        if size != self.tp_size:
            raise ValueError(
                f"DotProductAttention has the heads of one of tp_size={self.tp_size} ranks, but the group has {size}: construct it with "
                f"tp_size={size}, or give set_device_mesh a mesh."
            )
        self._ranks = backend().strategy("column", tp_group, sequence_parallel=False)

    def set_device_mesh(self, tp_mesh: Any = None, weight_mesh: Any = None) -> None:
        """Keeps this rank's heads. The learnable softmax offset, one number a head, becomes a DTensor. weight_mesh: not needed."""
        if tp_mesh is None:
            return
        group = backend().group_of(tp_mesh)
        size, already_cut = tp_mesh.size(), self.tp_size == tp_mesh.size()
        if not already_cut:
            if self.tp_size != 1:
                raise ValueError(f"DotProductAttention has tp_size={self.tp_size}, but the mesh has {size} ranks.")
            check_heads(self.num_attention_heads, self.num_gqa_groups, size)
            self.heads_per_partition //= size
            self.num_gqa_groups_per_partition //= size
            self.tp_size = size
        self.set_tensor_parallel_group(group)
        if isinstance(self.softmax_offset, torch.nn.Parameter):
            backend().distribute(self, "softmax_offset", self.layouts["softmax_offset"], tp_mesh, already_cut)
        elif self.softmax_offset is not None and not already_cut:
            self.softmax_offset = self.softmax_offset[: self.heads_per_partition]  # a constant

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Only None is accepted: attention runs over whole sequences."""
        refuse_context_parallel(cp_group)

    def extra_repr(self) -> str:
        """Heads, mask and whatever differs from the plain case."""
        parts = [
            f"heads={self.heads_per_partition}",
            f"groups={self.num_gqa_groups_per_partition}",
            self.attn_mask_type,
        ]
        parts.append(self.qkv_format)
        if self.window_size is not None:
            parts.append(f"window={tuple(self.window_size)}")
        if self.attention_dropout:
            parts.append(f"dropout={self.attention_dropout}")
        if self.softmax_type != "vanilla":
            parts.append(f"softmax={self.softmax_type}")
        return ", ".join(parts)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | PackedDocuments | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        *,
        num_splits: int | None = 1,
        **others: Any,
    ) -> Tensor:
        """Attends; returns [s, b, h * d] for "sbhd", [b, s, h * d] for "bshd", [t, h * d] for "thd".

        attention_mask: bool, True is masked out; used by padding types and "arbitrary" only. Padding types take
        [b, 1, 1, s], or a pair (queries, keys); "arbitrary" what broadcasts to [b, h, s, t], or `PackedDocuments`.
        cu_seqlens_*: [b + 1] cumulative lengths of the real tokens, instead of a padding mask, and needed for "thd";
        cu_seqlens_*_padded: where sequences begin, if padding lies between them.
        max_seqlen_*: the longest sequence ("thd"); without it the lengths are read back from the device, and under
        torch.compile the number of tokens is taken, which costs memory.
        core_attention_bias: broadcastable to [b, h, s, t], added after scaling, or before it ("pre_scale_bias").
        alibi_slopes: [h] or [b, h], of this rank's heads, for core_attention_bias_type="alibi"; the usual ones if not given.
        checkpoint_core_attention: recompute in backward.
        fast_zero_fill and num_splits choose between equal ways elsewhere and change nothing here.
        """
        if inference_params is not None:
            raise ValueError(
                "DotProductAttention has no key-value cache: pass the whole sequence, without inference_params."
            )
        if others:
            refuse_what_is_not_offered(others)
        layout = masks.one_of("qkv_format", qkv_format or self.qkv_format, FORMATS)
        mask_type = masks.canonical_mask_type(attn_mask_type or self.attn_mask_type)
        window = masks.check_window(mask_type, self.window_size if window_size is None else window_size)
        corner = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        bottom_right = masks.is_bottom_right(mask_type, corner)
        q, k, v = query_layer, key_layer, value_layer
        channels = (self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v)
        check_tensors(q, k, v, layout, self.heads_per_partition, self.num_gqa_groups_per_partition, *channels)
        if core_attention_bias_type != "no_bias" or core_attention_bias is not None or alibi_slopes is not None:
            check_bias(core_attention_bias_type, core_attention_bias, alibi_slopes, self.heads_per_partition)
        if core_attention_bias_type == "alibi" and alibi_slopes is None:
            alibi_slopes = self._own_slopes(q.device)
        sequences = Sequences(
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, pad_between_seqs
        )  # fmt: skip
        request = Request(
            layout, mask_type, attention_mask, window, bottom_right, sequences, core_attention_bias_type, core_attention_bias,
            alibi_slopes, self.softmax_scale, checkpoint_core_attention,
        )  # fmt: skip
        asked = fp8.asked_for(self)
        if asked is not None:
            asked = asked._replace(obstacle=self._beyond_fp8(core_attention_bias_type, window))
        if layout == "thd" or isinstance(attention_mask, PackedDocuments):
            maskless = q.is_cuda and self._needs_no_mask(core_attention_bias_type, window)
            out = attend_packed(request, q, k, v, asked, maskless)
            if out is not None:
                return out
            asked = None  # decided against
        return self._attend_padded(request, q, k, v, asked)

    # ------------------------------------------------------------------------------------------------------------ the parts

    def _own_slopes(self, device: torch.device) -> Tensor:
        """ALiBi's usual slopes, of this rank's heads."""
        slopes, count = masks.default_alibi_slopes(self.num_attention_heads, device), self.heads_per_partition
        if self._ranks.size != self.tp_size:
            raise ValueError(
                f"ALiBi has another slope for each of {self.num_attention_heads} heads, and this DotProductAttention, constructed with "
                f"tp_size={self.tp_size}, does not know which {count} it has: call set_tensor_parallel_group(group), or pass alibi_slopes."
            )
        return slopes[self.tp_rank * count : (self.tp_rank + 1) * count]

    def _needs_no_mask(self, bias_type: str, window: tuple[int, int]) -> bool:
        """Whether kernels for packed sequences do it: they know one mask, and neither dropout nor what is added to scores."""
        maskless = bias_type == "no_bias" and self.softmax_type == "vanilla" and window in _WHOLE
        return maskless and not (self.training and self.attention_dropout > 0.0)

    def _beyond_fp8(self, bias_type: str, window: tuple[int, int]) -> str | None:
        """What FP8 attention does not do, if it is asked for."""
        if self.training and self.attention_dropout > 0.0:
            return f"attention_dropout is {self.attention_dropout}"
        if bias_type != "no_bias":
            return f"core_attention_bias_type is {bias_type!r}"
        if self.softmax_type != "vanilla":
            return f"softmax_type is {self.softmax_type!r}"
        # Without its size: a compiler that has met other windows takes the numbers for symbols, which have no text.
        return None if window in _WHOLE else "there is a window"

    def _attend_padded(self, request: Request, q: Tensor, k: Tensor, v: Tensor, asked: fp8.Asked | None) -> Tensor:
        """With a mask, where one is needed. Packed sequences are spread over a batch, and padded. asked: see `attend_packed`."""
        valid: masks.Valid | None
        unpack: masks.Packed | None = None
        tokens = q.shape[0]
        if request.layout == "thd":
            q, k, v, valid, unpack = unpacked(request, q, k, v)
        else:
            valid = valid_of_batch(request, q, k)
        batch_first = request.layout != "sbhd"
        seq_dim = 1 if batch_first else 0
        queries, keys = q.shape[seq_dim], k.shape[seq_dim]
        causal, allowed = _mask(request, queries, keys, valid, q.device)
        bias = added_to_scores(request, queries, keys, valid, q.device)
        if asked is not None:
            obstacle = asked.obstacle
            if allowed is not None or valid is not None:
                obstacle = obstacle or f"there is a mask of the type {request.mask_type!r}"
            options: dict[str, Any] = {"causal": causal, "batch_first": batch_first, "scale": self.softmax_scale}
            if fp8.runs(obstacle or fp8.unfit(q, k, v, kind="dense", queries=queries, **options)):
                return fp8.attend(asked.scales, q, k, v, None, options, request.recompute).flatten(-2)
        out = self._attend(q, k, v, causal, batch_first, allowed, bias, request.recompute)
        if unpack is not None:
            out = unpack.gather(out, tokens)
        elif valid is not None:
            real = valid.queries if batch_first else valid.queries.t()
            out = torch.where(real[:, :, None, None], out, out.new_zeros(()))
        return out.flatten(-2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        batch_first: bool,
        allowed: Tensor | None,
        bias: Tensor | None,
        recompute: bool,
    ) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        tracker: Any = None
        if dropout > 0.0 and self.get_rng_state_tracker is not None:
            tracker = own_stream(self.get_rng_state_tracker(), self.sequence_parallel)

        def core(
            q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, sink: Tensor | None
        ) -> Tensor:
            return attention(
                q, k, v, scale=self.softmax_scale, causal=causal, batch_first=batch_first, allowed=allowed, bias=bias,
                sink=sink, dropout=dropout,
            )  # fmt: skip

        def in_own_stream(*args: Any) -> Tensor:
            with tracker.fork():
                return core(*args)

        offset = None if self.softmax_offset is None else local(self.softmax_offset)
        return perhaps_again(
            core if tracker is None else in_own_stream, recompute, q, k, v, allowed, bias, offset, tracker=tracker
        )


def _mask(
    request: Request, queries: int, keys: int, valid: masks.Valid | None, device: torch.device
) -> tuple[bool, Tensor | None]:
    """(causal, allowed) as `masks.build` gives them."""
    if isinstance(request.mask, PackedDocuments) and request.window == (-1, -1):
        return False, request.mask.allowed
    arbitrary = None
    if request.mask is not None or request.mask_type == "arbitrary":
        arbitrary = _arbitrary(request.mask_type, request.mask)
    return masks.build(request.window, request.bottom_right, queries, keys, valid, arbitrary, device)


def _arbitrary(mask_type: str, attention_mask: Any) -> Tensor | None:
    """The user's own mask, bool, True for masked out."""
    if isinstance(attention_mask, PackedDocuments):
        return ~attention_mask.allowed
    if mask_type != "arbitrary":
        if attention_mask is not None and "padding" not in mask_type and not torch.compiler.is_compiling():
            warn_once(
                f"ottava: attention_mask has no effect with attn_mask_type {mask_type!r}, only with padding or 'arbitrary'."
            )
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype is not torch.bool or attention_mask.dim() != 4:
        raise ValueError(
            "attn_mask_type 'arbitrary' needs attention_mask, a bool tensor broadcastable to [batch, heads, queries, keys] "
            "with True for masked out."
        )
    return attention_mask
