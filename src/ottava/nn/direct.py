"""The loops of `core` for the common case, written straight: what a call costs the host is Python, one function after the other.

[Note: direct chains] A chain is direct if nothing happens around its products: one rank, one group of rows, quantized both ways or not
at all, nothing returned beside the output (`direct`). The ops are those of `core`, or one that does in one kernel what two of them do, and
either loop can follow the other: what one does not keep for backward the other can make again. `tests/nn/test_direct.py` compares their
bits for every recipe.

[Note: what stands at the peak] Memory is highest in the backward of the last layer, when the activations of all layers are there. What
a stage works with comes on top: for a SwiGLU of 8192 tokens and 14336 features 0.2 GiB of its output's gradient and 0.4 of its input's,
beside the 0.4 of that input. So autograd is told to let go of what it saved as soon as it has handed it out (unless the graph is to be
kept), every name here gives up what its last reader has read, and nothing is made before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.kernels import tally
from ottava.kernels.registry import plain_functions
from ottava.kernels.zeros import scratch_like
from ottava.nn import gradient_amax
from ottava.nn.columnwise import quantize_again
from ottava.nn.delayed_columns import (
    DelayedTensors,
    cell_of,
    column_of,
    grad_column,
    input_column,
    record_gradient,
    weight_column,
)
from ottava.nn.dgrad import dgrad_operand
from ottava.nn.stage import Chain, Saved, Stage, StageTensors, count_into
from ottava.nn.strategy import ALONE

WIDTH, KEPT, STATE = (len(kind._fields) for kind in (StageTensors, Saved, DelayedTensors))
FIRST = 6  # arguments of the autograd Function before the stages' tensors; the last two of these are the residual and the chain's input
GAMMA, BETA, WEIGHT, BIAS = (StageTensors._fields.index(name) for name in ("gamma", "beta", "weight", "bias"))


def direct(stages: tuple[Stage, ...], groups: int) -> bool:
    """See [Note: direct chains]; of a chain that neither calibrates nor is traced by a compiler."""
    return groups == 1 and all(
        stage.strategy is ALONE
        and not stage.return_norm
        and (stage.input is None or (stage.backward == "quantized" and stage.input.columns is None))
        for stage in stages
    )


def forward(
    ctx: Any, chain: Chain, accumulators: Any, splits: None, keep: bool, residual: Tensor | None, h: Tensor, *flat: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """See `core._ChainFunction.forward`. splits: a direct chain has one group."""
    fwd_scale, fwd_history, bwd_scale, bwd_history = flat[-STATE:]
    ops = plain_functions(h)
    saved: list[Any] = []
    dtypes, sources = [], []
    slots, redoes, raises = chain.tally, False, chain.record and ops is not torch.ops.ottava
    added, total = residual, h
    for number, stage in enumerate(chain.stages):
        gamma, beta, weight, bias, *copies, weight_source = flat[WIDTH * number : WIDTH * (number + 1)]
        row, row_scale, row_amax = copies[:3]
        sources.append(weight_source)
        dtypes.append((weight.grad_dtype if weight.is_leaf else None) or weight.dtype)  # `gradient_dtype`
        if stage.texts is None:
            h, kept = _unquantized(ops, stage, h, added, gamma, beta, weight, bias)
            saved += kept
            if added is not None:
                total, added = kept[0], None
            continue
        scheme, weight_scheme, _, _ = stage.texts
        scale = mean = rstd = cell = None
        source: Any = None
        place = 0
        if stage.delayed:
            place = input_column(number) if number else 0
            scale = fwd_scale.narrow(0, place, 1)
            if raises:
                cell = fwd_history.as_strided(
                    (1,), (1,), fwd_history.storage_offset() + place
                )  # `cell_of`, which is a call
        if slots:
            tally.slot = slots + 3 * number
        # The copy of an activation's output: the kernel of its backward makes it on the way, from what is kept anyway.
        column = keep and not stage.recompute and (stage.activation is None or number == 0)
        if stage.norm is not None:
            norm = stage.norm
            wants_amax = scale is None and stage.input.per_tensor  # type: ignore[union-attr]
            settings = (gamma, beta, norm.kind, norm.eps, norm.zero_centered, wants_amax)
            if added is None:
                mean, rstd, found = ops.norm_stats(h, *settings)
            else:
                h, mean, rstd, found = ops.norm_add_stats(h, added, *settings)
                total, added = h, None
            amax = found if wants_amax else cell
            made = ops.norm_quantize(h, gamma, beta, mean, rstd, norm.zero_centered, scheme, scale, amax, True, column)
            source = h
        elif stage.activation is not None:
            made, source = ops.activation_quantize(h, stage.activation, scheme, scale, cell, True, column), h
        else:
            made, source = ops.quantize(h, scheme, scale, cell, True, column), h if stage.recompute else None
        data, data_scale, transposed, transposed_scale, data_amax, transposed_amax = made
        operand: Any = (transposed, transposed_scale, transposed_amax)
        if not column:
            redoes = redoes or keep
            found = scale is None and stage.input.block is None  # type: ignore[union-attr]  # `per_tensor`, which is a call
            operand = (None, None, data_amax if found else None)
        # Backward transposes where there is one copy, and makes it anew where there is a source.
        held = copies[:3] if copies[3] is None and weight_source is None else copies[3:]
        saved += (source, gamma, beta, mean, rstd, *operand, *held)
        if stage.delayed and chain.record and data_amax is not cell:
            ops.record_amax_(fwd_history, data_amax, place, 0)
        h = ops.scaled_mm(
            data, data_scale, data_amax, row, row_scale, row_amax, scheme, weight_scheme, bias, h.dtype, stage.split_fprop
        )  # fmt: skip
        made = data = transposed = operand = source = None  # their memory is the next stage's
    # Delayed scaling writes its next scales over these: see `core`.
    redoes = keep and fwd_scale is not None and (redoes or any(sources))
    ctx.save_for_backward(*saved, fwd_scale.clone() if redoes else None)
    # Live buffers, not saved ones: another backward may update them before this one runs.
    ctx.bwd_scale, ctx.bwd_history = bwd_scale, bwd_history
    ctx.chain, ctx.accumulators, ctx.splits, ctx.weight_dtypes = chain, accumulators, None, tuple(dtypes)
    ctx.adds, ctx.sources = residual is not None, sources
    return h if residual is None else (h, total)


def _unquantized(
    ops: Any, stage: Stage, h: Tensor, added: Tensor | None, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """(the stage's output, what it keeps) in the activation dtype. added: to h, before the norm."""
    mean = rstd = None
    operand, source = h, None
    if stage.norm is not None:
        norm = stage.norm
        settings = (gamma, beta, norm.kind, norm.eps, norm.zero_centered, False)
        if added is None:
            mean, rstd, _ = ops.norm_stats(h, *settings)
        else:
            h, mean, rstd, _ = ops.norm_add_stats(h, added, *settings)
        source = h
        operand = ops.norm_apply(h, gamma, beta, mean, rstd, norm.zero_centered, h.dtype)
    elif stage.activation is not None:
        operand, source = ops.activation(h, stage.activation), h
    out = _multiplier(ops, "mm", weight)(operand, weight, bias, h.dtype, 1)
    kept = (h, None) if stage.remakes else (source, operand)
    return out, (kept[0], gamma, beta, mean, rstd, kept[1], None, None, weight, None, None)


def _multiplier(ops: Any, name: str, weight: Tensor) -> Any:
    """The product `name`. A weight that FSDP2 gathers may be a tensor of a kind of its own, which the dispatcher has to see."""
    return getattr(ops if type(weight) is Tensor or type(weight) is nn.Parameter else torch.ops.ottava, name)


def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None) -> tuple[Any, ...]:
    """See `core._backward`. dtotal: the gradient of x + residual."""
    chain, needs, kept = ctx.chain, ctx.needs_input_grad, [*ctx.saved_tensors]
    torch_private.release_saved(ctx)  # what a stage is done with is freed at once: [Note: what stands at the peak]
    ops = plain_functions(dy)
    found: list[Any] = [None] * (WIDTH * len(chain.stages))
    value: Any = dy if dy.is_contiguous() else dy.contiguous()
    quantized: Any = None
    column_sum = dx = None
    fwd_scale = kept.pop()
    for number in range(len(chain.stages) - 1, -1, -1):
        stage, at = chain.stages[number], WIDTH * number
        saved = Saved(*kept[KEPT * number : KEPT * (number + 1)])
        del kept[KEPT * number :]
        if quantized is None and stage.texts is not None:
            if chain.tally:
                count_into(chain, number, 2)
            scale = _scale(ctx, number)
            cell = None if scale is None else cell_of(ops, ctx.bwd_history, grad_column(number))
            amax = gradient_amax.find(value) if scale is None and stage.grad.per_tensor else cell  # type: ignore[union-attr]
            quantized = ops.quantize(value, stage.texts.grad, scale, amax, True, True)
            if scale is not None:
                record_gradient(ops, ctx.bwd_history, grad_column(number), cell, quantized[4], chain.owner)
        wanted = needs[FIRST + at : FIRST + at + WIDTH]
        if wanted[BIAS]:
            found[at + BIAS] = ops.column_sum(value) if column_sum is None else column_sum
        dx = None
        if number > 0 or needs[FIRST - 1] or needs[FIRST - 2] or wanted[GAMMA] or wanted[BETA]:
            weight: Any = None
            if ctx.sources[number] is not None:
                scale = column_of(fwd_scale, weight_column(number)) if stage.delayed else None
                weight = quantize_again(ctx.sources[number], ops, stage.texts.weight, scale, saved.weight_amax)  # type: ignore[union-attr]
            dx = _dgrad(ops, stage, value, quantized, saved, dy.dtype, weight)
            weight = None
        if quantized is not None:
            quantized = _columns(ops, stage, quantized)  # the rowwise copy was dgrad's
        through = None
        if stage.activation is not None and number > 0 and stage.texts is not None:
            needs_bias = bool(needs[FIRST + at - WIDTH + BIAS])
            through, saved = _through_activation(ctx, ops, number, dx, saved, fwd_scale, wanted[WEIGHT], needs_bias)
            dx = None
        if wanted[WEIGHT]:
            if saved.data is None:
                saved = _operand_again(ops, stage, saved, fwd_scale, number)
            add = None if ctx.accumulators is None else ctx.accumulators[number]
            dweight = _wgrad(
                ops, stage, value, quantized, saved, ctx.weight_dtypes[number] if add is None else torch.float32
            )
            found[at + WEIGHT] = dweight if add is None else add(dweight)
        saved = saved._replace(data=None, weight_data=None)
        value = quantized = column_sum = None
        if through is not None:
            *quantized, column_sum = through
            through = None
        elif dx is None:
            break
        elif stage.norm is not None:
            value = dx = _through_norm(ops, stage, saved, dx, dtotal if number == 0 else None, found, at)
        elif stage.activation is not None:
            value = dx = ops.activation_backward(dx, saved.h, stage.activation)
        else:
            value = dx
    return *(None,) * (FIRST - 2), None if dtotal is None else dx, dx, *found, *(None,) * STATE


