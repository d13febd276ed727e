"""Benchmarks: one module a claim, `ottava bench NAME`. A run checks its outputs before it times them."""

BENCHMARKS = {
    "overlap": "tensor-parallel collectives under the products of a layer: alone, one after the other, overlapped",
    "layer": "four Llama-3-8B layers, forward + backward, every recipe, on one GPU (or small, on a CPU)",
    "step": "whole training steps of a named model, beside torch, torchao and TransformerEngine",
    "kernels": "every kernel that is bound by memory, against the rate of a plain copy",
    "gemm": "matrix products of a named model, forward and backward, in bf16 and by FP8 scheme",
    "attention": "attention forward and backward by backend, against float64",
}
