"""Adam over many tensors in one launch; imported only where CUDA tensors meet it. The torch twin is in `optimizers/adam_update.py`.

Pointers and sizes come from a table on the device, so one launch steps any number of tensors of one kind (`Kind`). A program takes
`CHUNK` blocks of 128 elements of one tensor, in tiles of `ROWS` blocks. Gradient, working value and moments are read once and written
once: 28 bytes an element with float32 everywhere, 14 with bf16 gradients, remainders and FP8 moments.

Multiplications, additions, divisions and roots are the IEEE ones that torch's Adam does on a CPU, in its order, fused multiply-adds
included. Moments are equal to the bit; parameters may be a step or two off, because a CPU's float32 root is not always the nearest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottava.kernels.launch import Launcher

ROWS = tl.constexpr(8)  # blocks of a tile: 8 elements a thread at 4 warps
TILES = tl.constexpr(32)  # of a program: 32Ki elements, long enough that reading the table costs nothing
CHUNK = 8 * 32
WARPS = 4

# Columns of the table, one row a tensor. 16-byte alignment of every kind's rows: the width is even.
NUMEL, GRAD, PARAM, MASTER, EXP_AVG, EXP_AVG_SQ = (tl.constexpr(i) for i in range(6))
EXP_AVG_SCALE, EXP_AVG_SQ_SCALE, BLOCKS, COLUMNS, BASE, STRIDE = (tl.constexpr(i) for i in range(6, 12))
WIDTH = tl.constexpr(12)
# And of the table of counts.
STEP, LR_AT, LR, BETA1, BETA2, WEIGHT_DECAY, CORRECT, KEY = (tl.constexpr(i) for i in range(8))
COUNT_WIDTH = tl.constexpr(8)

# Where the working value is.
IN_PARAM, IN_MASTER, IN_REMAINDER, IN_ROUNDED_PARAM = (tl.constexpr(i) for i in range(4))
# How a moment is stored.
FLOAT32, BFLOAT16, BYTES = (tl.constexpr(i) for i in range(3))
GOLDEN = tl.constexpr(0x9E3779B9)
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOMENTS = {"float32": 0, "bfloat16": 1, "float8_e4m3fn_block128": 2, "float8_root_block128": 2}


class Kind(NamedTuple):
    """What tensors of one launch have in common."""

    held: int
    """IN_PARAM, IN_MASTER, IN_REMAINDER or IN_ROUNDED_PARAM."""
    param: torch.dtype | None
    """dtype of a parameter that is written; None: it has bytes only, and somebody else quantizes them."""
    grad: torch.dtype
    moments: tuple[str, str]
    """Names of formats."""
    aligned: bool
    """Every pointer is a multiple of 16 bytes."""
    ragged: bool
    """Rows do not end where blocks do. Without blocks nobody asks."""
    columnwise: bool
    """The rank holds some columns of the whole tensor. Without stochastic rounding nobody asks."""


# ------------------------------------------------------------------------------------------------------- counts and corrections


@triton.jit
def _power(base, exponent):
    """base^exponent in float64, for a whole exponent below 2^24."""
    result = base * 0.0 + 1.0
    for _ in range(24):
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def _mix(x):
    """Twin of `random_bits.mix`, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _count_kernel(rows, coefficients, grad_scale, SCALED: tl.constexpr):
    """One program a tensor: step += 1, and the factors of this step [decay, -lr / correction1, sqrt(correction2), random key].

    A grad_scale that is NaN: no step.
    """
    row = rows + tl.program_id(0) * COUNT_WIDTH
    out = coefficients + tl.program_id(0) * 4
    step_at = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at) + 1.0
    if SCALED:
        factor = tl.load(grad_scale)
        step = tl.where(factor == factor, step, step - 1.0)
    tl.store(step_at, step)
    lr = tl.load(row + LR).to(tl.float64, bitcast=True)
    lr_at = tl.load(row + LR_AT)
    if lr_at != 0:
        lr = tl.load(lr_at.to(tl.pointer_type(tl.float32))).to(tl.float64)
    correct = tl.load(row + CORRECT) != 0
    count = step.to(tl.int32)
    correction1 = 1.0 - _power(tl.load(row + BETA1).to(tl.float64, bitcast=True), count)
    correction2 = 1.0 - _power(tl.load(row + BETA2).to(tl.float64, bitcast=True), count)
    correction1 = tl.where(correct, correction1, correction1 * 0.0 + 1.0)
    correction2 = tl.where(correct, correction2, correction2 * 0.0 + 1.0)
    decay = 1.0 - lr * tl.load(row + WEIGHT_DECAY).to(tl.float64, bitcast=True)
    tl.store(out, decay.to(tl.float32))
    tl.store(out + 1, (-lr / correction1).to(tl.float32))
    tl.store(out + 2, tl.sqrt(correction2).to(tl.float32))
    key = _mix(_mix(tl.load(row + KEY).to(tl.uint32)) ^ count.to(tl.uint32))
    tl.store(out + 3, key.to(tl.float32, bitcast=True))


