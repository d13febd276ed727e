"""The one autograd core: a chain of (producer -> GEMM) stages.

    stage:  operand = quantize(produce(h));  h = operand @ weight.T + bias

`Linear` is a chain of one stage whose producer is the identity, `LayerNormLinear` of one that normalizes, `LayerNormMLP` of two
(norm, then activation), `GroupedLinear` of one whose rows come in groups ([Note: groups] in `stage.py`). Shapes inside are 2-D:
tokens M x features.

What a stage keeps for its backward is the FP8 columnwise copy of its operand (one byte an element), plus the producer's own input
where that has a derivative. With `recompute` the copy is made again from that input instead.

[Note: three ways back] `Stage.backward` says how the backward GEMMs run: "quantized" quantizes the gradient and uses FP8 operands;
"high_precision" keeps the operands in the activation dtype; "dequantized" turns the saved FP8 operands back first. A stage without
schemes (`Stage.input is None`) is unquantized throughout and always goes back in high precision.

[Note: many ranks] A stage's `strategy` (see `strategy.py`) does what there is to do around a GEMM that is spread over ranks. Ranks
that quantize parts of one tensor share its amax first, so scales and bytes are those of one process. Tokens that are spread over
ranks are quantized where they are and gathered as bytes: rowwise copies in forward, columnwise ones in backward. A columnwise block
must not cross a rank's border; where the tokens of a rank do not fill whole blocks, high precision is gathered and quantized after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels.activation import get as get_activation
from ottava.kernels.cast import Buffers, operand_amax
from ottava.nn import direct
from ottava.nn import product as products
from ottava.nn.columnwise import quantize_again
from ottava.nn.operand import Operand, columnwise, rowwise, transposed
from ottava.nn.product import Product, product
from ottava.nn.stage import (
    Chain,
    DelayedTensors,
    Gradient,
    Made,
    Saved,
    Source,
    Stage,
    StageGradients,
    StageTensors,
    column_of,
    count_into,
    grad_column,
    input_column,
    pack,
    source_of,
    unpack,
    weight_column,
)
from ottava.nn.strategy import ALONE, Later
from ottava.notices import leads, warn_once
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import gradient_dtype

ops = torch.ops.ottava


# ---------------------------------------------------------------------------------------------------------------- producers


def _statistics(stage: Stage, h: Tensor, residual: Tensor | None, t: StageTensors) -> tuple[Source, Tensor | None]:
    """What the stage's operand is produced from, and its amax where current scaling needs it and a norm has found it.

    residual: what is added to h before the norm; the source's `h` is the sum then.
    """
    if stage.norm is None:
        return Source(h, t.gamma, t.beta, None, None), None
    needs_amax = stage.input is not None and stage.input.per_tensor and not stage.delayed
    norm = (t.gamma, t.beta, stage.norm.kind, stage.norm.eps, stage.norm.zero_centered, needs_amax)
    if residual is None:
        mean, rstd, amax = ops.norm_stats(h, *norm)
    else:
        h, mean, rstd, amax = ops.norm_add_stats(h, residual, *norm)
    return Source(h, t.gamma, t.beta, mean, rstd), amax if needs_amax else None


def _produce(stage: Stage, source: Source) -> Tensor:
    """The stage's operand in the activation dtype [M, K]."""
    h = source.h
    if stage.norm is not None:
        return ops.norm_apply(h, source.gamma, source.beta, source.mean, source.rstd, stage.norm.zero_centered, h.dtype)
    return h if stage.activation is None else ops.activation(h, stage.activation)


def _produce_quantized(
    stage: Stage, source: Source, scale: Tensor | None, amax: Tensor | None, row: bool, column: bool
) -> Buffers:
    """The stage's operand, quantized, without a high-precision copy in between. row, column: which copies."""
    args = (str(stage.input), scale, amax, row, column)
    if stage.norm is not None:
        norm = (source.gamma, source.beta, source.mean, source.rstd, stage.norm.zero_centered)
        return Buffers(*ops.norm_quantize(source.h, *norm, *args))
    if stage.activation is not None:
        return Buffers(*ops.activation_quantize(source.h, stage.activation, *args))
    return Buffers(*ops.quantize(source.h, *args))


