"""Which Ottava module answers for which `transformer_engine` module, and what to use where none does."""

from __future__ import annotations

VERSION = "2.20+ottava"
"""The release whose names and defaults Ottava follows; scripts compare versions."""

_EXPERTS, _FUNCTIONS = "ottava.compat.experts", "ottava.compat.functions"
_MODULES = ("ottava", "ottava.compat.support", "ottava.overlap.user_buffers", _EXPERTS)
_QUANTIZERS = "ottava.compat.quantizers"
_QUANTIZATION = ("ottava.compat.support", "ottava", "ottava.recipe", _QUANTIZERS)
_TENSORS = ("ottava.compat.tensors", _QUANTIZERS)
_ATTENTION = ("ottava.attention",)

# Names are looked up from left to right; an Ottava module that does not exist is passed over.
SOURCES: dict[str, tuple[str, ...]] = {
    "transformer_engine": (),
    "transformer_engine.common": (),
    "transformer_engine.common.recipe": ("ottava.recipe", "ottava.compat.custom_recipe"),
    "transformer_engine.pytorch": (*_MODULES, *_TENSORS, _FUNCTIONS, *_ATTENTION),
    "transformer_engine.pytorch.attention": _ATTENTION,
    "transformer_engine.pytorch.attention.dot_product_attention": _ATTENTION,
    "transformer_engine.pytorch.attention.multi_head_attention": _ATTENTION,
    "transformer_engine.pytorch.attention.rope": _ATTENTION,
    "transformer_engine.pytorch.constants": (_QUANTIZERS, "ottava.compat.constants"),
    "transformer_engine.pytorch.cpp_extensions": ("ottava.compat.cpp_extensions",),
    "transformer_engine.pytorch.cross_entropy": (_FUNCTIONS,),
    "transformer_engine.pytorch.custom_recipes": (),
    "transformer_engine.pytorch.custom_recipes.quantizer_factories": ("ottava.compat.quantizer_factories",),
    "transformer_engine.pytorch.distributed": ("ottava.distributed", "ottava"),
    "transformer_engine.pytorch.float8_tensor": _TENSORS,
    "transformer_engine.pytorch.fp8": _QUANTIZATION,
    "transformer_engine.pytorch.graph": ("ottava.graphs",),
    "transformer_engine.pytorch.module": _MODULES,
    "transformer_engine.pytorch.module.base": _MODULES,
    "transformer_engine.pytorch.module.fp8_padding": (_EXPERTS,),
    "transformer_engine.pytorch.module.fp8_unpadding": (_EXPERTS,),
    "transformer_engine.pytorch.module.grouped_linear": _MODULES,
    "transformer_engine.pytorch.module.layernorm": _MODULES,
    "transformer_engine.pytorch.module.layernorm_linear": _MODULES,
    "transformer_engine.pytorch.module.layernorm_mlp": _MODULES,
    "transformer_engine.pytorch.module.linear": _MODULES,
    "transformer_engine.pytorch.module.rmsnorm": _MODULES,
    "transformer_engine.pytorch.optimizers": ("ottava.optimizers",),
    "transformer_engine.pytorch.optimizers.fused_adam": ("ottava.optimizers",),
    "transformer_engine.pytorch.permutation": (_EXPERTS,),
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
    "transformer_engine.pytorch.utils": ("ottava.compat.support", _FUNCTIONS),
    "transformer_engine_torch": (_QUANTIZERS, "ottava.compat.cpp_extensions"),
}

# Top-level modules that come with TransformerEngine and never with Ottava.
FOREIGN = ("transformer_engine_extensions", "transformer_engine_jax")