def _through_activation(
    ctx: Any, ops: Any, number: int, dgrad: Any, saved: Saved, fwd_scale: Tensor | None, needs_output: bool, needs_bias: bool
) -> tuple[tuple[Any, ...], Saved]:  # fmt: skip
    """((the gradient of the input of the activation of stage `number`, quantized for the stage before, its column sum if needed), what is
    left of `saved`). dgrad: the gradient of the activation's output.

    needs_output: wgrad needs the columnwise copy of that output. If it is not saved it is made here, and `saved` has it then; or later
    (`_operand_again`), and `saved` has still what it is made from.
    """
    chain = ctx.chain
    stage, before = chain.stages[number], chain.stages[number - 1]
    if chain.tally:
        count_into(chain, number - 1, 2)
    # Where memory is what counts the output's copy is made when `dgrad` is gone, and the gradient's rowwise copy transposed, if it can be.
    both = not (before.recompute and before.fused_grad.transposable)
    cell = cell_of(ops, ctx.bwd_history, grad_column(number - 1)) if before.delayed else None
    gradient = (before.texts.fused_grad, _scale(ctx, number - 1), cell, True, both, needs_bias)
    if saved.data is not None or not needs_output or stage.recompute:
        *quantized, sums = ops.activation_backward_quantize(dgrad, saved.h, stage.activation, *gradient)
        saved = saved if needs_output and saved.data is None else saved._replace(h=None)
    else:
        scale = column_of(fwd_scale, input_column(number)) if stage.delayed else None
        *quantized, sums, data, scale_inv, amax = ops.activation_backward_with_output(
            dgrad, saved.h, stage.activation, *gradient, stage.texts.input, scale, saved.amax
        )
        saved = saved._replace(h=None, data=data, scale_inv=scale_inv, amax=amax)
    if before.delayed:
        record_gradient(ops, ctx.bwd_history, grad_column(number - 1), cell, quantized[4], chain.owner)
    if not both:
        quantized[2] = None
    return (*quantized, sums if needs_bias else None), saved