def _quantize(
    x: Tensor, scheme: Scheme | None, scale: Tensor | None, amax: Tensor | None, row: bool, column: bool
) -> Buffers:
    return Buffers(*ops.quantize(x, str(scheme), scale, amax, row, column))


def _shared_amax(stage: Stage, source: Source, own: Tensor | None) -> Tensor | None:
    """The amax of the stage's operand over all ranks that hold a part of it. own: what the norm found on this rank."""
    scheme, strategy = stage.input, stage.strategy
    assert scheme is not None
    if not strategy.shares_input_amax or stage.delayed or not scheme.needs_tensor_amax:
        return own
    if not scheme.per_tensor:
        own = operand_amax(_produce(stage, source), scheme)
    elif own is None:
        own = ops.amax(source.h) if stage.activation is None else ops.activation_amax(source.h, stage.activation)
    return strategy.share_amax(own)


# ------------------------------------------------------------------------------------------------------------------ forward


def _make_quantized(
    stage: Stage, h: Tensor, residual: Tensor | None, t: StageTensors, scale: Tensor | None, keep: bool
) -> Made:
    """The quantized operand of one group. keep: a backward pass will come."""
    assert stage.input is not None
    source, amax = _statistics(stage, h, residual, t)
    h = source.h
    amax = _shared_amax(stage, source, amax)
    norm_out = _produce(stage, source) if stage.return_norm else None
    remake = stage.recompute or (stage.strategy.gathers_input and not stage.input.fills_blocks(h.shape[0]))
    column = keep and stage.backward == "quantized" and not remake
    if norm_out is not None:  # it exists anyway: quantize the rounded tensor
        q = _quantize(norm_out, stage.input, scale, amax, True, column)
    else:
        q = _produce_quantized(stage, source, scale, amax, True, column)
    if amax is None and stage.input.per_tensor and not stage.delayed:
        amax = q.rowwise_amax  # found on the way: what is made again need not look for it
    operand: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, amax)
    if column:
        operand = (q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax)
    elif stage.backward == "dequantized" and not remake:
        operand = (q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax)
    elif stage.backward == "high_precision" and not remake:
        operand = (norm_out if norm_out is not None else _produce(stage, source), None, None)
    weight: tuple[Tensor | None, Tensor | None, Tensor | None]
    if stage.backward == "quantized" and (t.col is not None or t.source is not None):
        weight = (t.col, t.col_scale, t.col_amax)
    elif stage.backward != "high_precision":  # backward transposes, or dequantizes
        weight = (t.row, t.row_scale, t.row_amax)
    else:
        weight = (t.weight, None, None)
    needs_source = stage.norm is not None or stage.activation is not None or remake
    saved = Saved(h if needs_source else None, *source[1:], *operand, *weight)
    return Made(rowwise(q, stage.input), saved, norm_out, q.rowwise_amax)


def _make_unquantized(stage: Stage, h: Tensor, residual: Tensor | None, t: StageTensors) -> Made:
    """The same in the activation dtype."""
    source, _ = _statistics(stage, h, residual, t)
    h = source.h
    operand = _produce(stage, source)
    needs_source = stage.norm is not None or stage.activation is not None or stage.recompute
    kept = None if stage.recompute else operand
    saved = Saved(h if needs_source else None, *source[1:], kept, None, None, t.weight, None, None)
    return Made(Operand(operand), saved, operand if stage.return_norm else None, None)


def _weight_operand(stage: Stage, t: StageTensors) -> Operand:
    """What the forward GEMM multiplies with."""
    if stage.weight is None:
        return Operand(t.weight)
    assert t.row is not None
    return Operand(t.row, t.row_scale, t.row_amax, stage.weight)


