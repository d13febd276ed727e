"""The modules users name."""

from ottava.nn.layernorm import LayerNorm, RMSNorm
from ottava.nn.layernorm_linear import LayerNormLinear
from ottava.nn.layernorm_mlp import LayerNormMLP
from ottava.nn.linear import Linear

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]
