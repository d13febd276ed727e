"""Ottava: FP8 transformer training for PyTorch, in plain Python.

`import ottava as te` serves a script that was written for TransformerEngine.
"""

from ottava import attention, distributed, kernels, optimizers, recipe
from ottava.distributed import CudaRNGStatesTracker, checkpoint, destroy_ub, initialize_ub
from ottava.nn import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
    leave_unquantized,
)
from ottava.quant.quantizer import quantize
from ottava.quant.state import autocast, quantized_model_init
from ottava.quant.tensor import QuantizedTensor

__version__ = "0.1.0"

fp8_autocast = autocast
fp8_model_init = quantized_model_init

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "QuantizedTensor",
    "RMSNorm",
    "TransformerLayer",
    "attention",
    "autocast",
    "checkpoint",
    "destroy_ub",
    "distributed",
    "fp8_autocast",
    "fp8_model_init",
    "initialize_ub",
    "kernels",
    "leave_unquantized",
    "optimizers",
    "quantize",
    "quantized_model_init",
    "recipe",
]
