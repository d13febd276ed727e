"""How it runs: one op a file; torch reference, Triton kernel and fake (shape) function side by side, chosen by device."""

from ottava.kernels import (
    activation,
    attention,
    cast,
    delayed,
    gemm,
    grid,
    grouped_gemm,
    head_loss,
    many,
    norm,
    residual,
    rope,
    scaled_copy,
)

__all__ = [
    "activation",
    "attention",
    "cast",
    "delayed",
    "gemm",
    "grid",
    "grouped_gemm",
    "head_loss",
    "many",
    "norm",
    "residual",
    "rope",
    "scaled_copy",
]
