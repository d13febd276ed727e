"""The one autograd core: a chain of (producer -> GEMM) stages.

    stage:  operand = quantize(produce(h));  h = operand @ weight.T + bias

`Linear` is a chain of one stage whose producer is the identity, `LayerNormLinear` of one that normalizes, `LayerNormMLP` of two
(norm, then activation). Shapes inside are 2-D: tokens M x features.

What a stage keeps for its backward is the FP8 columnwise copy of its operand (one byte an element), plus the producer's own input
where that has a derivative. With `recompute` the copy is made again from that input instead.

[Note: three ways back] `Stage.backward` says how the backward GEMMs run: "quantized" quantizes the gradient and uses FP8 operands;
"high_precision" keeps the operands in the activation dtype; "dequantized" turns the saved FP8 operands back first. A stage without
schemes (`Stage.input is None`) is unquantized throughout and always goes back in high precision.

[Note: many ranks] A stage may have a tensor-parallel `strategy` (see `strategy.py`). Ranks that quantize parts of one tensor share its
amax first, so scales and bytes are those of one process. Tokens that are spread over ranks are quantized where they are and gathered
as bytes: rowwise copies in forward, columnwise ones in backward. A columnwise block must not cross a rank's border; where the tokens
of a rank do not fill whole blocks, high precision is gathered and quantized after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.activation import get as get_activation
from ottava.kernels.cast import Buffers, operand_amax
from ottava.nn.stage import (
    PER_SAVED,
    PER_STAGE,
    Chain,
    Gradient,
    Saved,
    Stage,
    StageTensors,
    tensor_amax,
)
from ottava.nn.strategy import Strategy, gathers_gradient, gathers_input, spreads_input, spreads_output
from ottava.nn.watch import scaled_mm
from ottava.quant.scheme import Scheme

ops = torch.ops.ottava


# ---------------------------------------------------------------------------------------------------------------- producers


def _statistics(stage: Stage, h: Tensor, t: StageTensors) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(mean, rstd, amax of the output where current scaling needs it) of the norm; Nones without one."""
    if stage.norm is None:
        return None, None, None
    needs_amax = stage.input is not None and ":tensor" in stage.input and not stage.delayed
    mean, rstd, amax = ops.norm_stats(
        h, t.gamma, t.beta, stage.norm.kind, stage.norm.eps, stage.norm.zero_centered, needs_amax
    )
    return mean, rstd, amax if needs_amax else None


def _produce(
    stage: Stage, h: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, rstd: Tensor | None
) -> Tensor:
    """The stage's operand in the activation dtype [M, K]."""
    if stage.norm is not None:
        return ops.norm_apply(h, gamma, beta, mean, rstd, stage.norm.zero_centered, h.dtype)
    return h if stage.activation is None else ops.activation(h, stage.activation)


def _produce_quantized(
    stage: Stage,
    h: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
) -> Buffers:
    """The stage's operand, quantized, without a high-precision copy in between."""
    args = (stage.input, scale, amax, rowwise, columnwise)
    if stage.norm is not None:
        return Buffers(*ops.norm_quantize(h, gamma, beta, mean, rstd, stage.norm.zero_centered, *args))
    if stage.activation is not None:
        return Buffers(*ops.activation_quantize(h, stage.activation, *args))
    return Buffers(*ops.quantize(h, *args))


# --------------------------------------------------------------------------------------------------------------- many ranks


def _shared_amax(
    stage: Stage, h: Tensor, t: StageTensors, mean: Tensor | None, rstd: Tensor | None, own: Tensor | None
) -> Tensor | None:
    """The amax of the stage's operand over all ranks that hold a part of it. own: what the norm found on this rank."""
    assert stage.input is not None
    if stage.strategy is None or not spreads_input(stage.strategy) or stage.delayed or not tensor_amax(stage.input):
        return own
    if ":tensor" not in stage.input:
        own = operand_amax(_produce(stage, h, t.gamma, t.beta, mean, rstd), stage.input)
    elif own is None:
        own = ops.amax(h) if stage.activation is None else ops.activation_amax(h, stage.activation)
    return stage.strategy.share_amax(own)


def _fills_blocks(tokens: int, scheme: str) -> bool:
    """Whether columnwise blocks end where this rank's tokens do."""
    block = Scheme.parse(scheme).block
    return block is None or tokens % block[1] == 0


