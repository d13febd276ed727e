"""The modules users name."""

from ottava.nn.attention import DotProductAttention
from ottava.nn.base import leave_unquantized
from ottava.nn.grouped_linear import GroupedLinear
from ottava.nn.layernorm import LayerNorm, RMSNorm
from ottava.nn.layernorm_linear import LayerNormLinear
from ottava.nn.layernorm_mlp import LayerNormMLP
from ottava.nn.linear import Linear
from ottava.nn.multi_head_attention import MultiheadAttention
from ottava.nn.transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
    "leave_unquantized",
]