def _fprop(stage: Stage, made: list[Made], tensors: list[StageTensors], dtype: torch.dtype) -> Tensor:
    """The output of all groups [M, N]."""
    weights = [_weight_operand(stage, t) for t in tensors]
    biases = [t.bias for t in tensors if t.bias is not None]
    return stage.strategy.fprop([m.operand for m in made], Product(weights, dtype, stage.split_fprop), biases)


def _record_forward(chain: Chain, number: int, made: Made, t: StageTensors, history: Tensor | None) -> None:
    """Raises the amax history of stage `number`, where somebody collects it."""
    if chain.calibrate:
        ops.record_amax_(history, ops.amax(made.operand.data), input_column(number), 0)
        ops.record_amax_(history, ops.amax(t.weight), weight_column(number), 0)
    elif chain.record and chain.stages[number].delayed:
        ops.record_amax_(history, made.amax, input_column(number), 0)


# ----------------------------------------------------------------------------------------------------------------- backward


def _wgrad_operand(stage: Stage, s: Saved, scale: Tensor | None, dtype: torch.dtype) -> Operand:
    """The input's side of wgrad, of this rank's tokens: saved, or made again if the stage recomputes. In high precision [M, K]."""
    if stage.input is None or stage.backward != "quantized":
        return Operand(_high_precision_operand(stage, s, scale, dtype))
    if s.data is not None:
        return Operand(s.data, s.scale_inv, s.amax, stage.input, "columnwise")
    source = source_of(s)
    if stage.return_norm:
        q = _quantize(_produce(stage, source), stage.input, scale, s.amax, False, True)
    else:
        q = _produce_quantized(stage, source, scale, s.amax, False, True)
    return columnwise(q, stage.input)