_COMPILED = "It is compiled code, and Ottava has none."
_EXPORT = "Export with torch.export."
_NO_CACHE = "Ottava trains, and has no key-value cache: pass whole sequences."
_OFFLOAD = "Use torch.autograd.graph.save_on_cpu."
_FOREACH = "Use torch._foreach_* functions, or ottava.optimizers.FusedAdam, which does it all."
_GROUPS = "GroupedLinear has a weight for each group (weight0, weight1, ...)."
_MASTERS = "FusedAdam(master_weights=True) and fully_shard keep masters and write weights that are stored in FP8."
_OPS = "Use the modules (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear): they fuse what can be fused."
_PICKLES = "State dicts of Ottava have plain tensors, and nothing is pickled."
_STATES = (
    "A recipe's state is in its modules: `delayed.*` of the state dict under DelayedScaling, none under the others."
)

# Modules that stand in another one too: TransformerEngine's documentation writes `te.common.recipe.Format`.
ALIASES = {"transformer_engine.pytorch.common": "transformer_engine.common"}

# What to do instead, by the whole name, by its last part, or by the module that would have it.
INSTEAD = {
    "CustomRecipeState": _STATES,
    "CusolverMpCtx": "Ottava has no Muon optimizer, and no Newton-Schulz iteration.",
    "DelayedScalingRecipeState": _STATES,
    "Float8BlockScalingRecipeState": _STATES,
    "Float8CurrentScalingRecipeState": _STATES,
    "FusedMLAQUpProjRopeQuant": "Use LayerNormLinear and apply_rotary_pos_emb.",
    "FusedSGD": "Use torch.optim.SGD on float32 masters.",
    "GroupedTensor": _GROUPS,
    "InferenceParams": _NO_CACHE,
    "MXFP8BlockScalingRecipeState": _STATES,
    "ManualOffloadSynchronizer": _OFFLOAD,
    "MultiTensorApply": _FOREACH,
    "NVFP4BlockScalingRecipeState": _STATES,
    "RecipeState": _STATES,
    "_extra_state": _PICKLES,
    "common": "It is `transformer_engine.common`.",
    "context_parallel": "Ottava has no context parallelism: attention runs over whole sequences.",
    "cpu_offload": _OFFLOAD,
    "cpu_offload_v1": _OFFLOAD,
    "debug": "`ottava train` counts and names bad numbers, and shows how each tensor fits its format (docs/bad-numbers.md).",
    "distributed_weight": "Shard weights with torch's fully_shard, or with ottava.distributed.parallelize.",
    "ep": "Ottava has no expert parallelism: GroupedLinear runs the experts of one rank.",
    "export": _EXPORT,
    "general_gemm": _COMPILED,
    "general_grouped_gemm": _COMPILED,
    "get_cpu_offload_context": _OFFLOAD,
    "grouped_tensor": _GROUPS,
    "inference": _NO_CACHE,
    "jax": "Ottava is for PyTorch.",
    "load_framework_extension": _COMPILED,
    "mark_not_offload": _OFFLOAD,
    "multi_tensor_applier": _FOREACH,
    "multi_tensor_apply": _FOREACH,
    "newton_schulz": "Ottava has no Muon optimizer, and no Newton-Schulz iteration.",
    "numerics_debug": "`ottava train` counts and names bad numbers (docs/bad-numbers.md).",
    "onnx_export": _EXPORT,
    "onnx_extensions": _EXPORT,
    "ops": _OPS,
    "prepare_for_saving": "Give tensors to ctx.save_for_backward: QuantizedTensor is a torch.Tensor.",
    "restore_from_func_ctx": "Take them from ctx.saved_tensors: QuantizedTensor is a torch.Tensor.",
    "restore_from_saved": "Take them from ctx.saved_tensors: QuantizedTensor is a torch.Tensor.",
    "router": "Route with torch.softmax and torch.topk.",
    "te_onnx_extensions": _EXPORT,
    "torch_version": "It is `transformer_engine.pytorch.utils.torch_version`.",
    "transformer_engine.pytorch.tensor.utils": _MASTERS,
    "transformer_engine_extensions": _COMPILED,
    "transformer_engine_jax": "Ottava is for PyTorch.",
    "transformer_engine_torch": _COMPILED,
    "triton": "Its kernels are not Ottava's; what modules need of them is in ottava.kernels.",
}