def _gather_operand(
    strategy: Strategy, data: Tensor, scale: Tensor, amax: Tensor, scheme: str, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of a quantized tensor whose tokens (rows of the rowwise copy, columns of the columnwise one) are spread."""
    if ":tensor" not in scheme:
        scale = strategy.gather(scale, dim)
    return strategy.gather(data, dim), scale, amax


def _gather_gradient(stage: Stage, dy: Tensor, scale: Tensor | None) -> tuple[Buffers, Tensor]:
    """The quantized gradient of all tokens, from this rank's dy [M/tp, N]; and the amax that this rank saw."""
    strategy, scheme = stage.strategy, stage.grad
    assert strategy is not None and scheme is not None
    if not _fills_blocks(dy.shape[0], scheme):
        q = Buffers(*ops.quantize(strategy.gather(dy), scheme, scale, None, True, True))
        return q, q.rowwise_amax
    amax = None if stage.delayed or not tensor_amax(scheme) else strategy.share_amax(operand_amax(dy, scheme))
    per_tensor = ":tensor" in scheme
    q = Buffers(*ops.quantize(dy, scheme, scale, amax, True, not per_tensor))
    row = _gather_operand(strategy, q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax, scheme, 0)
    if per_tensor:  # the bytes can be transposed: one gather serves dgrad and wgrad
        return Buffers(row[0], row[1], row[0].t().contiguous(), row[1], row[2], q.columnwise_amax), q.rowwise_amax
    col = _gather_operand(strategy, q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax, scheme, 1)
    return Buffers(row[0], row[1], col[0], col[1], row[2], col[2]), q.rowwise_amax


# ------------------------------------------------------------------------------------------------------------------ forward


def _forward_quantized(
    stage: Stage, h: Tensor, t: StageTensors, scale: Tensor | None, keep: bool
) -> tuple[Tensor, Saved, Tensor | None, Tensor]:
    """-> (output, saved, norm output if asked for, amax of the operand). keep: a backward pass will come."""
    assert stage.input is not None
    mean, rstd, amax = _statistics(stage, h, t)
    amax = _shared_amax(stage, h, t, mean, rstd, amax)
    norm_out = _produce(stage, h, t.gamma, t.beta, mean, rstd) if stage.return_norm else None
    remake = stage.recompute or (gathers_input(stage.strategy) and not _fills_blocks(h.shape[0], stage.input))
    columnwise = keep and stage.backward == "quantized" and not remake
    if norm_out is not None:  # it exists anyway: quantize the rounded tensor
        q = Buffers(*ops.quantize(norm_out, stage.input, scale, amax, True, columnwise))
    else:
        q = _produce_quantized(stage, h, t.gamma, t.beta, mean, rstd, scale, amax, True, columnwise)
    row = (q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax)
    if gathers_input(stage.strategy):
        assert stage.strategy is not None
        row = _gather_operand(stage.strategy, *row, stage.input, 0)
    sums = stage.strategy is not None and stage.strategy.mode == "row"
    out = scaled_mm(
        *row, t.row, t.row_scale, t.row_amax,
        stage.input, stage.weight, None if sums else t.bias, h.dtype, stage.split_fprop,
    )  # fmt: skip
    if sums:
        assert stage.strategy is not None
        out = stage.strategy.reduce(out, t.bias)
    operand: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, amax)
    if columnwise:
        operand = (q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax)
    elif stage.backward == "dequantized" and not remake:
        operand = (q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax)
    elif stage.backward == "high_precision" and not remake:
        operand = (norm_out if norm_out is not None else _produce(stage, h, t.gamma, t.beta, mean, rstd), None, None)
    if stage.backward == "quantized":
        w_operand = (t.col, t.col_scale, t.col_amax)
    elif stage.backward == "dequantized":
        w_operand = (t.row, t.row_scale, t.row_amax)
    else:
        w_operand = (t.weight, None, None)
    needs_source = stage.norm is not None or stage.activation is not None or remake
    saved = Saved(h if needs_source else None, mean, rstd, t.gamma, t.beta, *operand, *w_operand)
    return out, saved, norm_out, q.rowwise_amax


def _forward_plain(stage: Stage, h: Tensor, t: StageTensors) -> tuple[Tensor, Saved, Tensor | None, Tensor]:
    """The same in the activation dtype; returns the operand in place of its amax."""
    mean, rstd, _ = _statistics(stage, h, t)
    operand = _produce(stage, h, t.gamma, t.beta, mean, rstd)
    strategy = stage.strategy
    if strategy is None:
        out = ops.mm(operand, t.weight, t.bias, h.dtype)
    elif strategy.mode == "row":
        out = strategy.reduce(ops.mm(operand, t.weight, None, h.dtype), t.bias)
    else:
        whole = strategy.gather(operand) if strategy.sequence_parallel else operand
        out = ops.mm(whole, t.weight, t.bias, h.dtype)
    needs_source = stage.norm is not None or stage.activation is not None
    saved = Saved(
        h if needs_source or stage.recompute else None, mean, rstd, t.gamma, t.beta,
        None if stage.recompute else operand, None, None, t.weight, None, None,
    )  # fmt: skip
    return out, saved, operand if stage.return_norm else None, operand


