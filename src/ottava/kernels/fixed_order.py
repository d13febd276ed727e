"""A float32 matrix product on the CPU whose bits depend on its operands alone.

The BLAS behind torch cuts a product differently for 1, 2 or 8 threads: of 1,500 random shapes tried with torch 2.13 (MKL),
most with a contraction of 700 or more, and many with a single row, changed in the last bit with `torch.set_num_threads`.
One thread has one order, so the product itself runs on one thread; everything around it keeps all of them.

[Note: sums by halves] A contraction of more than 64 is the sum of the contractions of its halves, and so on. Tensor-parallel ranks
hold such halves (quarters, ...) and add their partial products in the same order (`overlap/collectives.py`): in float32 a layer
that is split over 2, 4 or 8 ranks gives the bits of one process. FP8 makes this worth having: a difference in the last bit of one
number moves another number by a whole FP8 step, and after a few training steps an error can no longer be told from a rounding.

[Note: order of a leaf] An element of a product of at most 64 terms (a leaf) is `acc = fma(a[k], b[k], acc)` for k = 0, 1, 2, ... from
acc = 0: it depends on one row and one column, and never on how many others there are. This is what the main loop of a BLAS kernel
does, with a vector of columns at a time; what it does with the rows and columns left over is the vendor's choice. MKL takes two sums
over k, or dot products, for 10 columns, for 1 to 7 rows, and for a few k of a transposed operand. So none are left over: the operands
are padded with zeros to 8 rows, 16 columns and 8 terms or multiples of these (whole vectors of AVX-512), or to 24 rows and 48 columns
where MKL runs its kernels for Intel's AVX2, which take 4 or 6 rows and 16 or 24 columns at a time.

That this is the order is seen, not assumed: the first product of a process compares a few small ones with the order written out. If no
padding gives it (another BLAS), `_explicit` adds term by term, many times slower, and says so once. Of 5,000 products of random
sizes up to 700, in four layouts, with and without a batch, none differed from the order written out, with MKL 2024.2 on an AMD EPYC
(Zen 4) and on an Intel Xeon, with the instructions of the machine and with those of MKL_CBWR=COMPATIBLE and AVX2, on the Xeon also AVX
and SSE4.2. So the two have the same bits, and the tests hold a record of them. Code without FMA (COMPATIBLE, AVX, SSE) rounds a
product before it is added: other bits, but the same order, so that there too a mesh gives what one process gives. Products of FP8,
bf16 and other values of at most 12 significant bits are exact, and so have the same bits with and without.

Time, against leaves multiplied by whatever kernel MKL chose: nothing is copied where sizes are multiples of 16, as those of models are,
and products of 128 and more rows and columns take 1.0 to 1.1; 64 x 64 x 64 takes 12 instead of 9 us; 10 or 1,000 columns take 1.3.
With 24 and 48 there are 1.7 times as many operations at 64, 1.2 at 256. Float64 leaves, rounded once, would not depend on FMA
either (the product of two float32 is exact there), but took 1.6 to 3.4 times as long.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

LEAF = 64  # longest contraction that is left to BLAS. On one core 64 costs about 1.2 of one whole product; 32 costs 2 to 10.
TERMS = 8  # the terms of a leaf are padded to a multiple of this, [Note: order of a leaf]
PADDINGS = ((8, 16), (24, 48))  # and its rows and columns to multiples of these, the first that does

logger = logging.getLogger(__name__)


def matmul(a: Tensor, b: Tensor, parts: int = 1) -> Tensor:
    """`torch.matmul(a, b)` of matrices [..., m, k] and [..., k, n]; on the CPU in an order of additions that is ours.

    parts: the contraction is that of several matrices side by side, of which ranks hold halves one by one (gate and up of an MLP).
    """
    if a.device.type != "cpu":
        return torch.matmul(a, b)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"A product needs [..., m, k] and [..., k, n], got {tuple(a.shape)} and {tuple(b.shape)}.")
    if not a.shape[-1] or not a.numel() or not b.numel():
        return torch.matmul(a, b)  # no terms or no elements
    parts = parts if a.shape[-1] % parts == 0 else 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # takes less than a microsecond
    try:
        return _in_order(a, b, parts)
    finally:
        torch.set_num_threads(threads)


def _in_order(a: Tensor, b: Tensor, parts: int) -> Tensor:
    m, n = a.shape[-2], b.shape[-1]
    rows, columns = _padding() or (1, 1)
    a, b = _padded(a, -2, rows), _padded(b, -1, columns)
    out = _by_halves([a], [b]) if parts == 1 else _by_halves(a.chunk(parts, -1), b.chunk(parts, -2))
    return out if out.shape[-2:] == (m, n) else out[..., :m, :n].contiguous()


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Zeros behind the last row (dim -2) or column (dim -1)."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    return pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))


def _by_halves(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Sum over i of a[i] @ b[i], which are contractions of one length."""
    k = a[0].shape[-1]
    if k > LEAF and k % 2 == 0:
        half = k // 2
        first = _by_halves([x[..., :half] for x in a], [y[..., :half, :] for y in b])
        return first.add_(_by_halves([x[..., half:] for x in a], [y[..., half:, :] for y in b]))
    if k > LEAF:  # odd and long
        a = [piece for x in a for piece in x.split(LEAF, -1)]
        b = [piece for y in b for piece in y.split(LEAF, -2)]
    out = _leaf(a[0], b[0])
    for x, y in zip(a[1:], b[1:]):
        out += _leaf(x, y)
    return out


