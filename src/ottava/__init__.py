"""Ottava: FP8 transformer training for PyTorch, in plain Python.

`import ottava as te` serves a script that was written for TransformerEngine.
"""

import atexit
from typing import TYPE_CHECKING

from ottava import attention, distributed, gloo_threads, kernels, optimizers, recipe
from ottava.detect import diagnose
from ottava.distributed import CudaRNGStatesTracker, destroy_ub, initialize_ub
from ottava.graphs import make_graphed_callables
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

if TYPE_CHECKING:
    from ottava.distributed import checkpoint
else:
    from ottava import checkpoint  # the package, which can be called as the function can

__version__ = "0.1.0"

fp8_autocast = autocast
fp8_model_init = quantized_model_init

atexit.register(gloo_threads.wait_until_at_rest)

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
    "diagnose",
    "distributed",
    "fp8_autocast",
    "fp8_model_init",
    "initialize_ub",
    "kernels",
    "leave_unquantized",
    "make_graphed_callables",
    "optimizers",
    "quantize",
    "quantized_model_init",
    "recipe",
]