# ----------------------------------------------------------------------------------------------------------------- backward


Operand = tuple[Tensor, Tensor | None, Tensor | None]


def _wgrad_operand(stage: Stage, s: Saved, scale: Tensor | None, dtype: torch.dtype) -> Callable[[], Operand]:
    """What gives the operand of wgrad for all tokens. Where they are spread over ranks, the gather begins now."""
    strategy = stage.strategy
    if strategy is None or not gathers_input(strategy):
        return lambda: _own_operand(stage, s, scale, dtype)
    if stage.input is None or stage.backward != "quantized":
        whole = strategy.begin_gather(_high_precision_operand(stage, s, scale, dtype))
        return lambda: (whole(), None, None)
    if s.data is None and s.source is not None and not _fills_blocks(s.source.shape[0], stage.input):
        rows = strategy.begin_gather(_produce(stage, s.source, s.gamma, s.beta, s.mean, s.rstd))
        return lambda: _columnwise(Buffers(*ops.quantize(rows(), stage.input, scale, None, False, True)))
    data, data_scale, amax = _own_operand(stage, s, scale, dtype)
    assert data_scale is not None
    columns = strategy.begin_gather(data, 1)
    scales = (lambda: data_scale) if ":tensor" in stage.input else strategy.begin_gather(data_scale, 1)
    return lambda: (columns(), scales(), amax)


def _own_operand(stage: Stage, s: Saved, scale: Tensor | None, dtype: torch.dtype) -> Operand:
    """The operand of wgrad for this rank's tokens: the saved one, or a new one from the producer's input if the stage recomputes."""
    if stage.input is None or stage.backward != "quantized":
        return _high_precision_operand(stage, s, scale, dtype), None, None
    if s.data is not None:
        return s.data, s.scale, s.amax
    assert s.source is not None
    if stage.return_norm:
        h = _produce(stage, s.source, s.gamma, s.beta, s.mean, s.rstd)
        return _columnwise(Buffers(*ops.quantize(h, stage.input, scale, s.amax, False, True)))
    return _columnwise(_produce_quantized(stage, s.source, s.gamma, s.beta, s.mean, s.rstd, scale, s.amax, False, True))


def _columnwise(q: Buffers) -> Operand:
    return q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax


