"""TransformerEngine's numbers: sizes of blocks, and which column of `fp8_meta` belongs to which tensor of a module."""

from __future__ import annotations

import enum

__all__ = ["MXFP8_BLOCK_SCALING_SIZE", "NVFP4_BLOCK_SCALING_SIZE", "FP8BwdTensorIdx", "FP8FwdTensorIdx"]

MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16


class FP8FwdTensorIdx(enum.IntEnum):
    """Columns of `module.fp8_meta["scaling_fwd"]`: three for each product."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5


class FP8BwdTensorIdx(enum.IntEnum):
    """Columns of `module.fp8_meta["scaling_bwd"]`: two for each product."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
