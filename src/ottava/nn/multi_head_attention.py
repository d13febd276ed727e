"""`MultiheadAttention`: projections to queries, keys and values, attention, and the projection back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ottava.kernels import attention_backend as backends
from ottava.nn import attention_mask as masks
from ottava.nn.attention import DotProductAttention
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.attention_packed import documents_backend
from ottava.nn.attention_request import FORMATS, check_heads, refuse_context_parallel
from ottava.nn.draw import InitMethod
from ottava.nn.layernorm import LayerNorm, RMSNorm
from ottava.nn.layernorm_linear import LayerNormLinear
from ottava.nn.linear import Linear
from ottava.nn.options import part_name, pick, split_names
from ottava.nn.parallel_module import join_meshes
from ottava.nn.qk_norm import qk_norms
from ottava.nn.rotary import apply_rotary_pos_emb, split_qkv_rope
from ottava.nn.strategy import Layout

Freqs = Tensor | tuple[Tensor, Tensor]

# Which arguments go to which part, by name.
_PROJECTION = (
    "fuse_wgrad_accumulation", "tp_group", "tp_size", "get_rng_state_tracker", "sequence_parallel", "params_dtype", "device", "bias",
    "recompute",
)  # fmt: skip
_NORM = (
    "normalization", "zero_centered_gamma", "return_layernorm_output", "ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_ag",
    "ub_overlap_rs_dgrad",
)  # fmt: skip
_CORE = (
    "num_attention_heads", "attention_dropout", "qkv_format", "bottom_right_diagonal", "sequence_parallel", "get_rng_state_tracker",
    "attention_type", "softmax_type", "device",
)  # fmt: skip


class MultiheadAttention(torch.nn.Module):
    """Self- or cross-attention with its projections. Arguments are TransformerEngine's; the ones that need a word:

    Arguments:
        fuse_qkv_params: one weight for queries, keys and values (`qkv.weight`) instead of three (`qkv.query_weight`, ...).
        qkv_weight_interleaved: rows of the fused weight are [queries, key, value] for each group, instead of [q | k | v].
        input_layernorm: normalize the input; the projection is then `layernorm_qkv` (cross-attention: `layernorm_query`).
        return_bias: return the output projection's bias instead of adding it; return_layernorm_output: also the norm's output.
        qk_norm_type: None, "RMSNorm", "LayerNorm" or "L2Normalization" of queries and keys, head by head, after the rotary
            embedding or before it (`qk_norm_before_rope`).
        seq_length, micro_batch_size: accepted; nothing here needs warming up.
        recompute: "selective" keeps less for backward, see `LayerNormLinear` and `Linear`.

    Example:
        >>> block = MultiheadAttention(64, 4, num_gqa_groups=2, attention_dropout=0.0, device="cpu")
        >>> block(torch.randn(8, 1, 64)).shape
        torch.Size([8, 1, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        recompute: str = "none",
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        tp_size = tp_size if tp_group is None else tp_group.size()
        given = dict(locals())  # the arguments, before anything else has a name here
        super().__init__()
        self.attention_type = masks.one_of("attention_type", attention_type, ("self", "cross"))
        self.qkv_format = masks.one_of("qkv_format", qkv_format, FORMATS)
        self.attn_mask_type = masks.canonical_mask_type(attn_mask_type)
        self.window_size = window_size
        self.layer_number = _check_layer_number(layer_number)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_heads(num_attention_heads, groups, tp_size)
        channels = kv_channels or head_channels(hidden_size, num_attention_heads)
        self.hidden_size = hidden_size
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        # Without set_parallel_mode every rank has all heads.
        split = tp_size if set_parallel_mode else 1
        self.heads_per_partition, self.groups_per_partition = num_attention_heads // split, groups // split
        self.hidden_size_per_attention_head = channels
        self.hidden_size_q, self.hidden_size_kv = channels * num_attention_heads, channels * groups
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.fuse_qkv_params = fuse_qkv_params
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        self.name = name

        into: dict[str, Any] = {  # the projections of the input: column parallel
            **pick(given, _PROJECTION),
            "init_method": init_method,
            "parallel_mode": "column" if set_parallel_mode else None,
        }
        norm = {**pick(given, _NORM), "eps": layernorm_epsilon, "ub_name": "qkv"}
        # Parts in TransformerEngine's order: optimizers keep their state by position.
        self.q_norm, self.k_norm = qk_norms(qk_norm_type, channels, qk_norm_eps, params_dtype, device)
        if attention_type == "self":
            self._make_qkv(into, norm)
        else:
            self._make_query_and_key_value(into, norm)
        self.core_attention = DotProductAttention(
            kv_channels=channels,
            num_gqa_groups=groups,
            tp_size=split,
            layer_number=self.layer_number,
            **pick(given, _CORE),
        )
        self.proj = Linear(
            self.hidden_size_q,
            hidden_size,
            init_method=output_layer_init_method,
            parallel_mode="row" if set_parallel_mode else None,
            ub_name="proj",
            name=part_name(name, "proj"),
            **pick(given, (*_PROJECTION, "return_bias", "ub_overlap_ag", "ub_overlap_rs")),
        )
        self.proj.input_is_kept = self.qkv_format != "thd"
        if set_parallel_mode:
            self._spread_heads()
        join_meshes(self, tp_group, tp_mesh, weight_mesh)

    def _spread_heads(self) -> None:
        """Tells the parts what ranks with different heads hold of them."""
        if self.fuse_qkv_params and not self.qkv_weight_interleaved:  # [q | k | v]: each is split by itself
            keys = {"key": self.hidden_size_kv, "value": self.hidden_size_kv}
            if self.attention_type == "self":
                _split_rows(self._input_projection(), {"query": self.hidden_size_q, **keys})
            else:
                _split_rows(self.key_value, keys)
        for norm in (self.q_norm, self.k_norm):
            if isinstance(norm, LayerNorm | RMSNorm):
                norm.spreads_heads = True

    def _input_projection(self) -> LayerNormLinear | Linear:
        """What makes queries (and, in self-attention, keys and values) from the input."""
        if self.attention_type == "self":
            return self.layernorm_qkv if self.input_layernorm else self.qkv
        return self.layernorm_query if self.input_layernorm else self.query_layer

    def set_parallel_mode(self) -> None:
        """What the constructor's `set_parallel_mode` asks for, later: whole weights will be split by `set_device_mesh`."""
        if self.proj.parallel.mode is not None:
            return
        column = [self._input_projection()] + ([self.key_value] if self.attention_type == "cross" else [])
        for module in column:
            module.parallel.mode = "column"
            module.layouts.update({n: Layout(0) for n in [*module.weight_names, *module.bias_names]})
        self.proj.parallel.mode = "row"
        self.proj.layouts["weight"] = Layout(1)
        self._spread_heads()

    def _born_fused(self, into: dict[str, Any]) -> bool:
        """Whether q, k and v are one parameter: not where ranks split each by itself, since they lie one under the other."""
        return self.fuse_qkv_params and (self.qkv_weight_interleaved or into["parallel_mode"] is None)

    def _make_qkv(self, into: dict[str, Any], norm: dict[str, Any]) -> None:
        """One projection for queries, keys and values."""
        width = self.hidden_size_q + 2 * self.hidden_size_kv
        parts = {"query": self.hidden_size_q, "key": self.hidden_size_kv, "value": self.hidden_size_kv}
        split = None if self._born_fused(into) else parts
        if self.input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                self.hidden_size,
                width,
                parameters_split=split,
                name=part_name(self.name, "layernorm_linear_qkv"),
                **into,
                **norm,
            )
        else:
            self.qkv = Linear(
                self.hidden_size, width, parameters_split=split, name=part_name(self.name, "linear_qkv"), **into
            )

    def _make_query_and_key_value(self, into: dict[str, Any], norm: dict[str, Any]) -> None:
        """A projection of the input to queries, and one of the encoder's output to keys and values."""
        if self.input_layernorm:
            split = None if self.fuse_qkv_params else ("query",)
            name = part_name(self.name, "layernorm_linear_q")
            self.layernorm_query = LayerNormLinear(
                self.hidden_size, self.hidden_size_q, parameters_split=split, name=name, **into, **norm
            )
        else:
            self.query_layer = Linear(self.hidden_size, self.hidden_size_q, **into)
        self.key_value = Linear(
            self.hidden_size,
            2 * self.hidden_size_kv,
            parameters_split=None if self._born_fused(into) else ("key", "value"),
            name=part_name(self.name, "linear_kv"),
            **into,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | PackedDocuments | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Freqs | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Any:
        """hidden_states [s, b, hidden] (or [b, s, hidden], [t, hidden]) -> the same shape.

        Returns the output, followed by the bias (`return_bias`), the norm's output (`return_layernorm_output`, only with
        `input_layernorm`), and hidden_states + residual, if there is a residual: it is added before the norm, in one kernel with it.
        rotary_pos_emb: angles for queries and keys, or a pair. The rest is `DotProductAttention`'s.
        """
        self._check_hidden("hidden_states", hidden_states)
        if residual is not None and not (self.attention_type == "self" and self.input_layernorm):
            raise ValueError("A residual is added by the norm of self-attention: it needs input_layernorm=True.")
        freqs = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        packed_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        packed_kv = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
        layout = self.qkv_format
        if self.attention_type == "self":
            mixed, *normed = self._projected(self._input_projection(), hidden_states, is_first_microbatch, residual)
            layout = self._core_layout(mixed, attention_mask)
            q, k, v = self._self_qkv(mixed, freqs, packed_q, layout)
        else:
            if encoder_output is None:
                raise ValueError("cross-attention needs encoder_output, the sequence that keys and values come from.")
            self._check_hidden("encoder_output", encoder_output)
            q, k, v, *normed = self._cross_qkv(
                hidden_states, encoder_output, is_first_microbatch, freqs, packed_q, packed_kv
            )
        context = self.core_attention(
            q,
            k,
            v,
            attention_mask,
            qkv_format=layout,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill,
            inference_params=inference_params,
            pad_between_seqs=pad_between_seqs,
        )
        if layout != self.qkv_format:
            context = context.transpose(0, 1)
        # Attention keeps its output for backward: not if it is computed again, nor if what comes here is a copy of it. (A compiler decides
        # for itself what is kept, and would compile anew for what is set here.)
        kept = not checkpoint_core_attention and layout == self.qkv_format != "thd"
        if self.proj.input_is_kept is not kept and not torch.compiler.is_compiling():
            self.proj.input_is_kept = kept
        projected = self.proj(context, is_first_microbatch=is_first_microbatch)
        result = projected if self.return_bias else (projected,)
        result = (*result, *normed)
        return result if len(result) > 1 else result[0]

    # ------------------------------------------------------------------------------------------------------------ the parts

    def _projected(
        self, module: LayerNormLinear | Linear, x: Tensor, first: bool | None, residual: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(projection, norm's output if it was asked for, x + residual if there is one)."""
        more = {} if residual is None else {"residual": residual}
        out = module(x, is_first_microbatch=first, **more)
        return out if isinstance(out, tuple) else (out,)

    def _core_layout(self, mixed: Tensor, mask: Any) -> str:
        """The layout that attention is given, for mixed [..., (heads + 2 groups) channels]: "bshd" for kernels that want the tokens of a
        row together, which splitting does on its way."""
        rotates_later = self.q_norm is not None and self.qk_norm_before_rope
        if not isinstance(mask, PackedDocuments) or self.qkv_format != "sbhd" or not mixed.is_cuda or rotates_later:
            return self.qkv_format
        heads = mixed.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        several = mixed.shape[1] > 1 and backends.varlen_fits(heads, heads, heads)
        return "bshd" if several and documents_backend(heads, heads, heads, mask) != "triton" else "sbhd"

    def _self_qkv(
        self, mixed: Tensor, freqs: tuple[Tensor | None, Tensor | None], cu_seqlens: Tensor | None, layout: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm_first = self.q_norm is not None and self.qk_norm_before_rope
        q, k, v = split_qkv_rope(
            mixed,
            self.heads_per_partition,
            self.groups_per_partition,
            by_group=self.qkv_weight_interleaved,
            tensor_format=self.qkv_format,
            freqs=(None, None) if norm_first else freqs,
            interleaved=self.rotary_pos_interleaved,
            cu_seqlens=cu_seqlens,
            batch_first=layout != self.qkv_format,
        )
        q, k = self._normalized(q, k)
        if norm_first:
            q, k = self._turned(q, freqs[0], cu_seqlens), self._turned(k, freqs[1], cu_seqlens)
        return q, k, v

    def _cross_qkv(
        self,
        x: Tensor,
        encoder_output: Tensor,
        first: bool | None,
        freqs: tuple[Tensor | None, Tensor | None],
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """(queries, keys, values, and the norm's output if it was asked for)."""
        (mixed,) = self._projected(self.key_value, encoder_output, first)  # [..., 2 groups channels]
        by_group = self.qkv_weight_interleaved
        _, k, v = split_qkv_rope(mixed, 0, self.groups_per_partition, by_group=by_group, tensor_format=self.qkv_format)
        module = self.layernorm_query if self.input_layernorm else self.query_layer
        q, *normed = self._projected(module, x, first)
        q = q.view(*q.shape[:-1], self.heads_per_partition, self.hidden_size_per_attention_head)
        if self.qk_norm_before_rope:
            q, k = self._normalized(q, k)
        q, k = self._turned(q, freqs[0], cu_seqlens_q), self._turned(k, freqs[1], cu_seqlens_kv)
        if not self.qk_norm_before_rope:
            q, k = self._normalized(q, k)
        return q, k, v, *normed

    def _normalized(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def _turned(self, x: Tensor, freqs: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        if freqs is None:
            return x
        return apply_rotary_pos_emb(
            x, freqs, self.qkv_format, interleaved=self.rotary_pos_interleaved, cu_seqlens=cu_seqlens
        )

    def _check_hidden(self, what: str, x: Tensor) -> None:
        dims = 2 if self.qkv_format == "thd" else 3
        if x.dim() != dims or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{what} for qkv_format {self.qkv_format!r} must have {dims} dimensions, the last of {self.hidden_size}, "
                f"got {tuple(x.shape)}."
            )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Hands the group to the projections."""
        for child in self._spread_children():
            child.set_tensor_parallel_group(tp_group)

    def set_device_mesh(self, tp_mesh: Any = None, weight_mesh: Any = None) -> None:
        """Splits the heads over `tp_mesh` (constructed with `set_parallel_mode`; else every rank keeps all); see `Linear`'s."""
        if tp_mesh is not None and self.proj.parallel.mode is not None and self.proj.parallel.size == 1:
            check_heads(self.num_attention_heads, self.num_gqa_groups, tp_mesh.size())
            self.heads_per_partition //= tp_mesh.size()
            self.groups_per_partition //= tp_mesh.size()
        for child in self._spread_children():
            child.set_device_mesh(tp_mesh, weight_mesh)

    def _spread_children(self) -> Iterator[Any]:
        """The modules inside that have parameters or heads to spread."""
        for child in self.children():
            if hasattr(child, "set_device_mesh") and (
                child is not self.core_attention or self.proj.parallel.mode is not None
            ):
                yield child

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Only None is accepted: attention runs over whole sequences."""
        refuse_context_parallel(cp_group)


def _split_rows(module: LayerNormLinear | Linear, parts: dict[str, int]) -> None:
    """The rows of the projection are several matrices, which tensor parallelism splits one by one: each becomes a parameter."""
    for kind, names in (("weight", module.weight_names), ("bias", module.bias_names)):
        rows = split_names(parts, kind)
        assert rows is not None
        if names == [kind]:
            module.split_rows(kind, rows)
            names[:] = rows
        elif names:
            module.fuse_names(kind, rows)


def head_channels(hidden_size: int, heads: int) -> int:
    """Channels of a head when they are not given."""
    if hidden_size % heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({heads}), or give kv_channels."
        )
    return hidden_size // heads


def call_on_children(module: torch.nn.Module, method: str, *args: Any) -> None:
    """Calls `method` on the children, at any depth, that have it; not below those, which pass it on themselves."""
    for child in module.children():
        if hasattr(child, method):
            getattr(child, method)(*args)
        else:
            call_on_children(child, method, *args)


def _check_layer_number(layer_number: int | None) -> int:
    if layer_number is not None and layer_number < 1:
        raise ValueError(f"layer_number counts from 1, got {layer_number}.")
    return layer_number or 1