def _high_precision_operand(stage: Stage, s: Saved, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """This rank's operand [M, K] in high precision, for a stage that does not go back quantized."""
    if s.data is not None and (stage.input is None or stage.backward == "high_precision"):
        return s.data
    if stage.backward == "dequantized" and stage.input is not None:
        row = (s.data, s.scale, s.amax)
        if s.data is None:
            assert s.source is not None
            q = _produce_quantized(stage, s.source, s.gamma, s.beta, s.mean, s.rstd, scale, s.amax, True, False)
            row = (q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax)
        return ops.dequantize(*row, stage.input, dtype)
    assert s.source is not None
    return _produce(stage, s.source, s.gamma, s.beta, s.mean, s.rstd)


def _dgrad_operand(stage: Stage, s: Saved, dtype: torch.dtype) -> Tensor:
    """The weight in high precision [N, K], for a stage that does not go back quantized."""
    assert s.w_data is not None
    if stage.backward == "dequantized" and stage.weight is not None:
        return ops.dequantize(s.w_data, s.w_scale, s.w_amax, stage.weight, dtype)
    return s.w_data.dequantize().to(dtype) if hasattr(s.w_data, "scheme") else s.w_data


def _dgrad(stage: Stage, s: Saved, grad: Gradient, dtype: torch.dtype) -> Tensor:
    """The gradient of the stage's operand [M, K]; of a column-parallel stage this rank's part of the sum."""
    q = grad.quantized
    if q is None:
        assert grad.value is not None
        return ops.mm(grad.value, _dgrad_operand(stage, s, dtype).t(), None, dtype, stage.output_parts)
    return scaled_mm(
        q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax, s.w_data, s.w_scale, s.w_amax,
        stage.grad, stage.weight, None, dtype, stage.split_dgrad, stage.output_parts,
    )  # fmt: skip


def _wgrad(stage: Stage, grad: Gradient, operand: Operand, dtype: torch.dtype) -> Tensor:
    """The gradient of the stage's weight [N, K]."""
    q = grad.quantized
    if q is None:
        assert grad.value is not None
        return ops.mm(grad.value.t(), operand[0].t(), None, dtype)
    return scaled_mm(
        q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax, *operand,
        stage.grad, stage.input, None, dtype, stage.split_wgrad,
    )  # fmt: skip


def _quantizes_gradient(stage: Stage) -> bool:
    return stage.grad is not None and stage.backward == "quantized"


def refuse_double_backward() -> None:
    """A backward pass that is itself recorded (`create_graph=True`) would give wrong second derivatives, silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ValueError("Ottava's modules cannot be differentiated twice: call backward without create_graph=True.")


class _ChainFunction(torch.autograd.Function):
    """Runs a chain. Inputs: see `run_chain`."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, accumulators: Any, keep: bool, h: Tensor, *flat: Any) -> Any:
        fwd_scale, fwd_history, bwd_scale, bwd_history = flat[-4:]
        saved: list[Tensor | None] = []
        norm_out = None
        for i, stage in enumerate(chain.stages):
            t = StageTensors(*flat[i * PER_STAGE : (i + 1) * PER_STAGE])
            if stage.input is None:
                h, kept, norm, operand = _forward_plain(stage, h, t)
                if chain.calibrate:
                    ops.record_amax_(fwd_history, ops.amax(operand), 3 * i, 0)
                    ops.record_amax_(fwd_history, ops.amax(t.weight), 3 * i + 1, 0)
            else:
                scale = fwd_scale[3 * i : 3 * i + 1] if stage.delayed else None
                h, kept, norm, amax = _forward_quantized(stage, h, t, scale, keep)
                if stage.delayed and chain.record:
                    ops.record_amax_(fwd_history, amax, 3 * i, 0)
            norm_out = norm if norm is not None else norm_out
            saved.extend(kept)
        delayed = any(stage.delayed for stage in chain.stages)
        recompute_scale = fwd_scale.clone() if delayed and any(stage.recompute for stage in chain.stages) else None
        ctx.save_for_backward(*saved, recompute_scale)
        # Live buffers, not saved ones: another backward may update them before this one runs.
        ctx.bwd_scale, ctx.bwd_history = (bwd_scale, bwd_history) if delayed else (None, None)
        ctx.chain, ctx.accumulators = chain, accumulators
        ctx.weight_dtypes = tuple(flat[i * PER_STAGE + 2].dtype for i in range(len(chain.stages)))
        first = chain.stages[0]
        if first.gather_norm and norm_out is not None and first.strategy is not None:
            norm_out = first.strategy.gather(norm_out)
        return (h, norm_out) if first.return_norm else h

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dnorm: Tensor | None = None) -> Any:
        refuse_double_backward()
        *flat, fwd_scale = ctx.saved_tensors
        bwd_scale, bwd_history = ctx.bwd_scale, ctx.bwd_history
        chain: Chain = ctx.chain
        grads: list[Tensor | None] = [None] * (len(chain.stages) * PER_STAGE + 4)
        grad = Gradient(dy if dy.is_contiguous() else dy.contiguous())
        for i in reversed(range(len(chain.stages))):
            stage = chain.stages[i]
            s = Saved(*flat[i * PER_SAVED : (i + 1) * PER_SAVED])
            needs = ctx.needs_input_grad[4 + i * PER_STAGE : 4 + (i + 1) * PER_STAGE]
            scale = fwd_scale[3 * i : 3 * i + 1] if fwd_scale is not None else None
            grad = _quantize_gradient(chain, i, grad, bwd_scale, bwd_history)
            if needs[3]:
                grads[i * PER_STAGE + 3] = (
                    grad.column_sum if grad.column_sum is not None else ops.column_sum(grad.value)
                )
            accumulate = ctx.accumulators[i] if ctx.accumulators is not None else None
            strategy = stage.strategy
            if strategy is not None and gathers_gradient(strategy) and grad.quantized is None:
                grad = Gradient(strategy.gather(grad.value))  # type: ignore[arg-type]
            weight_dtype = torch.float32 if accumulate is not None else ctx.weight_dtypes[i]
            # The operand of wgrad is gathered under dgrad's product, the input's gradient is summed under wgrad's.
            operand = _wgrad_operand(stage, s, scale, dy.dtype) if needs[2] else None
            summed = None
            if i > 0 or ctx.needs_input_grad[3] or needs[0] or needs[1]:
                dgrad = _dgrad(stage, s, grad, dy.dtype)
                if stage.gather_norm and dnorm is not None:  # of all tokens: it is summed with the rest
                    dgrad, dnorm = dgrad + dnorm, None
                summed = _begin_sum(strategy, dgrad)
            if operand is not None:
                wgrad = _wgrad(stage, grad, operand(), weight_dtype)
                grads[i * PER_STAGE + 2] = wgrad if accumulate is None else accumulate(wgrad)
            if summed is None:
                return None, None, None, None, *grads
            dgrad = summed()
            if stage.norm is not None:
                dgrad = dgrad if dnorm is None else dgrad + dnorm
                dx, dgamma, dbeta = ops.norm_backward(
                    dgrad, s.source, s.gamma, s.mean, s.rstd, stage.norm.zero_centered, s.beta is not None
                )
                grads[i * PER_STAGE] = dgamma
                grads[i * PER_STAGE + 1] = dbeta if s.beta is not None else None
                grad = Gradient(dx)
            elif stage.activation is not None:
                needs_bias = i > 0 and ctx.needs_input_grad[4 + (i - 1) * PER_STAGE + 3]
                grad = _activation_backward(chain, i, dgrad, s, bwd_scale, needs_bias)
            else:
                grad = Gradient(dgrad)
        return None, None, None, grad.value, *grads


