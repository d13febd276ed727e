"""Ottava: FP8 transformer training for PyTorch, in plain Python.

`import ottava as te` serves a script that was written for TransformerEngine.
"""

from ottava import kernels, recipe
from ottava.nn import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from ottava.quant.quantizer import quantize
from ottava.quant.state import autocast, quantized_model_init
from ottava.quant.tensor import QuantizedTensor

__version__ = "0.1.0"

fp8_autocast = autocast
fp8_model_init = quantized_model_init

__all__ = [
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "QuantizedTensor",
    "RMSNorm",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "kernels",
    "quantize",
    "quantized_model_init",
    "recipe",
]