def _columns(ops: Any, stage: Stage, quantized: Sequence[Any]) -> tuple[Any, ...]:
    """What is left of a quantized gradient [M, N] when dgrad has been multiplied: the columnwise copy, which is made if there is none."""
    row, row_scale, column, column_scale, *amax = quantized
    if column is None:
        column, column_scale = ops.transpose(row, stage.texts.fused_grad), row_scale  # type: ignore[union-attr]
    return None, None, column, column_scale, *amax


def _operand_again(ops: Any, stage: Stage, saved: Saved, fwd_scale: Tensor | None, number: int) -> Saved:
    """`saved` with the input's side of wgrad, which is made from the stage's input as forward made it."""
    norm = stage.norm
    statistics = (saved.gamma, saved.beta, saved.mean, saved.rstd)
    if stage.texts is None:
        data = saved.h
        if norm is not None:
            data = ops.norm_apply(saved.h, *statistics, norm.zero_centered, saved.h.dtype)  # type: ignore[union-attr]
        elif stage.activation is not None:
            data = ops.activation(saved.h, stage.activation)
        return saved._replace(data=data)
    scale = column_of(fwd_scale, input_column(number)) if stage.delayed else None
    unread = None if scale is None or ops is torch.ops.ottava else scratch_like(saved.h)  # type: ignore[arg-type]
    how = (stage.texts.input, scale, saved.amax if unread is None else unread, False, True)
    with tally.again():
        if norm is not None:
            made = ops.norm_quantize(saved.h, *statistics, norm.zero_centered, *how)
        elif stage.activation is not None:
            made = ops.activation_quantize(saved.h, stage.activation, *how)
        else:
            made = ops.quantize(saved.h, *how)
    return saved._replace(data=made[2], scale_inv=made[3], amax=made[5])