def _begin_sum(strategy: Strategy | None, dgrad: Tensor) -> Callable[[], Tensor]:
    """What gives the input's gradient: `dgrad`, or its sum over the ranks of a column-parallel stage, which begins now."""
    if strategy is None or strategy.mode != "column":
        return lambda: dgrad
    return strategy.begin_reduce(dgrad)


def _quantize_gradient(
    chain: Chain, i: int, grad: Gradient, bwd_scale: Tensor | None, bwd_history: Tensor | None
) -> Gradient:
    """Quantizes the gradient of stage i's output if the stage wants it, and records its amax."""
    stage = chain.stages[i]
    if not _quantizes_gradient(stage):
        return grad
    if grad.quantized is not None:
        amax = grad.quantized.rowwise_amax
    else:
        scale = bwd_scale[2 * i : 2 * i + 1] if stage.delayed else None  # type: ignore[index]
        q, amax = _quantized_gradient(stage, grad.value, scale)  # type: ignore[arg-type]
        grad = Gradient(grad.value, q, grad.column_sum)
    if stage.delayed:
        ops.record_amax_(bwd_history, amax, 2 * i, chain.owner)
    return grad


def _quantized_gradient(stage: Stage, dy: Tensor, scale: Tensor | None) -> tuple[Buffers, Tensor]:
    """(quantized gradient of all tokens, amax of what this rank has of it)."""
    if gathers_gradient(stage.strategy):
        return _gather_gradient(stage, dy, scale)
    amax = None
    if _shares_gradient_amax(stage):
        assert stage.strategy is not None and stage.grad is not None
        amax = stage.strategy.share_amax(operand_amax(dy, stage.grad))
    q = Buffers(*ops.quantize(dy, stage.grad, scale, amax, True, True))
    return q, q.rowwise_amax


def _shares_gradient_amax(stage: Stage) -> bool:
    return (
        stage.strategy is not None
        and spreads_output(stage.strategy)
        and not stage.delayed
        and stage.grad is not None
        and tensor_amax(stage.grad)
    )


def _activation_backward(
    chain: Chain, i: int, dgrad: Tensor, s: Saved, bwd_scale: Tensor | None, needs_bias: bool
) -> Gradient:
    """Through stage i's activation; straight into quantized form if the stage before takes it so."""
    name = chain.stages[i].activation
    before = chain.stages[i - 1] if i > 0 else None
    if before is None or not _quantizes_gradient(before) or _shares_gradient_amax(before):
        return Gradient(ops.activation_backward(dgrad, s.source, name))
    scale = bwd_scale[2 * (i - 1) : 2 * (i - 1) + 1] if before.delayed else None  # type: ignore[index]
    *q, column_sum = ops.activation_backward_quantize(
        dgrad, s.source, name, before.fused_grad or before.grad, scale, None, True, True, needs_bias
    )
    return Gradient(None, Buffers(*q), column_sum if needs_bias else None)


def run_chain(
    chain: Chain,
    x: Tensor,
    stages: list[StageTensors],
    state: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    accumulators: tuple | None = None,
) -> Any:
    """Runs `chain` on x [M, K]. state: (fwd_scale, fwd_history, bwd_scale, bwd_history) where delayed scaling needs it.

    Returns [M, N], or ([M, N], norm output [M, K]) if the first stage returns it.
    """
    flat = [tensor for stage in stages for tensor in stage]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *flat))
    return _ChainFunction.apply(chain, accumulators, keep, x, *flat, *(state or (None, None, None, None)))


def gated(activation: str) -> bool:
    """Whether the activation takes two halves and returns one."""
    return get_activation(activation).gated