# ------------------------------------------------------------------------------------------------------------ numbers in few bits


@triton.jit
def _random(index, key, stream: tl.constexpr):
    """Twin of `random_bits.random_bits`."""
    key = key + ((GOLDEN * (stream + 1)) & 0xFFFFFFFF)
    return _mix(index.to(tl.uint32) ^ _mix((index >> 32).to(tl.uint32) ^ key))


@triton.jit
def _bfloat16(x, random):
    """Twin of `random_bits.round_to_bfloat16`."""
    raised = (x.to(tl.int32, bitcast=True) + (random & 0xFFFF).to(tl.int32)) & -0x10000
    return tl.where(tl.abs(x) < float("inf"), raised.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


@triton.jit
def _decode_signed(byte, scale_inv):
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale_inv


@triton.jit
def _decode_root(byte, scale_inv):
    code = byte.to(tl.int32)
    normal = ((code + 1792) << 19).to(tl.float32, bitcast=True)  # ROOT_OFFSET
    value = tl.where(code >= 16, normal, code.to(tl.float32) * 3.814697265625e-06)  # 2^-18
    value = tl.where(code == 255, float("nan"), value) * scale_inv
    return value * value


@triton.jit
def _scale(value, LIMIT: tl.constexpr):
    """Of each block of a tile [ROWS, 128]: [ROWS, 1]."""
    amax = tl.max(tl.where(value == value, tl.abs(value), 0.0), axis=1, keep_dims=True)
    usable = (amax > 0.0) & (amax < float("inf"))
    safe = tl.where(usable, amax, 1.0)
    scale = tl.where(usable, tl.div_rn(tl.zeros_like(safe) + LIMIT, safe), 1.0)
    return tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale)


@triton.jit
def _encode_signed(y, random, ROUNDING: tl.constexpr):
    """Twin of `block_moment._signed_codes`."""
    y = tl.where(y > 448.0, 448.0, tl.where(y < -448.0, -448.0, y))
    if ROUNDING:
        fraction = (random & 0xFFFFF).to(tl.int32)
        normal = ((y.to(tl.int32, bitcast=True) + fraction) & -0x100000).to(tl.float32, bitcast=True)
        small = tl.floor(tl.abs(y) * 512.0 + fraction.to(tl.float32) * 9.5367431640625e-07) * 0.001953125
        small = tl.where(y < 0.0, -small, small)
        rounded = tl.where(tl.abs(y) < 0.015625, small, normal)
        rounded = tl.where(rounded > 448.0, 448.0, tl.where(rounded < -448.0, -448.0, rounded))
        y = tl.where(y == y, rounded, y)
    return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _encode_root(root, y, random, ROUNDING: tl.constexpr):
    """Twin of `block_moment._root_codes`."""
    y = tl.where(y > 1.875, 1.875, y)
    raw = y.to(tl.int32, bitcast=True)
    if ROUNDING:
        fraction = (random & 0x7FFFF).to(tl.int32)
        normal = (raw + fraction) >> 19
        small = tl.floor(y * 262144.0 + fraction.to(tl.float32) * 1.9073486328125e-06) + 8388608.0
    else:
        normal = (raw + 0x3FFFF + ((raw >> 19) & 1)) >> 19
        small = y * 262144.0 + 8388608.0
    code = tl.where(y < 6.103515625e-05, small.to(tl.int32, bitcast=True) & 0x1F, normal - 1792)
    code = tl.where(code > 254, 254, code)
    code = tl.where((root > 0.0) & (code == 0), 1, code)
    return tl.where(root == root, code, 255).to(tl.uint8)


