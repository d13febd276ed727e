"""`DotProductAttention`: softmax(q k^T) v over heads, for every layout and mask of TransformerEngine's module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ottava.kernels import attention_backend as backends
from ottava.kernels.attention import attention
from ottava.kernels.attention_documents import document_attention
from ottava.kernels.attention_fp8 import fp8_attention
from ottava.kernels.attention_packed import packed_attention
from ottava.nn import attention_fp8 as fp8
from ottava.nn import attention_mask as masks
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.base import default_device
from ottava.nn.follows_autocast import FollowsAutocast
from ottava.nn.random_replay import own_stream, replayed
from ottava.nn.strategy import Layout, backend, local
from ottava.notices import warn_once
from ottava.quant.quantization import AttentionScales

FORMATS = ("sbhd", "bshd", "thd")
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")

_WHOLE = ((-1, -1), (-1, 0))  # windows that leave out nothing but what a causal mask does

# Arguments of later TransformerEngine releases, with the value that asks for nothing.
_NOT_OFFERED: dict[str, Any] = {
    "fp8_output": False,
    "bf16_backward": False,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
    "qkv_layer": None,
    "kv_layer": None,
    "g": None,
    "beta": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
}


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
        self.set_device_mesh(tp_mesh, weight_mesh)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_context": {}}  # which may hold a process group

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Checks the size: each rank attends with heads of its own, so nothing is communicated."""
        size = 1 if tp_group is None else tp_group.size()
        if size != self.tp_size:
            raise ValueError(
                f"DotProductAttention has the heads of one of tp_size={self.tp_size} ranks, but the group has {size}: construct it with "
                f"tp_size={size}, or give set_device_mesh a mesh."
            )

    def set_device_mesh(self, tp_mesh: Any = None, weight_mesh: Any = None) -> None:
        """Keeps this rank's heads. The learnable softmax offset, one number a head, becomes a DTensor. weight_mesh: not needed."""
        if tp_mesh is None:
            return
        backend().group_of(tp_mesh)
        size, already_cut = tp_mesh.size(), self.tp_size == tp_mesh.size()
        if not already_cut:
            if self.tp_size != 1:
                raise ValueError(f"DotProductAttention has tp_size={self.tp_size}, but the mesh has {size} ranks.")
            check_heads(self.num_attention_heads, self.num_gqa_groups, size)
            self.heads_per_partition //= size
            self.num_gqa_groups_per_partition //= size
            self.tp_size = size
        if isinstance(self.softmax_offset, torch.nn.Parameter):
            backend().distribute(self, "softmax_offset", self.layouts["softmax_offset"], tp_mesh, already_cut)
        elif self.softmax_offset is not None and not already_cut:
            self.softmax_offset = self.softmax_offset[: self.heads_per_partition]  # a constant

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
        alibi_slopes: [h] or [b, h], for core_attention_bias_type="alibi". checkpoint_core_attention: recompute in backward.
        fast_zero_fill and num_splits choose between equal ways elsewhere and change nothing here.
        """
        if inference_params is not None:
            raise ValueError(
                "DotProductAttention has no key-value cache: pass the whole sequence, without inference_params."
            )
        for key, value in others.items():
            if masks.one_of("DotProductAttention: argument", key, tuple(_NOT_OFFERED)) and value != _NOT_OFFERED[key]:
                raise ValueError(f"DotProductAttention does not offer {key}={value!r}; leave it out.")
        layout = masks.one_of("qkv_format", qkv_format or self.qkv_format, FORMATS)
        mask_type = masks.canonical_mask_type(attn_mask_type or self.attn_mask_type)
        window = masks.check_window(mask_type, self.window_size if window_size is None else window_size)
        corner = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        bottom_right = masks.is_bottom_right(mask_type, corner)
        self._check_heads_of(query_layer, key_layer, value_layer, layout)
        q, k, v = query_layer, key_layer, value_layer
        scales = fp8.asked_for(self)  # None from where FP8 is decided against
        special = self._special(core_attention_bias_type, window) if scales is not None else None
        # What kernels for packed sequences do not do: they know one mask, and neither dropout nor what is added to scores.
        plain = core_attention_bias_type == "no_bias" and self.softmax_type == "vanilla" and window in _WHOLE
        plain = plain and q.is_cuda and not (self.training and self.attention_dropout > 0.0)
        if isinstance(attention_mask, PackedDocuments):
            self._check_documents(attention_mask, mask_type, layout, q, k)
            if scales is not None:
                out = self._documents_fp8(scales, q, k, v, attention_mask, layout, special, checkpoint_core_attention)
                if out is not None:
                    return out
                scales = None
            if plain and backends.varlen_fits(q, k, v):
                return self._attend_documents(q, k, v, attention_mask, layout, checkpoint_core_attention)
        if layout == "thd" and scales is not None and "padding" in mask_type and attention_mask is None:
            special = special or self._special_packing(
                mask_type, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, pad_between_seqs
            )
            out = self._packed_fp8(scales, q, k, v, cu_seqlens_q, max_seqlen_q, special, checkpoint_core_attention)
            if out is not None:
                return out
            scales = None
        packs = cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None and not pad_between_seqs
        level = bottom_right or cu_seqlens_q is cu_seqlens_kv or "causal" not in mask_type  # which corner: the same
        if layout == "thd" and plain and packs and level and attention_mask is None and "padding" in mask_type:
            ends = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
            out = self._attend_packed(q, k, v, ends, "causal" in mask_type, checkpoint_core_attention)
            if out is not None:
                return out
        valid: masks.Valid | None
        unpack: masks.Packed | None = None
        if layout == "thd":
            padding = (attention_mask, pad_between_seqs, mask_type)
            offsets = (
                cu_seqlens_q,
                cu_seqlens_kv,
                cu_seqlens_q_padded,
                cu_seqlens_kv_padded,
                max_seqlen_q,
                max_seqlen_kv,
            )
            q, k, v, valid, unpack = self._unpacked(q, k, v, padding, offsets)
        else:
            valid = self._padding(mask_type, attention_mask, cu_seqlens_q, cu_seqlens_kv, q, k, layout)
        batch_first = layout != "sbhd"
        seq_dim = 1 if batch_first else 0
        queries, keys = q.shape[seq_dim], k.shape[seq_dim]

        causal, allowed = False, None
        if isinstance(attention_mask, PackedDocuments) and window == (-1, -1):
            allowed = attention_mask.allowed
        else:
            arbitrary = self._arbitrary(mask_type, attention_mask)
            causal, allowed = masks.build(window, bottom_right, queries, keys, valid, arbitrary, q.device)
        kind = core_attention_bias_type
        bias = self._bias(kind, core_attention_bias, alibi_slopes, queries, keys, bottom_right, valid, q)
        if scales is not None:
            if allowed is not None or valid is not None:
                special = special or f"there is a mask of the type {mask_type!r}"
            options: dict[str, Any] = {"causal": causal, "batch_first": batch_first, "scale": self.softmax_scale}
            special = special or fp8.unfit(q, k, v, kind="dense", queries=queries, **options)
            if fp8.runs(special):
                return self._attend_fp8(scales, q, k, v, None, options, checkpoint_core_attention).flatten(-2)
        out = self._attend(q, k, v, causal, batch_first, allowed, bias, checkpoint_core_attention)
        if unpack is not None:
            out = unpack.gather(out, query_layer.shape[0])
        elif valid is not None:
            real = valid.queries if batch_first else valid.queries.t()
            out = torch.where(real[:, :, None, None], out, out.new_zeros(()))
        return out.flatten(-2)

    # ------------------------------------------------------------------------------------------------------------ the parts

    def _check_documents(self, documents: PackedDocuments, mask_type: str, layout: str, q: Tensor, k: Tensor) -> None:
        if mask_type != "arbitrary" or layout == "thd":
            raise ValueError(
                f"PackedDocuments goes with attn_mask_type 'arbitrary' and qkv_format 'sbhd' or 'bshd', got {mask_type!r} and {layout!r}."
            )
        seq_dim, batch_dim = (1, 0) if layout == "bshd" else (0, 1)
        documents.check(q.shape[batch_dim], q.shape[seq_dim], k.shape[seq_dim])

    def _special(self, bias_type: str, window: tuple[int, int]) -> str | None:
        """What FP8 attention does not do, if it is asked for."""
        if self.training and self.attention_dropout > 0.0:
            return f"attention_dropout is {self.attention_dropout}"
        if bias_type != "no_bias":
            return f"core_attention_bias_type is {bias_type!r}"
        if self.softmax_type != "vanilla":
            return f"softmax_type is {self.softmax_type!r}"
        # Without its size: a compiler that has met other windows takes the numbers for symbols, which have no text.
        return None if window in _WHOLE else "there is a window"

    def _special_packing(
        self, mask_type: str, cu_q: Tensor | None, cu_kv: Tensor | None, *padding: Tensor | bool | None
    ) -> str | None:
        """The same for "thd": it does causal attention of sequences to themselves, end to end."""
        if any(x is not None and x is not False for x in padding):
            return "there is padding between packed sequences"
        if "causal" not in mask_type:
            return f"packed sequences have the mask type {mask_type!r}, and it knows causal ones"
        return None if cu_q is cu_kv else "cu_seqlens_q and cu_seqlens_kv are two tensors: pass one for both"

    def _attend_fp8(
        self,
        scales: AttentionScales,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: tuple[Tensor, Tensor] | None,
        options: dict[str, Any],
        recompute: bool,
    ) -> Tensor:
        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return fp8_attention(q, k, v, bounds=bounds, **options, **scales._asdict())

        if q.is_cuda and not torch.compiler.is_compiling():
            backends.say_once(
                f"ottava: attention with heads of {q.shape[-1]} channels runs in FP8, its backward in {q.dtype}."
            )
        return _perhaps_again(core, recompute, q, k, v)

    def _documents_fp8(
        self, scales: AttentionScales, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, layout: str,
        special: str | None, recompute: bool,
    ) -> Tensor | None:  # fmt: skip
        """Packed documents in FP8, [s, b, h * d] or [b, s, h * d]; None where it does not run."""
        options: dict[str, Any] = {"causal": True, "batch_first": layout == "bshd", "scale": self.softmax_scale}
        special = special or fp8.unfit(q, k, v, kind="packed", queries=documents.length, **options)
        if not fp8.runs(special):
            return None
        return self._attend_fp8(scales, q, k, v, documents.bounds(), options, recompute).flatten(-2)

    def _packed_fp8(
        self, scales: AttentionScales, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, longest: int | None,
        special: str | None, recompute: bool,
    ) -> Tensor | None:  # fmt: skip
        """ "thd" in FP8, [t, h * d]; None where it does not run. Tokens after the last sequence give 0."""
        options: dict[str, Any] = {"causal": True, "batch_first": True, "scale": self.softmax_scale}
        special = special or fp8.unfit(q, k, v, kind="packed", queries=q.shape[0], **options)
        if not fp8.runs(special):
            return None
        masks.packed(offsets, None, q.shape[0] if longest is None else longest, q.shape[0], "q")  # names wrong ones
        assert offsets is not None
        real = masks.before(offsets[-1], q)
        # What lies after the last sequence may be anything, and would decide on the scales.
        q, k, v = (torch.where(real, x, x.new_zeros(()))[None] for x in (q, k, v))
        bounds = masks.bounds_of(offsets, q.shape[1])
        out = self._attend_fp8(scales, q, k, v, bounds, options, recompute)[0]
        return torch.where(real, out, out.new_zeros(())).flatten(-2)

    def _attend_documents(
        self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, layout: str, recompute: bool
    ) -> Tensor:
        """Without a mask, on a GPU: [s, b, h * d] or [b, s, h * d]."""
        batch_first = layout == "bshd"
        backend = documents_backend(q, k, v, documents)
        if backend == "triton":
            starts, ends = documents.bounds()

            def by_bounds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return document_attention(q, k, v, starts, ends, scale=self.softmax_scale, batch_first=batch_first)

            return _perhaps_again(by_bounds, recompute, q, k, v).flatten(-2)
        offsets, longest = documents.cu_seqlens, documents.longest
        assert offsets is not None and longest is not None

        def by_lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Rows end to end. With one row, or the batch first, a view; else a copy of each, 0.1 ms a layer for 4x4096 at 2048 channels.
            flat = [(x if batch_first else x.transpose(0, 1)).reshape(-1, *x.shape[2:]) for x in (q, k, v)]
            out = packed_attention(
                flat[0], flat[1], flat[2], offsets, offsets, longest, longest,
                scale=self.softmax_scale, causal=True, backend=backend,
            ).view(documents.batch, documents.length, *q.shape[2:])  # fmt: skip
            return out if batch_first else out.transpose(0, 1)

        return _perhaps_again(by_lengths, recompute, q, k, v).flatten(-2)

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Any, ...], causal: bool, recompute: bool
    ) -> Tensor | None:
        """ "thd" by its cumulative lengths; None where the kernel does not fit. Tokens after the last sequence give 0."""
        backend = backends.packed_backend(q, k, v)
        if backend is None:
            return None
        cu_q, cu_kv, max_q, max_kv = ends
        of_q = masks.packed(cu_q, None, max_q, q.shape[0], "q")
        of_k = of_q if cu_kv is cu_q else masks.packed(cu_kv, None, max_kv, k.shape[0], "kv")
        if of_q.lengths.shape != of_k.lengths.shape:
            return None  # the padded way explains it
        offsets_q, offsets_k = cu_q.to(torch.int32), cu_kv.to(torch.int32)

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # No kernel writes what lies after the last sequence, in forward or backward: whatever memory held would be a gradient.
            real_q, real_k = masks.before(offsets_q[-1], q), masks.before(offsets_k[-1], k)
            q, k, v = (torch.where(r, x, x.new_zeros(())) for r, x in ((real_q, q), (real_k, k), (real_k, v)))
            out = packed_attention(
                q, k, v, offsets_q, offsets_k, of_q.longest, of_k.longest,
                scale=self.softmax_scale, causal=causal, backend=backend,
            )  # fmt: skip
            return torch.where(real_q, out, out.new_zeros(()))

        return _perhaps_again(core, recompute, q, k, v).flatten(-2)

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
        tracker = None
        if dropout > 0.0 and self.get_rng_state_tracker is not None:
            tracker = own_stream(self.get_rng_state_tracker(), self.sequence_parallel)

        def core(
            q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, sink: Tensor | None
        ) -> Tensor:
            with contextlib.nullcontext() if tracker is None else tracker.fork():
                return attention(
                    q, k, v, scale=self.softmax_scale, causal=causal, batch_first=batch_first, allowed=allowed, bias=bias,
                    sink=sink, dropout=dropout,
                )  # fmt: skip

        offset = None if self.softmax_offset is None else local(self.softmax_offset)
        args = (q, k, v, allowed, bias, offset)
        if not recompute or not torch.is_grad_enabled():
            return core(*args)
        if tracker is None:
            return checkpoint(core, *args, use_reentrant=False)
        return checkpoint(core, *args, use_reentrant=False, context_fn=lambda: replayed(tracker))

    def _check_heads_of(self, q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
        """Names the tensor whose shape does not fit the module, rather than leaving it to a matrix product."""
        dims = 3 if layout == "thd" else 4
        wanted = (
            ("query_layer", q, self.heads_per_partition, self.hidden_size_per_attention_head_k),
            ("key_layer", k, self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head_k),
            ("value_layer", v, self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head_v),
        )
        for what, x, heads, channels in wanted:
            if x.dim() != dims or tuple(x.shape[-2:]) != (heads, channels):
                raise ValueError(
                    f"{what} for qkv_format {layout!r} must have {dims} dimensions ending in [{heads}, {channels}] (heads, channels), "
                    f"got {tuple(x.shape)}."
                )
        batch_dim = 1 if layout == "sbhd" else 0
        if k.shape[:-2] != v.shape[:-2] or (layout != "thd" and q.shape[batch_dim] != k.shape[batch_dim]):
            raise ValueError(
                f"query, key and value must agree in batch, key and value in length: {layout} got {tuple(q.shape)}, "
                f"{tuple(k.shape)}, {tuple(v.shape)}."
            )
        if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
            raise ValueError(
                f"query, key and value must have one dtype and device, got {q.dtype} on {q.device}, {k.dtype} on {k.device}, "
                f"{v.dtype} on {v.device}."
            )

    def _unpacked(
        self, q: Tensor, k: Tensor, v: Tensor, padding: tuple[Any, bool | None, str], offsets: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor, masks.Valid, masks.Packed]:
        """Packed sequences [t, h, d] as a padded batch [b, s, h, d], which tokens of it are real, and the way back."""
        attention_mask, pad_between_seqs, mask_type = padding
        cu_q, cu_kv, cu_q_padded, cu_kv_padded, max_q, max_kv = offsets
        if "padding" not in mask_type:
            raise ValueError(
                f"qkv_format 'thd' needs a padding mask type, got {mask_type!r}: use 'padding_causal' or 'padding'."
            )
        if attention_mask is not None:
            raise ValueError(
                "qkv_format 'thd' takes its padding from cu_seqlens_q and cu_seqlens_kv, not from attention_mask."
            )
        if pad_between_seqs and (cu_q_padded is None or cu_kv_padded is None):
            raise ValueError("pad_between_seqs=True needs cu_seqlens_q_padded and cu_seqlens_kv_padded.")
        of_q = masks.packed(cu_q, cu_q_padded, max_q, q.shape[0], "q")
        of_k = masks.packed(cu_kv, cu_kv_padded, max_kv, k.shape[0], "kv")
        if of_q.lengths.shape != of_k.lengths.shape:
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_kv must describe as many sequences, got {of_q.lengths.numel()} and "
                f"{of_k.lengths.numel()}."
            )
        q, k, v = of_q.spread(q), of_k.spread(k), of_k.spread(v)
        valid = masks.valid_from_lengths(q.shape[1], k.shape[1], of_q.lengths, of_k.lengths, cu_q is cu_kv)
        return q, k, v, valid, of_q

    def _padding(
        self,
        mask_type: str,
        attention_mask: Tensor | tuple[Tensor, Tensor] | PackedDocuments | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
        q: Tensor,
        k: Tensor,
        layout: str,
    ) -> masks.Valid | None:
        """Which tokens of a padded batch are real; None where the mask type has no padding."""
        if "padding" not in mask_type:
            if cu_seqlens_q is not None or cu_seqlens_kv is not None:
                raise ValueError(
                    f"cu_seqlens are given, but attn_mask_type {mask_type!r} has no padding: use a padding mask type."
                )
            return None
        seq_dim, batch_dim = (1, 0) if layout == "bshd" else (0, 1)
        queries, keys, batch = q.shape[seq_dim], k.shape[seq_dim], q.shape[batch_dim]
        assert not isinstance(attention_mask, PackedDocuments)  # which goes with "arbitrary" only
        if attention_mask is not None:
            if cu_seqlens_q is not None or cu_seqlens_kv is not None:
                raise ValueError(
                    "padding is given twice: pass either attention_mask or cu_seqlens_q and cu_seqlens_kv."
                )
            return masks.valid_from_masks(attention_mask, batch, queries, keys)
        if cu_seqlens_q is None or cu_seqlens_kv is None:
            raise ValueError(
                f"attn_mask_type {mask_type!r} needs attention_mask, or cu_seqlens_q and cu_seqlens_kv, to know the padding."
            )
        if cu_seqlens_q.shape != (batch + 1,) or cu_seqlens_kv.shape != (batch + 1,):
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_kv must be [batch + 1] = [{batch + 1}], got {tuple(cu_seqlens_q.shape)} and "
                f"{tuple(cu_seqlens_kv.shape)}."
            )
        same = cu_seqlens_q is cu_seqlens_kv
        return masks.valid_from_lengths(
            queries, keys, masks.lengths_of(cu_seqlens_q), masks.lengths_of(cu_seqlens_kv), same
        )

    def _arbitrary(self, mask_type: str, attention_mask: Any) -> Tensor | None:
        """The user's own mask, bool, True for masked out."""
        if isinstance(attention_mask, PackedDocuments):
            return ~attention_mask.allowed
        if mask_type != "arbitrary":
            if attention_mask is not None and "padding" not in mask_type and not torch.compiler.is_compiling():
                warn_once(
                    f"ottava: attention_mask has no effect with attn_mask_type {mask_type!r}, only with padding or 'arbitrary'."
                )
            return None
        if (
            not isinstance(attention_mask, Tensor)
            or attention_mask.dtype is not torch.bool
            or attention_mask.dim() != 4
        ):
            raise ValueError(
                "attn_mask_type 'arbitrary' needs attention_mask, a bool tensor broadcastable to [batch, heads, queries, keys] "
                "with True for masked out."
            )
        return attention_mask

    def _bias(
        self,
        kind: str,
        bias: Tensor | None,
        slopes: Tensor | None,
        queries: int,
        keys: int,
        bottom_right: bool,
        valid: masks.Valid | None,
        q: Tensor,
    ) -> Tensor | None:
        """What is added to the scaled scores, broadcastable to [b, h, s, t]."""
        masks.one_of("core_attention_bias_type", kind, BIAS_TYPES)
        if (bias is not None) != (kind in ("pre_scale_bias", "post_scale_bias")):
            raise ValueError(
                f"core_attention_bias_type {kind!r} {'takes no' if bias is not None else 'needs a'} core_attention_bias."
            )
        if slopes is not None and kind != "alibi":
            raise ValueError(f"alibi_slopes are given, but core_attention_bias_type is {kind!r}: use 'alibi'.")
        if kind == "alibi":
            if slopes is None:
                slopes = masks.default_alibi_slopes(self.num_attention_heads, q.device)
            relative = masks.relative_positions(queries, keys, bottom_right, valid, q.device)
            return masks.alibi_bias(slopes, relative)
        if bias is not None and bias.dim() != 4:
            raise ValueError(
                f"core_attention_bias must be broadcastable to [batch, heads, queries, keys], got {tuple(bias.shape)}."
            )
        return bias * self.softmax_scale if kind == "pre_scale_bias" and bias is not None else bias


def documents_backend(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments) -> str:
    """The kernel for packed documents: "triton" where the host does not know their lengths, or when it is asked for."""
    if torch.compiler.is_compiling():
        return "triton"
    chosen = "triton"
    if documents.cu_seqlens is not None and backends.forced() != "triton":
        chosen = backends.packed_backend(q, k, v) or "triton"
    backends.say_once(f"ottava: attention of packed documents with heads of {q.shape[-1]} channels uses {chosen}.")
    return chosen


def _perhaps_again(core: Callable[..., Tensor], recompute: bool, *args: Tensor) -> Tensor:
    """core(*args), which backward does again instead of keeping what it made, where that is asked for."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(core, *args, use_reentrant=False)
    return core(*args)


def check_heads(heads: int, groups: int, tp_size: int) -> None:
    """Heads must divide evenly into groups, and both over the tensor-parallel ranks."""
    if heads <= 0 or groups <= 0 or heads % groups:
        raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_gqa_groups ({groups}).")
    if heads % tp_size or groups % tp_size:
        raise ValueError(
            f"num_attention_heads ({heads}) and num_gqa_groups ({groups}) must be multiples of the tensor-parallel size ({tp_size})."
        )
