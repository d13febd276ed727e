"""Which Ottava module answers for which `transformer_engine` module, and what to use where none does."""

from __future__ import annotations

VERSION = "2.20+ottava"
"""The release whose names and defaults Ottava follows; scripts compare versions."""

_MODULES = ("ottava", "ottava.compat.support", "ottava.overlap.user_buffers")
_QUANTIZERS = "ottava.compat.quantizers"
_QUANTIZATION = ("ottava.compat.support", "ottava", "ottava.recipe", _QUANTIZERS)
_TENSORS = ("ottava.compat.tensors", _QUANTIZERS)
_ATTENTION = ("ottava.attention",)

# Names are looked up from left to right; an Ottava module that does not exist is passed over.
SOURCES: dict[str, tuple[str, ...]] = {
    "transformer_engine": (),
    "transformer_engine.common": (),
    "transformer_engine.common.recipe": ("ottava.recipe", "ottava.compat.custom_recipe"),
    "transformer_engine.pytorch": ("ottava", "ottava.compat.support", *_TENSORS),
    "transformer_engine.pytorch.attention": _ATTENTION,
    "transformer_engine.pytorch.attention.dot_product_attention": _ATTENTION,
    "transformer_engine.pytorch.attention.multi_head_attention": _ATTENTION,
    "transformer_engine.pytorch.attention.rope": _ATTENTION,
    "transformer_engine.pytorch.constants": (_QUANTIZERS,),
    "transformer_engine.pytorch.cpp_extensions": ("ottava.compat.cpp_extensions",),
    "transformer_engine.pytorch.custom_recipes": (),
    "transformer_engine.pytorch.custom_recipes.quantizer_factories": (_QUANTIZERS,),
    "transformer_engine.pytorch.distributed": ("ottava.distributed", "ottava"),
    "transformer_engine.pytorch.float8_tensor": _TENSORS,
    "transformer_engine.pytorch.fp8": _QUANTIZATION,
    "transformer_engine.pytorch.graph": ("ottava.graphs",),
    "transformer_engine.pytorch.module": _MODULES,
    "transformer_engine.pytorch.module.base": _MODULES,
    "transformer_engine.pytorch.module.grouped_linear": _MODULES,
    "transformer_engine.pytorch.module.layernorm": _MODULES,
    "transformer_engine.pytorch.module.layernorm_linear": _MODULES,
    "transformer_engine.pytorch.module.layernorm_mlp": _MODULES,
    "transformer_engine.pytorch.module.linear": _MODULES,
    "transformer_engine.pytorch.module.rmsnorm": _MODULES,
    "transformer_engine.pytorch.optimizers": ("ottava.optimizers",),
    "transformer_engine.pytorch.optimizers.fused_adam": ("ottava.optimizers",),
    "transformer_engine.pytorch.quantization": _QUANTIZATION,
    "transformer_engine.pytorch.quantized_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.float8_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.hybrid_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.identity_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.mxfp8_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.nvfp4_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.quantized_tensor": _TENSORS,
    "transformer_engine.pytorch.tensor.storage": _TENSORS,
    "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage": _TENSORS,
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage": _TENSORS,
    "transformer_engine.pytorch.tensor.storage.hybrid_tensor_storage": _TENSORS,
    "transformer_engine.pytorch.tensor.storage.identity_tensor_storage": _TENSORS,
    "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage": _TENSORS,
    "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage": _TENSORS,
    "transformer_engine.pytorch.transformer": _MODULES,
    "transformer_engine.pytorch.utils": ("ottava.compat.support",),
}

# Top-level modules that come with TransformerEngine and never with Ottava.
FOREIGN = ("transformer_engine_torch", "transformer_engine_extensions", "transformer_engine_jax")

# What to do instead, by the last part of the name.
INSTEAD = {
    "FusedSGD": "Use torch.optim.SGD on float32 masters.",
    "cpu_offload": "Use torch.autograd.graph.save_on_cpu.",
    "export": "Export with torch.export.",
    "get_cpu_offload_context": "Use torch.autograd.graph.save_on_cpu.",
    "jax": "Ottava is for PyTorch.",
    "onnx_export": "Export with torch.export.",
    "te_onnx_extensions": "Export with torch.export.",
    "transformer_engine_extensions": "It is compiled code, and Ottava has none.",
    "transformer_engine_jax": "Ottava is for PyTorch.",
    "transformer_engine_torch": "It is compiled code, and Ottava has none.",
}