def _leaf(a: Tensor, b: Tensor) -> Tensor:
    if _padding() is None:
        return _explicit(a, b)
    return torch.matmul(_padded(a, -1, TERMS), _padded(b, -2, TERMS))


def _explicit(a: Tensor, b: Tensor) -> Tensor:
    """A leaf term by term. A product is rounded before it is added, as torch has no fused multiply-add."""
    out = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        out += a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return out


def _fused(a: Tensor, b: Tensor) -> Tensor:
    """`_explicit` with fused multiply-add, all but exactly: float64 holds the product, but rounds the sum, which one in 10^8 shows."""
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for k in range(a.shape[-1]):
        out = (out.double() + a[:, k : k + 1].double() * b[k : k + 1].double()).float()
    return out


def _example(rows: int, columns: int) -> Tensor:
    """Numbers in [-1, 1) with up to 24 significant bits, mixed from integers: torch's random ones differ with the length of vectors."""
    mixed = torch.arange(1, rows * columns + 1, dtype=torch.int64, device="cpu") * 2654435761 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 2246822519 & 0xFFFFFFFF
    return ((mixed >> 8).to(torch.float32) * 2.0**-23 - 1.0).view(rows, columns)


@functools.cache
def _padding() -> tuple[int, int] | None:
    """The rows and columns with whose multiples this machine's BLAS, on one thread, keeps the order of a leaf; None if it never does."""
    for rows, columns in PADDINGS:
        a, b = _example(7 * rows, LEAF), _example(LEAF, 8 * columns)
        products = [
            torch.matmul(x, y)
            for m in (rows, 2 * rows, 7 * rows)
            for n in (columns, 3 * columns, 5 * columns, 8 * columns)
            for x in (a[:m], a[:m].t().contiguous().t())
            for y in (b[:, :n], b[:, :n].t().contiguous().t())
        ]
        for expected in (_fused(a, b), _explicit(a, b)):
            if all(torch.equal(product, expected[: product.shape[0], : product.shape[1]]) for product in products):
                return rows, columns
    logger.warning(
        "ottava: this machine's BLAS adds the terms of a product in an order of its own. Products on the CPU are added term by term "
        "instead, many times slower, so that a mesh gives the bits of one process; a torch built with MKL does not need this."
    )
    return None


def sum_rows(x: Tensor) -> Tensor:
    """x [M, N] -> [N]; on the CPU by halves of the rows, as ranks that hold halves of the tokens add theirs.

    Every addition is one of whole rows: torch's own sum of a column depends on which column it is and on the length of vectors.
    """
    if x.device.type != "cpu":
        return x.sum(0)
    if x.shape[0] <= 1:
        return x[0].clone() if x.shape[0] else x.new_zeros(x.shape[1])
    odd = x.shape[0] // (x.shape[0] & -x.shape[0])  # 96 rows are 32 parts of 3, each padded to 4 with a row of zeros
    if odd > 1:
        x = _padded(x.reshape(-1, odd, x.shape[1]), -2, 1 << (odd - 1).bit_length()).flatten(0, 1)
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]
