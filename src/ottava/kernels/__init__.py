"""How it runs: one op a file; torch reference, Triton kernel and fake (shape) function side by side, chosen by device."""

from ottava.kernels import activation, cast, delayed, gemm, norm

__all__ = ["activation", "cast", "delayed", "gemm", "norm"]
