"""Whether a product that is made in chunks of rows has the bits of the product of all rows.

Gathers under products promise it. On a CPU it always holds (`kernels/fixed_order.py`). A GPU's library chooses its kernel by the sizes
of a product, and one choice changes bits: split-K, where several blocks share an element's sum. It is made for products that would leave
most of the GPU idle, which a chunk may be and the whole is not.

[Note: measured] H200, torch 2.11, cuBLAS of CUDA 13.0: rows of x[m, k] @ w[n, k].T against the same rows of the whole product; m 512, 2048
and 8192, seven (n, k) of Llama-3-8B, in 2, 4 and 8 parts. FP8 (one scale a tensor; blocks of 128): equal in all cases. bf16: equal in 62 of
63; other bits in chunks of 64 rows at n 2048, k 4096 (m 512, 8 parts), where 128 rows were equal. So the smallest product that was seen to
be split has 64 x 2048 = 2**17 elements, and 2**18 were not; `OUTPUTS` is twice that, 256 rows at n 2048. Fewer rows than `ROWS` get
kernels for thin products, however wide they are.
"""

from __future__ import annotations

from ottava.kernels.gemm import BLOCK_ROWS, multiplied_unquantized, native_rows
from ottava.nn.strategy import Operands
from ottava.overlap.chunks import CUT_AT, spans

ROWS = 128
OUTPUTS = 1 << 19
"""Rows, and elements of the product, from which on chunks are not split: see [Note: measured]."""

ANY, LARGE, IN_EIGHTS = "any", "large", "in eights"
"""Which chunks have the bits of the whole. In eights: cuBLASLt multiplies blocks of 128 by rows in multiples of 8, and others are
emulated, in another order of sums."""


def exact_chunks(operands: Operands) -> str:
    """Which chunks of rows of these operands have the bits of the whole in a product."""
    if not operands[0].data.is_cuda:
        return ANY
    if len(operands) > 1:
        return ANY  # kernels of grouped products sum an element in one place, whatever the number of rows
    scheme = operands[0].scheme
    if scheme is None or multiplied_unquantized(scheme):
        return LARGE
    return IN_EIGHTS if native_rows(scheme) > 1 else ANY


def chunk_rows(rows: int, size: int, method: str, pieces: int) -> list[int]:
    """Rows of the chunks that a gather by `method` multiplies. rows: of one rank. pieces: that a pipeline makes of them.

    >>> chunk_rows(1000, 2, "pipeline", 4)
    [1000, 240, 256, 240, 264]
    """
    if method == "ring":
        return [rows] * size
    return [rows] + [sum(span.rows) for span in spans([rows], pieces, CUT_AT)] * (size - 1)


def inexact_because(kind: str, rows: list[int], total: int, features: int) -> str | None:
    """Why chunks of `rows` may have other bits than the product of all `total` rows; None: they have the same.

    kind: ANY, LARGE or IN_EIGHTS. features: columns of the product.

    >>> inexact_because(LARGE, [64], 512, 2048)
    'a GPU may sum products of 64 x 2048 elements in another order than larger ones'
    """
    least = min(rows)
    if kind == LARGE and (least < ROWS or least * features < OUTPUTS) and least < total:
        return f"a GPU may sum products of {least} x {features} elements in another order than larger ones"
    odd = [count for count in rows if count % BLOCK_ROWS]
    if kind == IN_EIGHTS and odd and total % BLOCK_ROWS == 0:
        return f"a GPU multiplies blocks of 128 by rows in multiples of {BLOCK_ROWS}, and emulates a chunk of {odd[0]}"
    return None