# -------------------------------------------------------------------------------------------------------------------- the step


@triton.jit
def _load(pointer, at, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + at, mask=inside, other=0)
    else:
        return tl.load(pointer + at)


@triton.jit
def _store(pointer, at, value, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + at, value, mask=inside)
    else:
        tl.store(pointer + at, value)


@triton.jit
def _address(row, column, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table."""
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.constexpr_function
def _stored(kind):
    """Element type of a stored moment."""
    return tl.uint8 if kind == 2 else tl.bfloat16 if kind == 1 else tl.float32


@triton.jit
def _tile(
    block, grad_at, param_at, master_at, first_at, second_at, first_scale, second_scale, numel, blocks_held, columns, base, stride,
    decay, step_size, correction, key, grad_scale, weight1, beta2, weight2, eps, weight_decay,
    HELD: tl.constexpr, PARAM_DTYPE: tl.constexpr, WRITES: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    SCALED: tl.constexpr, DECOUPLED: tl.constexpr, SLOW: tl.constexpr, ROUNDING: tl.constexpr, RAGGED: tl.constexpr,
    COLUMNWISE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`ROWS` blocks of a tensor, from block number `block` on."""
    blocks = block + tl.arange(0, ROWS)
    lanes = tl.arange(0, 128)
    if RAGGED:
        per_row = (columns + 127) // 128
        left = (blocks % per_row) * 128
        at = (blocks // per_row * columns + left)[:, None] + lanes[None, :]
        inside = (blocks < blocks_held)[:, None] & (left[:, None] + lanes[None, :] < columns)
    else:
        at = blocks[:, None] * 128 + lanes[None, :]
        inside = at < numel
    index = at
    if ROUNDING:
        index = at + base
        if COLUMNWISE:
            index += at // columns * (stride - columns)
    scale_at = blocks[:, None]
    scale_inside = (blocks < blocks_held)[:, None]

    # Gradient and working value, in float32.
    gradient = _load(grad_at, at, inside, MASKED).to(tl.float32)
    if SCALED:
        gradient = gradient * grad_scale
    if HELD == IN_MASTER:
        value = _load(master_at, at, inside, MASKED)
    elif HELD == IN_REMAINDER:
        high = _load(param_at, at, inside, MASKED).to(tl.int32) << 16
        value = (high + _load(master_at, at, inside, MASKED).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        value = _load(param_at, at, inside, MASKED).to(tl.float32)

    # Moments.
    exp_avg = _load(first_at, at, inside, MASKED)
    exp_avg_sq = _load(second_at, at, inside, MASKED)
    if FIRST == BYTES:
        exp_avg = _decode_signed(exp_avg, _load(first_scale, scale_at, scale_inside, MASKED))
    else:
        exp_avg = exp_avg.to(tl.float32)
    if SECOND == BYTES:
        exp_avg_sq = _decode_root(exp_avg_sq, _load(second_scale, scale_at, scale_inside, MASKED))
    else:
        exp_avg_sq = exp_avg_sq.to(tl.float32)

    # torch's Adam.
    if DECOUPLED:
        value = value * decay
    else:
        gradient = tl.fma(value, tl.zeros_like(value) + weight_decay, gradient)
    towards = gradient - exp_avg
    if SLOW:  # torch's lerp begins at the nearer end
        exp_avg = tl.fma(towards, tl.zeros_like(towards) + weight1, exp_avg)
    else:
        exp_avg = tl.fma(towards, tl.zeros_like(towards) - (1.0 - weight1), gradient)
    exp_avg_sq = tl.fma(weight2 * gradient, gradient, exp_avg_sq * beta2)
    divisor = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.zeros_like(exp_avg_sq) + correction) + eps
    value = value + tl.div_rn(step_size * exp_avg, divisor)

    # What is stored.
    if FIRST == BYTES:
        if MASKED:
            exp_avg = tl.where(inside, exp_avg, 0.0)
        scale = _scale(exp_avg, 448.0)
        code = _encode_signed(exp_avg * scale, _random(index, key, 1), ROUNDING)
        _store(first_at, at, code, inside, MASKED)
        _store(first_scale, scale_at, tl.div_rn(tl.zeros_like(scale) + 1.0, scale), scale_inside, MASKED)
    elif FIRST == BFLOAT16:
        rounded = _bfloat16(exp_avg, _random(index, key, 1)) if ROUNDING else exp_avg.to(tl.bfloat16)
        _store(first_at, at, rounded, inside, MASKED)
    else:
        _store(first_at, at, exp_avg, inside, MASKED)
    if SECOND == BYTES:
        root = tl.sqrt_rn(exp_avg_sq)
        if MASKED:
            root = tl.where(inside, root, 0.0)
        scale = _scale(root, 1.875)
        code = _encode_root(root, root * scale, _random(index, key, 2), ROUNDING)
        _store(second_at, at, code, inside, MASKED)
        _store(second_scale, scale_at, tl.div_rn(tl.zeros_like(scale) + 1.0, scale), scale_inside, MASKED)
    elif SECOND == BFLOAT16:
        rounded = _bfloat16(exp_avg_sq, _random(index, key, 2)) if ROUNDING else exp_avg_sq.to(tl.bfloat16)
        _store(second_at, at, rounded, inside, MASKED)
    else:
        _store(second_at, at, exp_avg_sq, inside, MASKED)
    if HELD == IN_REMAINDER:
        bits = value.to(tl.int32, bitcast=True)
        _store(master_at, at, bits.to(tl.int16), inside, MASKED)
        _store(param_at, at, ((bits + 0x8000) >> 16).to(tl.int16), inside, MASKED)
    else:
        if HELD == IN_MASTER:
            _store(master_at, at, value, inside, MASKED)
        if WRITES:
            if ROUNDING and HELD == IN_ROUNDED_PARAM:
                _store(param_at, at, _bfloat16(value, _random(index, key, 0)), inside, MASKED)
            else:
                _store(param_at, at, value.to(PARAM_DTYPE), inside, MASKED)


@triton.jit
def _adam_kernel(
    table, chunks, coefficients, grad_scale, weight1, beta2, weight2, eps, weight_decay,
    HELD: tl.constexpr, PARAM_DTYPE: tl.constexpr, WRITES: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SCALED: tl.constexpr, DECOUPLED: tl.constexpr, SLOW: tl.constexpr,
    ROUNDING: tl.constexpr, ALIGNED: tl.constexpr, RAGGED: tl.constexpr, COLUMNWISE: tl.constexpr,
):  # fmt: skip
    """A program a chunk; chunks [c, 2]: tensor, number of the chunk in it."""
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (ROWS * TILES)
    row = table + tensor * WIDTH
    factors = coefficients + tensor * 4
    grad_at = _address(row, GRAD, GRAD_DTYPE, ALIGNED)
    param_at = _address(row, PARAM, PARAM_DTYPE, ALIGNED)
    master_at = _address(row, MASTER, tl.int16 if HELD == IN_REMAINDER else tl.float32, ALIGNED)
    first_at = _address(row, EXP_AVG, _stored(FIRST), ALIGNED)
    second_at = _address(row, EXP_AVG_SQ, _stored(SECOND), ALIGNED)
    first_scale = _address(row, EXP_AVG_SCALE, tl.float32, False)
    second_scale = _address(row, EXP_AVG_SQ_SCALE, tl.float32, False)
    numel, blocks, columns = tl.load(row + NUMEL), tl.load(row + BLOCKS), tl.load(row + COLUMNS)
    base, stride = tl.load(row + BASE), tl.load(row + STRIDE)
    decay, step_size, correction = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    key = tl.load(factors + 3).to(tl.uint32, bitcast=True)
    factor = decay
    if SCALED:
        factor = tl.load(grad_scale)
    total = tl.minimum((blocks - first + ROWS - 1) // ROWS, TILES)
    if SCALED:
        total = tl.where(factor == factor, total, 0)  # NaN: no step
    full = total * 0
    if not RAGGED:  # tiles of whole blocks need no mask, and so move 16 bytes at a time
        full = tl.minimum((numel // 128 - first) // ROWS, total)
        for tile in range(full):
            _tile(
                first + tile * ROWS, grad_at, param_at, master_at, first_at, second_at, first_scale, second_scale, numel, blocks,
                columns, base, stride, decay, step_size, correction, key, factor, weight1, beta2, weight2, eps, weight_decay,
                HELD, PARAM_DTYPE, WRITES, FIRST, SECOND, SCALED, DECOUPLED, SLOW, ROUNDING, RAGGED, COLUMNWISE, MASKED=False,
            )  # fmt: skip
    for tile in range(full, total):
        _tile(
            first + tile * ROWS, grad_at, param_at, master_at, first_at, second_at, first_scale, second_scale, numel, blocks,
            columns, base, stride, decay, step_size, correction, key, factor, weight1, beta2, weight2, eps, weight_decay,
            HELD, PARAM_DTYPE, WRITES, FIRST, SECOND, SCALED, DECOUPLED, SLOW, ROUNDING, RAGGED, COLUMNWISE, MASKED=True,
        )  # fmt: skip


_COUNT = Launcher(_count_kernel)
_ADAM = Launcher(_adam_kernel)


def count(rows: Tensor, coefficients: Tensor, grad_scale: Tensor | None) -> None:
    """Adds 1 to every step count of `rows` [n, 8] and writes the factors of the step to `coefficients` float32 [n, 4]."""
    tensors = {"rows": rows, "coefficients": coefficients, "grad_scale": grad_scale}
    _COUNT((rows.shape[0],), 1, {**tensors, "SCALED": grad_scale is not None})


def step(
    kind: Kind,
    table: Tensor,
    chunks: Tensor,
    coefficients: Tensor,
    grad_scale: Tensor | None,
    group: dict[str, Any],
    decoupled: bool,
    rounding: bool,
) -> None:
    """One launch: the tensors of `table` [n, 12], in the pieces that `chunks` [c, 2] says. group: betas, eps, weight_decay."""
    beta1, beta2 = group["betas"]
    remainder = kind.held == IN_REMAINDER.value
    param = tl.int16 if remainder else DTYPES[kind.param or torch.float32]
    _ADAM(
        (chunks.shape[0],),
        WARPS,
        {
            "table": table, "chunks": chunks, "coefficients": coefficients, "grad_scale": grad_scale,
            "weight1": 1.0 - beta1, "beta2": float(beta2), "weight2": 1.0 - beta2, "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]), "HELD": kind.held, "PARAM_DTYPE": param,
            "WRITES": kind.param is not None, "GRAD_DTYPE": DTYPES[kind.grad], "FIRST": MOMENTS[kind.moments[0]],
            "SECOND": MOMENTS[kind.moments[1]], "SCALED": grad_scale is not None, "DECOUPLED": decoupled,
            "SLOW": 1.0 - beta1 < 0.5, "ROUNDING": rounding, "ALIGNED": kind.aligned, "RAGGED": kind.ragged,
            "COLUMNWISE": kind.columnwise,
        },
    )  # fmt: skip