def _columnwise_weight(ops: Any, stage: Stage, saved: Saved) -> tuple[Any, Any, Any]:
    """(data, scale_inv, amax) of the weight's side of dgrad: saved, or the transpose of the one copy that there is (`transposed`)."""
    data, scale = saved.weight_data, saved.weight_scale_inv
    if not stage.two_copies:
        data = ops.transpose(data, stage.texts.weight)  # type: ignore[union-attr]
        scale = scale.t().contiguous() if scale is not None and scale.dim() == 2 else scale
    return data, scale, saved.weight_amax


def _dgrad(
    ops: Any, stage: Stage, dy: Any, quantized: Any, saved: Saved, dtype: torch.dtype, made: Any
) -> Tensor:  # fmt: skip
    """The gradient of the stage's operand [M, K]. dy: that of its output, `quantized` if the stage is. made: (data, scale_inv, amax) of the
    weight's side, if it is not saved."""
    if made is not None:
        data, scale_inv, weight_amax = made
    elif stage.texts is None or type(saved.weight_data) is not Tensor:
        data, scale_inv, weight_amax = dgrad_operand(stage, saved, dtype)[:3]
    else:
        data, scale_inv, weight_amax = _columnwise_weight(ops, stage, saved)
    if stage.texts is None:
        return _multiplier(ops, "mm", data)(dy, data, None, dtype, stage.output_parts)
    row, row_scale, _, _, amax, _ = quantized
    return _multiplier(ops, "scaled_mm", data)(
        row, row_scale, amax, data, scale_inv, weight_amax, stage.texts.grad, stage.texts.weight, None, dtype,
        stage.split_dgrad, stage.output_parts,
    )  # fmt: skip


def _wgrad(ops: Any, stage: Stage, dy: Any, quantized: Any, saved: Saved, dtype: torch.dtype) -> Tensor:
    """The gradient of the stage's weight [N, K]."""
    if stage.texts is None:
        return ops.mm(dy.t(), saved.data.t(), None, dtype, 1)  # type: ignore[union-attr]
    _, _, column, column_scale, _, column_amax = quantized
    return ops.scaled_mm(
        column, column_scale, column_amax, saved.data, saved.scale_inv, saved.amax, stage.texts.grad, stage.texts.input, None,
        dtype, stage.split_wgrad,
    )  # fmt: skip


def _scale(ctx: Any, number: int) -> Tensor | None:
    """Of the gradient of the output of stage `number`; None if nothing is given."""
    if not ctx.chain.stages[number].delayed:
        return None
    return ctx.bwd_scale.narrow(0, grad_column(number), 1)


def _through_norm(
    ops: Any, stage: Stage, saved: Saved, dgrad: Tensor, dtotal: Tensor | None, found: list[Any], at: int
) -> Tensor:
    """The gradient of the norm's input; those of its gain and bias go into `found`, whose part for the stage begins at `at`.

    dtotal: another gradient of the norm's input.
    """
    assert stage.norm is not None
    beta = saved.beta is not None
    norm = (saved.h, saved.gamma, saved.mean, saved.rstd, stage.norm.zero_centered, beta)
    if dtotal is None:
        dx, dgamma, dbeta = ops.norm_backward(dgrad, *norm)
    else:
        # What made x quantizes this gradient next, with a scale from its amax if it is of this recipe.
        wants_amax = stage.grad is not None and stage.grad.per_tensor and not stage.delayed
        dx, dgamma, dbeta, amax = ops.norm_backward_add(dgrad, *norm, dtotal, wants_amax)
        if wants_amax:
            gradient_amax.note(dx, amax)
    found[at + GAMMA] = dgamma
    if beta:
        found[at + BETA] = dbeta
    return dx
