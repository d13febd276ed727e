"""Attention modules and rotary position embedding, under the name TransformerEngine gives them."""

from ottava.nn.attention import DotProductAttention
from ottava.nn.multi_head_attention import MultiheadAttention
from ottava.nn.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding", "apply_rotary_pos_emb"]
