"""The Triton kernel of `tile.py`: a producer fills a float32 tile, a consumer turns it into bytes.

Everything that is known when a kernel is compiled is written in capitals; each combination becomes a kernel of its own.

[Note: halves] A tile of BM rows is held as two: its even rows and its odd ones. A thread then has two values that are neighbours in a
column, which the cast instruction packs into 16 bits, and what is transposed for the columnwise copy are these: a quarter of the shared
memory that the float32 tile would take. (Triton 3.6 also miscompiles the transposition of 8-bit tiles on Hopper: a quarter of the bytes end
up in other places.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottava.kernels import magnitudes_triton as magnitudes
from ottava.kernels.activation_triton import activate, derivative


@triton.jit
def _scale_of(amax, FP8_MAX: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr, INF_VALUE: tl.constexpr):
    """The twin of `scaling.scale_from_amax`."""
    if EPSILON > 0:
        amax = tl.where(amax < EPSILON, EPSILON, amax)
    usable = (amax > 0) & (amax < float("inf"))
    if POWER_OF_TWO:
        scale = _power_of_two_scale(amax, FP8_MAX, INF_VALUE)
    else:
        safe = tl.where(usable, amax, 1.0)
        scale = tl.div_rn(safe * 0.0 + FP8_MAX, safe)
        scale = tl.where(scale == float("inf"), INF_VALUE, scale)
    return tl.where(usable, scale, 1.0)


@triton.jit
def _power_of_two_scale(amax, FP8_MAX: tl.constexpr, INF_VALUE: tl.constexpr):
    """FP8_MAX / amax, rounded down to a power of two, without the division, which takes as long as the casts of twenty values.

    FP8_MAX is 1.75 * 2^8 or 1.75 * 2^15, amax m * 2^e. If m <= 1.75, the quotient's exponent is 8 (15) - e, else it is one less: the
    nearest quotient below 2^(8 - e) is far enough from it not to be rounded to it.
    """
    tl.static_assert((FP8_MAX == 448.0) or (FP8_MAX == 57344.0))
    TOP: tl.constexpr = 262 if FP8_MAX == 448.0 else 269  # 8 (15) and the bias of both exponents
    exponent = TOP - ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23)  # the sum carries if m > 1.75
    scale = tl.where(exponent < 255, (exponent << 23).to(tl.float32, bitcast=True), INF_VALUE)
    return (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(scale, POWER_OF_TWO: tl.constexpr):
    if POWER_OF_TWO:
        return _power_of_two(scale.to(tl.int32, bitcast=True) >> 23)
    return tl.div_rn(scale * 0.0 + 1.0, scale)


@triton.jit
def _e8m0_of(amax, FP8_MAX: tl.constexpr):
    """The twin of `scaling.e8m0_from_amax`."""
    ratio = amax * (1.0 / FP8_MAX)
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    up = (mantissa > 0) & ((exponent != 0) | (mantissa > 0x400000))
    exponent = tl.minimum(exponent + up.to(tl.int32), 254)
    return tl.where(ratio == 0.0, 0, exponent)


@triton.jit
def _power_of_two(exponent):
    """2^(127 - e) as float32, for a biased exponent e <= 254; exact when that is subnormal."""
    inverse = 254 - exponent
    bits = tl.where(inverse == 0, 0x00400000, inverse << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_bytes(v, E5M2: tl.constexpr):
    """float32 -> FP8 bytes. The instruction rounds to nearest even, saturates, and makes 0x7F of any NaN."""
    if E5M2:
        q = v.to(tl.float8e5)
    else:
        q = v.to(tl.float8e4nv)
    return q.to(tl.uint8, bitcast=True)


@triton.jit
def _pair_to_bytes(low, high, E5M2: tl.constexpr):
    """Two float32 tiles -> one of 16 bits: FP8 of `low` in the low byte, of `high` in the high byte."""
    if E5M2:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
    )


@triton.jit
def _store(pointers, values, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _store_columnwise(
    even, odd, col_ptr, row0, col0, col_end, M, stride, E5M2: tl.constexpr, EVEN: tl.constexpr, H: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Casts the halves [H, BK] of a tile (already scaled) and stores its transpose at [col0, row0] of col_ptr, whose rows are `stride`
    (even) apart, as pairs of bytes."""
    c, p = tl.arange(0, BK), tl.arange(0, H)
    at = (col0.to(tl.int64) * stride + row0) // 2 + c[:, None] * (stride // 2) + p[None, :]
    mask = (col0 + c < col_end)[:, None] & (row0 + 2 * p < M)[None, :]
    _store(col_ptr.to(tl.pointer_type(tl.uint16)) + at, tl.trans(_pair_to_bytes(even, odd, E5M2)), mask, EVEN)


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    """float32."""
    if EVEN:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store_rowwise(
    v, row_ptr, row_scale_ptr, row0, col0, col_end, M, K, scale,
    KIND: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    INF_VALUE: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, H: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One half v [H, BK], whose rows are row0, row0 + 2, ...; with the scales of its own rows, or with `scale`. "values": as they are."""
    r, c = row0 + 2 * tl.arange(0, H), tl.arange(0, BK)
    mask = (r < M)[:, None] & (col0 + c < col_end)[None, :]
    at = row_ptr + row0.to(tl.int64) * K + col0 + (r - row0)[:, None] * K + c[None, :]
    if KIND == "values":
        _store(at, v.to(DTYPE), mask, EVEN)
    elif KIND == "block1d":
        own = _scale_of(tl.max(tl.abs(v), axis=1), FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE)
        _store(at, _to_bytes(v * own[:, None], E5M2), mask, EVEN)
        tl.store(row_scale_ptr + (col0 // BK).to(tl.int64) * M + r, _reciprocal(own, POWER_OF_TWO), mask=r < M)
    elif KIND == "mx":
        blocks = tl.reshape(v, [H, BK // 32, 32])
        exponent = _e8m0_of(tl.max(tl.abs(blocks), axis=2), FP8_MAX)
        q = _to_bytes(blocks * _power_of_two(exponent)[:, :, None], E5M2)
        _store(at, tl.reshape(q, [H, BK]), mask, EVEN)
        block = col0 // 32 + tl.arange(0, BK // 32)
        width = tl.cdiv(K, 32)
        tl.store(
            row_scale_ptr + r[:, None].to(tl.int64) * width + block[None, :], exponent.to(tl.uint8),
            mask=(r < M)[:, None] & (block < width)[None, :],
        )  # fmt: skip
    else:
        _store(at, _to_bytes(v * scale, E5M2), mask, EVEN)


@triton.jit
def _consume(
    even, odd, packed, row0, col0, col_end, M, K, col_stride, scale, bad_ptr,
    row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, values_ptr,
    KIND: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    INF_VALUE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr, SUM: tl.constexpr,
    ROUND: tl.constexpr, PACK: tl.constexpr, LOOK: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """even, odd: float32 [BM / 2, BK], the halves of the tile at (row0, col0) of the output [M, K]; zero outside of it. PACK: they are in
    `packed` instead, which is None otherwise. LOOK: amax_ptr is raised, and what is not finite is counted. Reductions ignore NaN.
    col_end: where this tile's half of the output ends."""
    H: tl.constexpr = BM // 2
    c = tl.arange(0, BK)
    if PACK:
        even, odd = magnitudes.even_of(packed), magnitudes.odd_of(packed)
    if AMAX == "unrounded":
        magnitudes.raise_to(amax_ptr, tl.max(tl.maximum(tl.abs(even), tl.abs(odd))))
    if ROUND and not PACK:
        even, odd = even.to(DTYPE).to(tl.float32), odd.to(DTYPE).to(tl.float32)
    if LOOK or (KIND == "block2d"):
        amax = magnitudes.of_packed(bad_ptr, packed) if PACK else magnitudes.of_floats(bad_ptr, even, odd)
    if LOOK and (AMAX == "rounded"):
        magnitudes.raise_to(amax_ptr, amax)
    if SUM:
        tl.store(
            sum_ptr + (row0 // BM).to(tl.int64) * K + col0 + c, tl.sum(even + odd, axis=0), mask=col0 + c < col_end
        )
    if KIND == "block2d":
        scale = _scale_of(amax, FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE)
        if ROWWISE:
            tl.store(row_scale_ptr + (row0 // BM) * tl.cdiv(K, BK) + col0 // BK, _reciprocal(scale, POWER_OF_TWO))
        if COLUMNWISE:
            tl.store(col_scale_ptr + (col0 // BK) * tl.cdiv(M, BM) + row0 // BM, _reciprocal(scale, POWER_OF_TWO))
    if ROWWISE | (KIND == "values"):
        to = values_ptr if KIND == "values" else row_ptr
        _store_rowwise(
            even, to, row_scale_ptr, row0, col0, col_end, M, K, scale,
            KIND, E5M2, FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE, DTYPE, EVEN, H, BK,
        )  # fmt: skip
        _store_rowwise(
            odd, to, row_scale_ptr, row0 + 1, col0, col_end, M, K, scale,
            KIND, E5M2, FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE, DTYPE, EVEN, H, BK,
        )  # fmt: skip
    if COLUMNWISE:
        if KIND == "block1d":
            own = _scale_of(
                tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=0), FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE
            )
            even, odd = even * own[None, :], odd * own[None, :]
            at = col_scale_ptr + (row0 // BM).to(tl.int64) * K + col0 + c
            tl.store(at, _reciprocal(own, POWER_OF_TWO), mask=col0 + c < col_end)
        elif KIND == "mx":
            blocks = tl.reshape(even, [BM // 32, 16, BK])  # 32 rows: 16 of each half
            others = tl.reshape(odd, [BM // 32, 16, BK])
            exponent = _e8m0_of(tl.max(tl.maximum(tl.abs(blocks), tl.abs(others)), axis=1), FP8_MAX)
            even = tl.reshape(blocks * _power_of_two(exponent)[:, None, :], [H, BK])
            odd = tl.reshape(others * _power_of_two(exponent)[:, None, :], [H, BK])
            block = row0 // 32 + tl.arange(0, BM // 32)
            width = tl.cdiv(M, 32)
            tl.store(
                col_scale_ptr + (col0 + c)[None, :].to(tl.int64) * width + block[:, None], exponent.to(tl.uint8),
                mask=(col0 + c < col_end)[None, :] & (block < width)[:, None],
            )  # fmt: skip
        else:
            even, odd = even * scale, odd * scale
        _store_columnwise(even, odd, col_ptr, row0, col0, col_end, M, col_stride, E5M2, EVEN, H, BK)


# ----------------------------------------------------------------------------------------------------------------- kernel


@triton.jit
def _produce(
    x_ptr, dy_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, x_stride, dy_stride, row0, col0, M, K,
    PRODUCER: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BETA: tl.constexpr, CENTER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, EVEN: tl.constexpr, H: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """float32 [H, BK]: (the half whose rows are row0, row0 + 2, ..., its twin in the other part of a gated backward's output, and the
    activation's own output in a backward)."""
    r, c = 2 * tl.arange(0, H), tl.arange(0, BK)
    mask = (row0 + r < M)[:, None] & (col0 + c < K)[None, :]
    x_at = x_ptr + row0.to(tl.int64) * x_stride + col0 + r[:, None] * x_stride + c[None, :]
    x = _load(x_at, mask, EVEN)
    v = x
    twin = x
    output = x
    if PRODUCER == "norm":
        if CENTER:
            x = x - tl.load(mean_ptr + row0 + r, mask=row0 + r < M, other=0.0)[:, None]
        gain = tl.load(gamma_ptr + col0 + c, mask=col0 + c < K, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            gain = gain + 1.0
        v = (x * tl.load(rstd_ptr + row0 + r, mask=row0 + r < M, other=0.0)[:, None]) * gain[None, :]
        if BETA:
            v = v + tl.load(beta_ptr + col0 + c, mask=col0 + c < K, other=0.0).to(tl.float32)[None, :]
    elif PRODUCER == "activation":
        v = activate(x, ACT)
        if GATED:
            v = v * _load(x_at + K, mask, EVEN)
    elif PRODUCER == "activation_backward":
        dy = _load(dy_ptr + row0.to(tl.int64) * dy_stride + col0 + r[:, None] * dy_stride + c[None, :], mask, EVEN)
        if GATED:
            up = _load(x_at + K, mask, EVEN)
            v = (dy * up) * derivative(x, ACT)
            activated = activate(x, ACT)
            twin = dy * activated
            output = activated * up
        else:
            v = dy * derivative(x, ACT)
            output = activate(x, ACT)
    else:
        tl.static_assert(PRODUCER == "identity")
    if (not EVEN) and ((PRODUCER == "norm") or (PRODUCER == "activation_backward")):
        v = tl.where(mask, v, 0.0)  # beta and the overlap of the two parts reach past the edge
    return v, twin, output


@triton.jit
def tile_kernel(
    x_ptr, dy_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, x_stride, dy_stride,
    scale_ptr, amax_in_ptr, bad_ptr,
    row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, values_ptr,
    output_in_ptr, output_ptr, output_scale_ptr,
    M, K, col_stride,
    PRODUCER: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BETA: tl.constexpr, CENTER: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, SCALE: tl.constexpr,
    KIND: tl.constexpr, E5M2: tl.constexpr, FP8_MAX: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    INF_VALUE: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, AMAX: tl.constexpr, SUM: tl.constexpr,
    ROUND: tl.constexpr, PACK: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    OUTPUT: tl.constexpr, OUTPUT_E5M2: tl.constexpr, OUTPUT_MAX: tl.constexpr, OUTPUT_EPSILON: tl.constexpr,
    OUTPUT_POWER_OF_TWO: tl.constexpr, OUTPUT_ROUND: tl.constexpr,
):  # fmt: skip
    """M x K: what the grid covers; for a gated backward the output is M x 2K and each program makes two tiles of it.

    OUTPUT: the columnwise copy of what the activation gave in forward is made too, by the scale ("given") or amax in output_in_ptr, or by
    those of its blocks ("blocks"); "none": it is not. PACK: see
    magnitudes_triton.py, [Note: packed]; then ROUND is true or changes nothing, and OUTPUT_ROUND is as ROUND.
    """
    col0, row0 = tl.program_id(0) * BK, tl.program_id(1) * BM
    even, even_twin, even_output = _produce(
        x_ptr, dy_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, x_stride, dy_stride, row0, col0, M, K,
        PRODUCER, ACT, GATED, BETA, CENTER, ZERO_CENTERED, EVEN, BM // 2, BK,
    )  # fmt: skip
    odd, odd_twin, odd_output = _produce(
        x_ptr, dy_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, x_stride, dy_stride, row0 + 1, col0, M, K,
        PRODUCER, ACT, GATED, BETA, CENTER, ZERO_CENTERED, EVEN, BM // 2, BK,
    )  # fmt: skip

    packed, packed_twin, packed_output = None, None, None
    if PACK:
        packed = magnitudes.pack(even, odd)
        packed_twin = magnitudes.pack(even_twin, odd_twin)
        packed_output = magnitudes.pack(even_output, odd_output)
    elif OUTPUT != "none":
        # Three tiles wait for one another: what will be rounded anyway takes half the registers if it is now.
        if OUTPUT_ROUND:
            even_output, odd_output = even_output.to(DTYPE), odd_output.to(DTYPE)
        if ROUND:
            even, odd = even.to(DTYPE), odd.to(DTYPE)
            even_twin, odd_twin = even_twin.to(DTYPE), odd_twin.to(DTYPE)

    if SCALE == "given":
        scale = tl.load(scale_ptr)
    elif SCALE == "amax":
        scale = _scale_of(tl.load(amax_in_ptr), FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE)
    else:
        scale = 1.0
    if SCALE != "none":  # known when the kernel is compiled; the next one is not  # noqa: SIM102
        if (col0 == 0) & (row0 == 0):  # what was given may be any number
            if ROWWISE:
                tl.store(row_scale_ptr, _reciprocal(scale, POWER_OF_TWO and SCALE == "amax"))
            if COLUMNWISE:
                tl.store(col_scale_ptr, _reciprocal(scale, POWER_OF_TWO and SCALE == "amax"))
            if AMAX == "copy":  # the amax that was given is an output too
                tl.store(amax_ptr, tl.load(amax_in_ptr))

    WIDTH = K
    GATED_BACKWARD: tl.constexpr = (PRODUCER == "activation_backward") and GATED
    BOTH: tl.constexpr = GATED_BACKWARD and (KIND == "tensor")
    LOOK: tl.constexpr = ((bad_ptr is not None) or (AMAX == "rounded")) and not BOTH
    if BOTH:  # one look at the two parts of the output
        if PACK:
            amax = magnitudes.of_two_packed(bad_ptr, packed, packed_twin)
        else:
            if ROUND:
                even, odd = even.to(DTYPE).to(tl.float32), odd.to(DTYPE).to(tl.float32)
                even_twin, odd_twin = even_twin.to(DTYPE).to(tl.float32), odd_twin.to(DTYPE).to(tl.float32)
            amax = magnitudes.of_two_floats(bad_ptr, even, odd, even_twin, odd_twin)
        if AMAX == "rounded":
            magnitudes.raise_to(amax_ptr, amax)
    if GATED_BACKWARD:
        WIDTH = 2 * K
        _consume(
            even_twin, odd_twin, packed_twin, row0, col0 + K, WIDTH, M, WIDTH, col_stride, scale, bad_ptr,
            row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, values_ptr,
            KIND, E5M2, FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE, ROWWISE, COLUMNWISE, AMAX, SUM, ROUND, PACK, LOOK, DTYPE, EVEN, BM, BK,
        )  # fmt: skip
    _consume(
        even, odd, packed, row0, col0, K, M, WIDTH, col_stride, scale, bad_ptr,
        row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, sum_ptr, values_ptr,
        KIND, E5M2, FP8_MAX, EPSILON, POWER_OF_TWO, INF_VALUE, ROWWISE, COLUMNWISE, AMAX, SUM, ROUND, PACK, LOOK, DTYPE, EVEN, BM, BK,
    )  # fmt: skip
    if OUTPUT != "none":
        scale = 1.0
        if OUTPUT != "blocks":
            scale = tl.load(output_in_ptr)
            if OUTPUT == "amax":
                scale = _scale_of(scale, OUTPUT_MAX, OUTPUT_EPSILON, OUTPUT_POWER_OF_TWO, INF_VALUE)
            if (col0 == 0) & (row0 == 0):
                tl.store(output_scale_ptr, _reciprocal(scale, OUTPUT_POWER_OF_TWO and OUTPUT == "amax"))
        _consume(
            even_output, odd_output, packed_output, row0, col0, K, M, K, col_stride, scale, None,
            None, None, output_ptr, output_scale_ptr, None, None, None,
            KIND, OUTPUT_E5M2, OUTPUT_MAX, OUTPUT_EPSILON, OUTPUT_POWER_OF_TWO, INF_VALUE, False, True, "none", False,
            OUTPUT_ROUND, PACK, False, DTYPE, EVEN, BM, BK,
        )  # fmt: skip
