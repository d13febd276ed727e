"""Attention modules and rotary position embedding, under the name TransformerEngine gives them; packed documents and backends."""

from ottava.kernels.attention_backend import attention_backend
from ottava.nn.attention import DotProductAttention
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.multi_head_attention import MultiheadAttention
from ottava.nn.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "MultiheadAttention",
    "PackedDocuments",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
    "attention_backend",
]
