"""Arguments by position are TransformerEngine's: a call that names none of them means the same."""

from __future__ import annotations

import inspect

import pytest
import torch

import ottava

# Of release 2.20.
ORDER = {
    ("Linear", "__init__"): """
        in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker
        rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device ub_overlap_ag
        ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type
        save_original_input name
    """,
    ("Linear", "forward"): """
        inp is_first_microbatch fp8_output fp8_grad
    """,
    ("LayerNormLinear", "__init__"): """
        in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker
        init_method bias normalization return_bias params_dtype parallel_mode return_layernorm_output
        return_layernorm_output_gathered parameters_split zero_centered_gamma device ub_overlap_ag ub_overlap_rs
        ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute symmetric_ar_type name
    """,
    ("LayerNormLinear", "forward"): """
        inp is_first_microbatch fp8_output fp8_grad
    """,
    ("LayerNormMLP", "__init__"): """
        hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group tp_size
        init_method bias normalization activation activation_params output_layer_init_method fuse_wgrad_accumulation
        params_dtype return_layernorm_output return_layernorm_output_gathered seq_length micro_batch_size
        set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs ub_overlap_rs_dgrad
        ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute symmetric_ar_type checkpoint
    """,
    ("LayerNormMLP", "forward"): """
        inp is_first_microbatch
    """,
    ("GroupedLinear", "__init__"): """
        num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size
        get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode device
        ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute save_original_input single_grouped_weight
        single_grouped_bias name use_grouped_tensor
    """,
    ("GroupedLinear", "forward"): """
        inp m_splits is_first_microbatch out dgrad_out
    """,
    ("MultiheadAttention", "__init__"): """
        hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon init_method
        output_layer_init_method layer_number attn_mask_type window_size bottom_right_diagonal tp_group tp_size
        num_gqa_groups fuse_wgrad_accumulation get_rng_state_tracker sequence_parallel params_dtype return_bias
        return_layernorm_output input_layernorm attention_type set_parallel_mode fuse_qkv_params zero_centered_gamma
        qkv_weight_interleaved rotary_pos_interleaved ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad
        ub_bulk_wgrad bias normalization device qkv_format name qk_norm_type qk_norm_eps qk_norm_before_rope
        seq_length micro_batch_size softmax_type
    """,
    ("MultiheadAttention", "forward"): """
        hidden_states attention_mask encoder_output attn_mask_type window_size bottom_right_diagonal
        is_first_microbatch checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type
        core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded
        max_seqlen_q max_seqlen_kv fast_zero_fill pad_between_seqs
    """,
    ("TransformerLayer", "__init__"): """
        hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon hidden_dropout
        attention_dropout init_method output_layer_init_method layer_number kv_channels self_attn_mask_type
        window_size bottom_right_diagonal enc_dec_attn_mask_type enc_dec_bottom_right_diagonal enc_dec_window_size
        tp_group tp_size params_dtype get_rng_state_tracker fuse_wgrad_accumulation seq_length micro_batch_size
        sequence_parallel apply_residual_connection_post_layernorm output_layernorm parallel_attention_mlp layer_type
        drop_path_rate set_parallel_mode fuse_qkv_params rotary_pos_interleaved zero_centered_gamma
        qkv_weight_interleaved ub_tp_comm_overlap ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad
        ub_bulk_wgrad bias activation activation_params normalization device attn_input_format name qk_norm_type
        qk_norm_eps qk_norm_before_rope softmax_type
    """,
    ("TransformerLayer", "forward"): """
        hidden_states attention_mask self_attn_mask_type window_size bottom_right_diagonal encoder_output
        enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size enc_dec_bottom_right_diagonal is_first_microbatch
        checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type core_attention_bias
        alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv
        fast_zero_fill pad_between_seqs
    """,
}


@pytest.mark.parametrize("module, method", ORDER)
def test_positions_are_those_of_transformer_engine(module: str, method: str) -> None:
    expected = ORDER[module, method].split()
    found = [name for name in inspect.signature(getattr(getattr(ottava, module), method)).parameters if name != "self"]
    assert found[: len(expected)] == expected


def test_arguments_that_do_nothing_say_so(caplog: pytest.LogCaptureFixture) -> None:
    ottava.Linear(16, 16, rng_tracker_name="experts", device="cpu")
    assert "Linear: rng_tracker_name='experts' has no effect" in caplog.text
    for option in ("single_grouped_weight", "single_grouped_bias", "use_grouped_tensor"):
        with pytest.raises(ValueError, match="each group has parameters of its own"):
            ottava.GroupedLinear(2, 16, 16, device="cpu", **{option: True})
    layer, x = ottava.GroupedLinear(2, 16, 16, device="cpu"), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="does not write into out"):
        layer(x, [1, 1], out=torch.empty(2, 16))
    attend = ottava.DotProductAttention(2, 16)
    attend.set_context_parallel_group(None, None, None)
    with pytest.raises(ValueError, match="context parallelism is not offered"):
        attend.set_context_parallel_group(object(), None, None)