def _high_precision_operand(stage: Stage, s: Saved, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """This rank's operand [M, K] in high precision, for a stage that does not go back quantized."""
    if s.data is not None and (stage.input is None or stage.backward == "high_precision"):
        return s.data
    if stage.backward == "dequantized" and stage.input is not None:
        return ops.dequantize(*_saved_rows(stage, s, scale)[:3], str(stage.input), dtype)
    return _produce(stage, source_of(s))


def _saved_rows(stage: Stage, s: Saved, scale: Tensor | None) -> Operand:
    """This rank's operand [M, K] as forward multiplied it, for a stage that dequantizes it: saved, or made again."""
    assert stage.input is not None
    if s.data is not None:
        return Operand(s.data, s.scale_inv, s.amax, stage.input)
    return rowwise(_produce_quantized(stage, source_of(s), scale, s.amax, True, False), stage.input)


def _warn_of_crossing_blocks() -> None:
    """Ranks whose tokens do not fill blocks gather in high precision what would travel in FP8: right, and twice the bytes."""
    if not torch.compiler.is_compiling() and leads():
        warn_once(
            "ottava: the tokens of a tensor-parallel rank do not fill the recipe's blocks, so inputs of weight gradients, and gradients "
            "of row-parallel layers, are gathered in high precision before they are quantized: twice the bytes. Pad sequences so that "
            "each rank has a multiple of 128 tokens (of 32 for MXFP8, of 16 for NVFP4)."
        )


def _begin_wgrad(
    stage: Stage, saved: list[Saved], scales: list[Tensor | None], dtype: torch.dtype
) -> Callable[[], list[Operand]]:
    """What gives the input's side of wgrad for all tokens. Where they are spread over ranks, their gather begins now."""
    scheme = stage.input
    if stage.backward == "dequantized" and scheme is not None and stage.strategy.gathers_input:
        arriving = stage.strategy.before_wgrad([_saved_rows(stage, s, c) for s, c in zip(saved, scales)])
        return lambda: [Operand(ops.dequantize(*rows[:3], str(scheme), dtype)) for rows in arriving()]
    after = [_quantizes_after_gather(stage, s) for s in saved]  # by group: their rows may or may not fill blocks
    if not any(after):
        return stage.strategy.before_wgrad([_wgrad_operand(stage, s, c, dtype) for s, c in zip(saved, scales)])
    _warn_of_crossing_blocks()
    begun = stage.strategy.before_wgrad(
        [
            Operand(_produce(stage, source_of(s))) if later else _wgrad_operand(stage, s, c, dtype)
            for s, c, later in zip(saved, scales, after)
        ]
    )
    return lambda: [
        columnwise(_quantize(x.data, scheme, c, None, False, True), scheme) if later else x
        for x, c, later in zip(begun(), scales, after)
    ]


def _quantizes_after_gather(stage: Stage, s: Saved) -> bool:
    """Whether the input's side of wgrad is gathered in high precision, because columnwise blocks would cross ranks."""
    return (
        stage.input is not None
        and stage.backward == "quantized"
        and stage.strategy.gathers_input
        and s.data is None
        and s.h is not None
        and not stage.input.fills_blocks(s.h.shape[0])
    )


def _dgrad_operand(stage: Stage, s: Saved, dtype: torch.dtype) -> Operand:
    """The weight's side of dgrad [K, N]: the columnwise copy, or a view of the weight in high precision."""
    assert s.weight_data is not None
    if _quantizes_gradient(stage):
        held = Operand(s.weight_data, s.weight_scale_inv, s.weight_amax, stage.weight)
        assert stage.weight is not None
        return held if stage.two_copies else transposed(held)
    if stage.backward == "dequantized" and stage.weight is not None:
        weight = ops.dequantize(s.weight_data, s.weight_scale_inv, s.weight_amax, str(stage.weight), dtype)
    elif isinstance(s.weight_data, QuantizedTensor):
        weight = s.weight_data.dequantize().to(dtype)
    else:
        weight = s.weight_data.to(dtype)
    return Operand(weight.t())


def _dgrad_operands(
    stage: Stage, saved: list[Saved], sources: tuple[Any, ...], start: int, fwd_scale: Tensor | None, dtype: torch.dtype
) -> list[Operand]:
    """Of all groups, of which the first is stage number `start`. Copies that were not kept are made."""
    found = []
    for number, s in enumerate(saved, start):
        if sources[number] is None:
            found.append(_dgrad_operand(stage, s, dtype))
            continue
        scale = column_of(fwd_scale, weight_column(number)) if stage.delayed else None
        made = quantize_again(sources[number], ops, str(stage.weight), scale, s.weight_amax)
        found.append(Operand(*made, stage.weight, "columnwise"))
    return found


def _quantizes_gradient(stage: Stage) -> bool:
    return stage.grad is not None and stage.backward == "quantized"


def _shares_gradient_amax(stage: Stage) -> bool:
    return (
        stage.strategy.shares_grad_amax
        and not stage.delayed
        and stage.grad is not None
        and stage.grad.needs_tensor_amax
    )


def _blocks_cross_ranks(stage: Stage, grads: list[Gradient]) -> bool:
    """Whether columnwise blocks of a gradient would need tokens of two ranks; of any group: all go the same way."""
    if not stage.strategy.gathers_grad or stage.grad is None or grads[0].value is None:
        return False
    return not all(stage.grad.fills_blocks(grad.value.shape[0]) for grad in grads if grad.value is not None)


def _quantized_gradient(stage: Stage, grad: Gradient, scale: Tensor | None, whole: bool) -> tuple[Gradient, Tensor]:
    """(the gradient of this rank's tokens, quantized; its amax). whole: of all tokens at once, where blocks would cross ranks."""
    scheme, strategy, dy = stage.grad, stage.strategy, grad.value
    assert scheme is not None and dy is not None
    if whole:
        _warn_of_crossing_blocks()
        q = _quantize(strategy.gather(dy), scheme, scale, None, True, True)
        return Gradient(dy, q, grad.column_sum, gathered=True), q.rowwise_amax
    amax = strategy.share_amax(operand_amax(dy, scheme)) if _shares_gradient_amax(stage) else None
    # Bytes with one scale, or one for a square block, can be transposed after they have travelled.
    q = _quantize(dy, scheme, scale, amax, True, not (strategy.gathers_grad and scheme.transposable))
    return Gradient(dy, q, grad.column_sum), q.rowwise_amax


def _quantize_gradient(chain: Chain, number: int, grad: Gradient, state: DelayedTensors, whole: bool) -> Gradient:
    """Quantizes the gradient of the output of stage `number` if the stage wants it, and records its amax."""
    stage = chain.stages[number]
    if not _quantizes_gradient(stage):
        return grad
    if grad.quantized is not None:
        amax = grad.quantized.rowwise_amax
    else:
        scale = column_of(state.bwd_scale, grad_column(number)) if stage.delayed else None
        count_into(chain, number, 2)
        grad, amax = _quantized_gradient(stage, grad, scale, whole)
    if stage.delayed:
        ops.record_amax_(state.bwd_history, amax, grad_column(number), chain.owner)
    return grad


def _bias_gradient(grad: Gradient) -> Tensor:
    return grad.column_sum if grad.column_sum is not None else ops.column_sum(grad.value)


def _rows_of(stage: Stage, grad: Gradient) -> Operand:
    """The gradient's side of dgrad."""
    if grad.quantized is not None:
        return rowwise(grad.quantized, stage.grad)
    assert grad.value is not None
    return Operand(grad.value)


def _columns_of(stage: Stage, grads: list[Gradient]) -> Later | None:
    """The gradients' side of wgrad, of all tokens, where it is a copy of its own; None: the rows of all tokens can be transposed."""
    strategy = ALONE if grads[0].gathered else stage.strategy
    if strategy.gathers_grad and stage.grad is not None and stage.grad.transposable:
        return None
    copies = [columnwise(grad.quantized, stage.grad) for grad in grads if grad.quantized is not None]
    return Later(lambda: strategy.begin_columns(copies)) if copies else None


def _wgrad(stage: Stage, columns: list[Operand], operands: list[Operand], dtype: torch.dtype) -> Tensor:
    """The gradient of the weights of all groups, under one another: [groups * N, K]. columns: the gradients' side."""
    operands = [transposed(o) if o.scheme is None else o for o in operands]
    return product(columns, operands, [], dtype, stage.split_wgrad)


def _dgrad(
    stage: Stage,
    weights: list[Operand],
    grads: list[Gradient],
    rows: list[Operand],
    extra: Tensor | None,
    dtype: torch.dtype,
    under: Later | None,
) -> tuple[Callable[[], Tensor], list[Operand]]:
    """(what gives the gradient of the operands [M, K], the gradients' rowwise copies of all tokens).

    rows: the copies of this rank's tokens. extra: another gradient of the operands of all tokens. under: what may travel meanwhile.
    """
    multiply = Product(weights, dtype, stage.split_dgrad, stage.output_parts, extra)
    strategy = ALONE if grads[0].gathered else stage.strategy
    return strategy.dgrad(rows, multiply) if under is None else strategy.dgrad(rows, multiply, under.begin)


def _activation_backward(
    chain: Chain, number: int, dgrad: Tensor, s: Saved, state: DelayedTensors, needs_bias: bool
) -> Gradient:
    """Through the activation of stage `number`; straight into quantized form if the stage before takes it so."""
    name = chain.stages[number].activation
    earlier = number - chain.groups
    before = chain.stages[earlier] if earlier >= 0 else None
    if before is None or not _quantizes_gradient(before) or _shares_gradient_amax(before):
        return Gradient(ops.activation_backward(dgrad, s.h, name))
    scale = column_of(state.bwd_scale, grad_column(earlier)) if before.delayed else None
    count_into(chain, earlier, 2)
    *q, column_sum = ops.activation_backward_quantize(
        dgrad, s.h, name, str(before.fused_grad or before.grad), scale, None, True, True, needs_bias
    )
    return Gradient(None, Buffers(*q), column_sum if needs_bias else None)


def refuse_double_backward() -> None:
    """A backward pass that is itself recorded (`create_graph=True`) would give wrong second derivatives, silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ValueError("Ottava's modules cannot be differentiated twice: call backward without create_graph=True.")


# ------------------------------------------------------------------------------------------------------------ the Function


class _ChainFunction(torch.autograd.Function):
    """Runs a chain. Inputs: see `run_chain`."""

    @staticmethod
    def forward(
        ctx: Any, chain: Chain, accumulators: Any, splits: tuple[int, ...] | None, keep: bool, residual: Tensor | None, h: Tensor,
        *flat: Any,
    ) -> Any:  # fmt: skip
        count, groups = len(chain.stages), chain.groups
        tensors, state = unpack(StageTensors, flat, count), DelayedTensors(*flat[-len(DelayedTensors._fields) :])
        saved: list[Saved] = []
        norm_out = total = None
        for start in range(0, count, groups):
            stage, made = chain.stages[start], []
            added = residual if start == 0 else None
            for number, part in enumerate(_parts(h, splits), start):
                t = tensors[number]
                count_into(chain, number, 0)
                if stage.input is None:
                    one = _make_unquantized(stage, part, added, t)
                else:
                    scale = column_of(state.fwd_scale, input_column(number)) if stage.delayed else None
                    one = _make_quantized(stage, part, added, t, scale, keep)
                _record_forward(chain, number, one, t, state.fwd_history)
                made.append(one)
                saved.append(one.saved)
            total = made[0].saved.h if added is not None else total
            h = _fprop(stage, made, tensors[start : start + groups], h.dtype)
            if stage.return_norm:
                norm_out = _joined([one.norm_out for one in made])
        delayed = any(stage.delayed for stage in chain.stages)
        sources = tuple(t.source for t in tensors)
        recompute = delayed and (any(stage.recompute for stage in chain.stages) or any(sources))
        ctx.save_for_backward(*pack(saved), state.fwd_scale.clone() if recompute else None)  # type: ignore[union-attr]
        # Live buffers, not saved ones: another backward may update them before this one runs.
        ctx.bwd_scale, ctx.bwd_history = (state.bwd_scale, state.bwd_history) if delayed else (None, None)
        ctx.chain, ctx.accumulators, ctx.splits, ctx.adds = chain, accumulators, splits, residual is not None
        ctx.weight_dtypes, ctx.sources = tuple(gradient_dtype(t.weight) for t in tensors), sources
        first = chain.stages[0]
        if first.gather_norm and norm_out is not None:
            norm_out = first.strategy.before_gemm(Operand(norm_out)).data
        out = (h, norm_out) if first.return_norm else (h,)
        out = out if residual is None else (*out, total)
        return out if len(out) > 1 else h

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *others: Tensor) -> Any:
        refuse_double_backward()
        chain: Chain = ctx.chain
        dtotal = others[-1] if ctx.adds else None
        if chain.direct and products.watcher is None:
            return direct.backward(ctx, dy, dtotal, _dgrad_operand)
        dnorm: Tensor | None = others[0] if chain.stages[0].return_norm else None
        *flat, fwd_scale = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            torch_private.release_saved(ctx)  # a stage's tensors are freed when its successor's turn comes
        count, groups = len(chain.stages), chain.groups
        state = DelayedTensors(fwd_scale, None, ctx.bwd_scale, ctx.bwd_history)
        all_saved, all_needs = (
            unpack(Saved, flat, count),
            unpack(StageTensors, ctx.needs_input_grad[direct.FIRST :], count),
        )
        flat = []
        found: list[StageGradients] = [StageGradients()] * count
        grads = [
            Gradient(part)
            for part in _parts(dy if dy.is_contiguous() else dy.contiguous(), _of_output(chain, ctx.splits))
        ]
        dx: Tensor | None = None
        for start in reversed(range(0, count, groups)):
            members = slice(start, start + groups)
            stage, saved, needs = chain.stages[start], all_saved[members], all_needs[members]
            del all_saved[start:]
            whole = _blocks_cross_ranks(stage, grads)
            grads = [_quantize_gradient(chain, i, grad, state, whole) for i, grad in enumerate(grads, start)]
            dbias = [_bias_gradient(grad) if need.bias else None for grad, need in zip(grads, needs)]
            add = ctx.accumulators[members] if ctx.accumulators is not None else (None,) * groups
            # Another gradient of all ranks' operands is summed over ranks with the rest.
            extra, dnorm = (dnorm, None) if stage.gather_norm else (None, dnorm)
            weights = None
            if start > 0 or any(ctx.needs_input_grad[4:6]) or any(need.gamma or need.beta for need in needs):
                weights = partial(_dgrad_operands, stage, saved, ctx.sources, start, fwd_scale, dy.dtype)
            dx, dweight = _products_backward(
                stage,
                saved,
                grads,
                [column_of(fwd_scale, input_column(i)) for i in range(start, start + groups)],
                weights,
                any(need.weight for need in needs),
                extra,
                add,
                ctx.weight_dtypes[start],
                dy.dtype,
            )
            if dx is None:
                found[members] = [StageGradients(None, None, w, b) for w, b in zip(dweight, dbias)]
                break
            if stage.norm is None and stage.activation is None:
                found[members] = [StageGradients(None, None, w, b) for w, b in zip(dweight, dbias)]
                grads = [Gradient(part) for part in _parts(dx, ctx.splits)] if start > 0 else []
                continue
            dnorms = _parts(dnorm, ctx.splits) if dnorm is not None else [None] * groups
            grads = []
            for g, (dgrad, s) in enumerate(zip(_parts(dx, ctx.splits), saved)):
                needs_bias = start > 0 and bool(all_needs[start - groups + g].bias)
                more = (dnorms[g], dtotal if start == 0 else None)
                made = _producer_backward(chain, start + g, dgrad, more, s, state, needs_bias)
                grads.append(made.grad)
                found[start + g] = StageGradients(made.dgamma, made.dbeta, dweight[g], dbias[g])
        first = chain.stages[0]
        if dx is not None and (first.norm is not None or first.activation is not None):
            dx = _joined([grad.value for grad in grads])
        return None, None, None, None, dx if ctx.adds else None, dx, *pack(found), *DelayedTensors()


class _DirectChainFunction(_ChainFunction):
    """A direct chain that nobody watches. Somebody may, by its backward: that is the same one."""

    forward = staticmethod(direct.forward)  # type: ignore[assignment]


def _products_backward(
    stage: Stage,
    saved: list[Saved],
    grads: list[Gradient],
    scales: list[Tensor | None],
    weights: Callable[[], list[Operand]] | None,
    needs_wgrad: bool,
    extra: Tensor | None,
    accumulators: tuple,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(the gradient of the operands [M, K], that of each group's weight) where they are needed. weights: the weights' side of dgrad, if
    that is.

    The operand of wgrad is gathered under dgrad's product, the input's gradient is summed under wgrad's.
    """
    operands = _begin_wgrad(stage, saved, scales, dtype) if needs_wgrad else None
    columns = _columns_of(stage, grads) if needs_wgrad else None
    summed, rows = None, [_rows_of(stage, grad) for grad in grads]
    if weights is not None:
        summed, rows = _dgrad(stage, weights(), grads, rows, extra, dtype, columns)
    elif needs_wgrad and columns is None and not grads[0].gathered:
        rows = [stage.strategy.before_dgrad(row) for row in rows]
    dweight: list[Tensor | None] = [None] * len(grads)
    if operands is not None:
        accumulates = accumulators[0] is not None
        sides = [transposed(row) for row in rows] if columns is None else columns()
        whole = _wgrad(stage, sides, operands(), torch.float32 if accumulates else weight_dtype)
        dweight = list(whole.chunk(len(grads))) if len(grads) > 1 else [whole]
        if accumulates:
            dweight = [add(part) for add, part in zip(accumulators, dweight)]
    return None if summed is None else summed(), dweight


class _ProducerGradients(NamedTuple):
    """Of one group: the gradient of the stage's input, and those of the norm's gain and bias."""

    grad: Gradient
    dgamma: Tensor | None = None
    dbeta: Tensor | None = None


def _producer_backward(
    chain: Chain,
    number: int,
    dgrad: Tensor,
    more: tuple[Tensor | None, Tensor | None],
    s: Saved,
    state: DelayedTensors,
    needs_bias: bool,
) -> _ProducerGradients:
    """Through the producer of stage `number`. more: gradients of the norm's output and of its input, where those were returned."""
    stage, (dnorm, dtotal) = chain.stages[number], more
    if stage.norm is not None:
        dgrad = dgrad if dnorm is None else dgrad + dnorm
        norm = (s.h, s.gamma, s.mean, s.rstd, stage.norm.zero_centered, s.beta is not None)
        if dtotal is None:
            dx, dgamma, dbeta = ops.norm_backward(dgrad, *norm)
        else:
            dx, dgamma, dbeta, _ = ops.norm_backward_add(dgrad, *norm, dtotal, False)
        return _ProducerGradients(Gradient(dx), dgamma, dbeta if s.beta is not None else None)
    return _ProducerGradients(_activation_backward(chain, number, dgrad, s, state, needs_bias))


def _parts(x: Tensor, splits: tuple[int, ...] | None) -> list[Tensor]:
    """The rows of each group."""
    return [x] if splits is None else list(x.split(splits))


def _of_output(chain: Chain, splits: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The rows of each group of the chain's output, from those of its input. (Chains of several groups have one stage.)"""
    return None if splits is None else tuple(map(chain.stages[-1].strategy.output_tokens, splits))


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """The groups' rows under one another."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # type: ignore[arg-type]


def run_chain(
    chain: Chain,
    x: Tensor,
    stages: list[StageTensors],
    state: DelayedTensors | None,
    accumulators: tuple | None = None,
    splits: tuple[int, ...] | None = None,
    residual: Tensor | None = None,
) -> Any:
    """Runs `chain` on x [M, K]. state: where delayed scaling needs it. splits: rows of each of the chain's groups, if it has several.
    residual [M, K], of the dtype of x: what the first stage's norm adds to x before it; the chain has one group then.

    Returns [M, N]; or a tuple of that, the norm's output [M, K] if the first stage returns it, and x + residual if there is one.
    """
    keep = torch.is_grad_enabled() and (
        x.requires_grad or (residual is not None and residual.requires_grad) or any(map(_trains, stages))
    )
    if not chain.direct or products.watcher is not None:
        apply = _ChainFunction.apply
    else:
        apply = _DirectChainFunction.apply if torch_private.transforms_active() else _BARE_APPLY
    flat = stages[0] if len(stages) == 1 else pack(stages)
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.compiler.is_compiling():
        return apply(chain, accumulators, splits, keep, residual, x, *flat, *(state or _NO_STATE))
    torch.set_autocast_enabled(device, False)  # x has its dtype by now, and each op would ask
    try:
        return apply(chain, accumulators, splits, keep, residual, x, *flat, *(state or _NO_STATE))
    finally:
        torch.set_autocast_enabled(device, True)


_NO_STATE = DelayedTensors()
_BARE_APPLY = torch_private.bare_apply(_DirectChainFunction)


def _trains(t: StageTensors) -> bool:
    """Whether a parameter of the stage wants a gradient."""
    if t.weight.requires_grad or (t.bias is not None and t.bias.requires_grad):
        return True
    return (t.gamma is not None and t.gamma.requires_grad) or (t.beta is not None and t.beta.requires_grad)


def gated(activation: str) -> bool:
    """Whether the activation takes two halves and returns one."""
    return get_activation(activation).gated
