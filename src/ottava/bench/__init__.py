"""Benchmarks: one module a claim, `ottava bench NAME`. A run checks its outputs before it times them."""

BENCHMARKS = {
    "layer": "four Llama-3-8B layers, forward + backward, every recipe, on one GPU (or small, on a CPU)",
    "step": "whole training steps of a named model, beside torch, torchao and TransformerEngine",
}
