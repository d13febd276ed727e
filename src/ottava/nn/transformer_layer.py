"""`TransformerLayer`: attention, cross-attention in a decoder, and an MLP, each with its norm and residual connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava import torch_private
from ottava.kernels.residual import bias_residual
from ottava.nn import attention_mask as masks
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.attention_request import FORMATS, refuse_context_parallel
from ottava.nn.draw import InitMethod
from ottava.nn.drop_path import DropPath
from ottava.nn.layernorm import LayerNorm, RMSNorm
from ottava.nn.layernorm_mlp import LayerNormMLP
from ottava.nn.multi_head_attention import (
    Freqs,
    MultiheadAttention,
    call_on_children,
    head_channels,
)
from ottava.nn.options import check_norm, part_name, pick
from ottava.nn.random_replay import drawing_own_masks

# Which arguments go to which part, by name.
_SHARED = (
    "fuse_wgrad_accumulation", "tp_group", "tp_size", "get_rng_state_tracker", "sequence_parallel", "init_method",
    "output_layer_init_method", "bias", "params_dtype", "seq_length", "micro_batch_size", "set_parallel_mode", "zero_centered_gamma",
    "device", "recompute",
)  # fmt: skip
_ATTENTION = (
    "hidden_size", "num_attention_heads", "num_gqa_groups", "attention_dropout", "layernorm_epsilon", "layer_number", "fuse_qkv_params",
    "qkv_weight_interleaved", "rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope", "softmax_type",
)  # fmt: skip
_MLP = ("hidden_size", "ffn_hidden_size", "activation", "activation_params")
_NORM = ("sequence_parallel", "params_dtype", "zero_centered_gamma", "device")
_OVERLAP = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")


class TransformerLayer(torch.nn.Module):
    """One layer of a transformer, encoder or decoder. Arguments are TransformerEngine's; the ones that need a word:

    Arguments:
        layer_type: "decoder" adds cross-attention (`inter_attention`) to an encoder's output between attention and MLP.
        parallel_attention_mlp: attention and MLP both take the layer's input, and are added to it together.
        apply_residual_connection_post_layernorm: the residual is the norm's output instead of its input.
        output_layernorm: norm after the layer instead of before attention, as in BERT.
        drop_path_rate: stochastic depth, sample by sample ("thd" has no samples to drop: an error).
        attn_input_format: "sbhd", "bshd", or "thd" for packed sequences [t, hidden] with cu_seqlens_q.
        ub_tp_comm_overlap and other ub_*: overlap of communication; they never change a value (see `OverlapOptions`).
        recompute: "selective" recomputes norm and activation outputs, and their FP8 copies, in backward: about a fifth less
            memory, for a few elementwise kernels more.

    Example:
        >>> layer = TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
        >>> layer(torch.randn(8, 2, 64)).shape
        torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        *,
        recompute: str = "none",
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        given = dict(locals())  # the arguments, before anything else has a name here
        super().__init__()
        self.layer_type = masks.one_of("layer_type", layer_type, ("encoder", "decoder"))
        self.attn_input_format = masks.one_of("attn_input_format", attn_input_format, FORMATS)
        self.self_attn_mask_type = masks.canonical_mask_type(self_attn_mask_type)
        self.enc_dec_attn_mask_type = masks.canonical_mask_type(enc_dec_attn_mask_type)
        self.window_size, self.enc_dec_window_size = window_size, enc_dec_window_size
        self.hidden_size, self.hidden_dropout = hidden_size, hidden_dropout
        self.layer_number, self.name = layer_number, name
        self.get_rng_state_tracker, self.sequence_parallel = get_rng_state_tracker, sequence_parallel
        self.output_layernorm, self.parallel_attention_mlp = output_layernorm, parallel_attention_mlp
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self._refuse_combinations()
        # Such a layer adds nothing to a branch but the residual, and leaves that to the norm that comes next.
        self._plain = not (
            bias
            or layer_type != "encoder"
            or parallel_attention_mlp
            or output_layernorm
            or apply_residual_connection_post_layernorm
            or drop_path_rate > 0.0
        )
        self.drop_path = self._make_drop_path(drop_path_rate)
        shared = {
            **pick(given, _SHARED),
            **{switch: ub_tp_comm_overlap and given[switch] for switch in _OVERLAP},
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "normalization": check_norm(normalization),
        }
        self._make_attention(given, shared)
        self.layernorm_mlp = LayerNormMLP(
            **pick(given, _MLP),
            **shared,
            eps=layernorm_epsilon,
            return_bias=not parallel_attention_mlp,
            name=part_name(name, "layernorm_mlp"),
        )
        if output_layernorm:
            norm = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = norm(hidden_size, eps=layernorm_epsilon, **pick(given, _NORM))
            if tp_group is not None:
                self.layernorm.set_tensor_parallel_group(tp_group)
        self.set_device_mesh(tp_mesh, weight_mesh)

    def _refuse_combinations(self) -> None:
        """Names arguments that do not go together, or lie out of range."""
        if not 0.0 <= self.hidden_dropout <= 1.0:
            raise ValueError(f"hidden_dropout is a probability, got {self.hidden_dropout}.")
        other_order = self.apply_residual_connection_post_layernorm or self.output_layernorm
        if self.parallel_attention_mlp and (self.layer_type != "encoder" or other_order):
            raise ValueError(
                "parallel_attention_mlp needs layer_type='encoder', and goes neither with output_layernorm nor with "
                "apply_residual_connection_post_layernorm."
            )

    def _make_drop_path(self, rate: float) -> DropPath | None:
        if not rate > 0.0:
            return None
        if self.attn_input_format == "thd":
            raise ValueError("drop_path_rate > 0 drops samples, which packed sequences ('thd') do not have.")
        return DropPath(rate, sample_dim=1 if self.attn_input_format == "sbhd" else 0)

    def _make_attention(self, given: dict[str, Any], shared: dict[str, Any]) -> None:
        """`self_attention`, and a decoder's `inter_attention`. given: the constructor's arguments; shared: what all parts take."""
        options: dict[str, Any] = {
            **shared,
            **pick(given, _ATTENTION),
            "kv_channels": given["kv_channels"] or head_channels(self.hidden_size, given["num_attention_heads"]),
            "qkv_format": self.attn_input_format,
        }
        self.self_attention = MultiheadAttention(
            **options,
            attention_type="self",
            attn_mask_type=given["self_attn_mask_type"],
            window_size=self.window_size,
            bottom_right_diagonal=given["bottom_right_diagonal"],
            input_layernorm=not self.output_layernorm,
            return_bias=not self.parallel_attention_mlp,
            name=part_name(self.name, "self_attention"),
        )
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                **options,
                attention_type="cross",
                attn_mask_type=given["enc_dec_attn_mask_type"],
                window_size=self.enc_dec_window_size,
                bottom_right_diagonal=given["enc_dec_bottom_right_diagonal"],
                input_layernorm=True,
                return_bias=True,
                name=part_name(self.name, "inter_attention"),
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | PackedDocuments | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
        return_residual: bool = False,
    ) -> Any:
        """hidden_states [s, b, hidden] (or [b, s, hidden], [t, hidden]) -> the same shape.

        attention_mask, self_attn_mask_type, window_size, cu_seqlens_q* and max_seqlen_q belong to self-attention; encoder_output,
        enc_dec_*, cu_seqlens_kv* and max_seqlen_kv to a decoder's cross-attention. See `DotProductAttention` for what they are.

        residual: what is still to be added to hidden_states. return_residual: returns (output, residual), which are still to be added.
        So the norm of the next layer adds, in one kernel; only where `adds_later()`. Such a residual is not to be changed in place.
        """
        if self.layer_type == "decoder" and encoder_output is None:
            raise ValueError("layer_type 'decoder' needs encoder_output, the output of the encoder.")
        if (return_residual or residual is not None) and not self.adds_later():
            raise ValueError(
                "residual and return_residual are for a layer that adds nothing but the residual to its branches: no bias, no dropout, "
                "an encoder's layer with the norms before attention and MLP. Call the layer without them."
            )
        x = hidden_states
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        common: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
            "fast_zero_fill": fast_zero_fill,
            "pad_between_seqs": pad_between_seqs,
        }
        attended = self.self_attention(
            x,
            attention_mask,
            attn_mask_type=self_attn_mask_type or self.self_attn_mask_type,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_kv_padded=cu_seqlens_q_padded,
            max_seqlen_kv=max_seqlen_q,
            **({} if residual is None else {"residual": residual}),
            **common,
        )
        if self.adds_later():
            x = x if residual is None else attended[-1]
            branch, _, x = self.layernorm_mlp(attended[0], is_first_microbatch=is_first_microbatch, residual=x)
            return (branch, torch_private.no_view(x)) if return_residual else x + branch
        if self.parallel_attention_mlp:
            both = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
            return self._bias_dropout_add(attended, both, x, self.drop_path)
        x = self._add(attended, x, self.drop_path)
        if self.layer_type == "decoder":
            crossed = self.inter_attention(
                x,
                enc_dec_attn_mask,
                encoder_output,
                attn_mask_type=enc_dec_attn_mask_type or self.enc_dec_attn_mask_type,
                window_size=self.enc_dec_window_size if enc_dec_window_size is None else enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                max_seqlen_kv=max_seqlen_kv,
                **common,
            )
            x = self._add(crossed, x, None)
        x = self._add(self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch), x, self.drop_path)
        return self.layernorm(x) if self.output_layernorm else x

    def adds_later(self) -> bool:
        """Whether nothing but the residual is added to what attention and MLP give, so that the norm that comes next can do it."""
        return self._plain and not (self.training and self.hidden_dropout > 0.0)

    def _add(self, branch: tuple[Tensor, ...], residual: Tensor, drop_path: DropPath | None) -> Tensor:
        """branch: (output, bias), and the norm's output, which is then the residual."""
        output, bias, *normed = branch
        return self._bias_dropout_add(output, bias, normed[0] if normed else residual, drop_path)

    def _bias_dropout_add(self, x: Tensor, bias: Tensor | None, residual: Tensor, drop_path: DropPath | None) -> Tensor:
        """residual + drop_path(dropout(x + bias)). bias: [hidden], or the other branch of a parallel layer."""
        dropped = drop_path is not None or (self.training and self.hidden_dropout > 0.0)
        if bias is not None and bias.dim() == 1 and not dropped:
            return bias_residual(x, bias, residual)
        if bias is not None:
            x = x + bias.to(x.dtype)
        if self.training and self.hidden_dropout > 0.0:
            with drawing_own_masks(self.get_rng_state_tracker, self.sequence_parallel):
                x = F.dropout(x, p=self.hidden_dropout)
        return residual + (x if drop_path is None else drop_path(x))

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Hands the group to the modules inside."""
        call_on_children(self, "set_tensor_parallel_group", tp_group)

    def set_device_mesh(self, tp_mesh: Any = None, weight_mesh: Any = None) -> None:
        """Spreads the parameters of the modules inside over meshes; see `Linear`'s. Splits need `set_parallel_mode`."""
        call_on_children(self, "set_device_mesh", tp_mesh, weight_mesh)

    def set_parallel_mode(self) -> None:
        """What the constructor's `set_parallel_mode` asks for, later: whole weights will be split by `set_device_mesh`."""
        call_on_children(self, "set_parallel_mode")

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Only None is accepted: attention runs over whole sequences."""
        refuse_context_parallel(cp_group)

    def extra_repr(self) -> str:
        """What the parts do not show."""
        parts = [self.layer_type, self.attn_input_format]
        if self.hidden_dropout:
            parts.append(f"hidden_dropout={self.hidden_dropout}")
        if self.parallel_attention_mlp:
            parts.append("parallel attention and MLP")
        return ", ".join(parts)
