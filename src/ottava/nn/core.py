"""The one autograd core: a chain of (producer -> GEMM) stages.

    stage:  operand = quantize(produce(h));  h = operand @ weight.T + bias

`Linear` is a chain of one stage whose producer is the identity, `LayerNormLinear` of one that normalizes, `LayerNormMLP` of two
(norm, then activation), `GroupedLinear` of one whose rows come in groups ([Note: groups] in `stage.py`). Shapes inside are 2-D:
tokens M x features.

This file has the loops over stages, and what autograd keeps between them. One stage is run by `stage_forward.py` and
`stage_backward.py`; a producer is in `producer.py`, a gradient on its way back in `output_gradient.py`, the products of backward in
`dgrad.py` and `wgrad.py`. `direct.py` has both loops once more, for the common case.

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

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.nn import direct
from ottava.nn import product as products
from ottava.nn.delayed_columns import DelayedTensors, column_of, input_column
from ottava.nn.dgrad import dgrad_operands
from ottava.nn.forward_only import forward_only
from ottava.nn.operand import Operand
from ottava.nn.output_gradient import bias_gradient, quantize_gradients
from ottava.nn.producer import has_producer
from ottava.nn.stage import Chain, Gradient, Saved, StageGradients, StageTensors, pack, unpack
from ottava.nn.stage_backward import producers_backward, products_backward
from ottava.nn.stage_forward import fprop, make_operands
from ottava.quant.weight import gradient_dtype


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
    exporting = False
    if not chain.direct or products.watcher is not None:
        apply, exporting = _ChainFunction.apply, torch_private.is_exporting()
    else:
        apply = _DirectChainFunction.apply if torch_private.transforms_active() else _BARE_APPLY
    flat = stages[0] if len(stages) == 1 else pack(stages)
    device = x.device.type
    if exporting:
        out = apply(chain, accumulators, splits, keep, residual, x, *flat, *(state or _NO_STATE))
        trained = [t for s in stages for t in (s.gamma, s.beta, s.weight, s.bias)]
        return forward_only(out, (x, residual, *trained))
    if not torch.is_autocast_enabled(device) or torch.compiler.is_compiling():
        return apply(chain, accumulators, splits, keep, residual, x, *flat, *(state or _NO_STATE))
    torch.set_autocast_enabled(device, False)  # x has its dtype by now, and each op would ask
    try:
        return apply(chain, accumulators, splits, keep, residual, x, *flat, *(state or _NO_STATE))
    finally:
        torch.set_autocast_enabled(device, True)


def _trains(t: StageTensors) -> bool:
    """Whether a parameter of the stage wants a gradient."""
    if t.weight.requires_grad or (t.bias is not None and t.bias.requires_grad):
        return True
    return (t.gamma is not None and t.gamma.requires_grad) or (t.beta is not None and t.beta.requires_grad)


def refuse_double_backward() -> None:
    """A backward pass that is itself recorded (`create_graph=True`) would give wrong second derivatives, silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ValueError("Ottava's modules cannot be differentiated twice: call backward without create_graph=True.")


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
            stage, added = chain.stages[start], residual if start == 0 else None
            made = make_operands(chain, start, _parts(h, splits), added, tensors, state, keep)
            saved += [one.saved for one in made]
            total = made[0].saved.h if added is not None else total
            h = fprop(stage, made, tensors[start : start + groups], h.dtype)
            if stage.return_norm:
                norm_out = _joined([one.norm_out for one in made])
        _keep_for_backward(ctx, chain, tensors, saved, state)
        ctx.accumulators, ctx.splits, ctx.adds = accumulators, splits, residual is not None
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
            return direct.backward(ctx, dy, dtotal)
        dnorm = others[0] if chain.stages[0].return_norm else None
        return _backward(ctx, dy, dnorm, dtotal)


class _DirectChainFunction(_ChainFunction):
    """A direct chain that nobody watches. Somebody may, by its backward: that is the same one."""

    forward = staticmethod(direct.forward)  # type: ignore[assignment]


_NO_STATE = DelayedTensors()
_BARE_APPLY = torch_private.bare_apply(_DirectChainFunction)


def _keep_for_backward(
    ctx: Any, chain: Chain, tensors: list[StageTensors], saved: list[Saved], state: DelayedTensors
) -> None:
    """What backward finds in `ctx` of the stages."""
    delayed = any(stage.delayed for stage in chain.stages)
    sources = tuple(t.source for t in tensors)
    # Delayed scaling writes its next scales over these, and what is made again needs the ones of forward.
    makes_again = delayed and (any(stage.recompute for stage in chain.stages) or any(sources))
    ctx.save_for_backward(*pack(saved), state.fwd_scale.clone() if makes_again else None)  # type: ignore[union-attr]
    # Live buffers, not saved ones: another backward may update them before this one runs.
    ctx.bwd_scale, ctx.bwd_history = (state.bwd_scale, state.bwd_history) if delayed else (None, None)
    ctx.chain, ctx.sources = chain, sources
    ctx.weight_dtypes = tuple(gradient_dtype(t.weight) for t in tensors)


def _backward(ctx: Any, dy: Tensor, dnorm: Tensor | None, dtotal: Tensor | None) -> Any:
    """The loop back. dnorm, dtotal: the gradients of the first norm's output and of x + residual, where they were returned."""
    chain: Chain = ctx.chain
    *flat, fwd_scale = ctx.saved_tensors
    if not torch.compiler.is_compiling():
        torch_private.release_saved(ctx)  # a stage's tensors are freed when its successor's turn comes
    count, groups, wanted = len(chain.stages), chain.groups, ctx.needs_input_grad
    state = DelayedTensors(fwd_scale, None, ctx.bwd_scale, ctx.bwd_history)
    all_saved, all_needs = unpack(Saved, flat, count), unpack(StageTensors, wanted[direct.FIRST :], count)
    flat = []
    found: list[StageGradients] = [StageGradients()] * count
    splits = _of_output(chain, ctx.splits)
    grads = [Gradient(part) for part in _parts(dy if dy.is_contiguous() else dy.contiguous(), splits)]
    dx: Tensor | None = None
    for start in reversed(range(0, count, groups)):
        members = slice(start, start + groups)
        stage, saved, needs = chain.stages[start], all_saved[members], all_needs[members]
        del all_saved[start:]
        grads = quantize_gradients(chain, start, grads, state)
        dbias = [bias_gradient(grad) if need.bias else None for grad, need in zip(grads, needs)]
        add = ctx.accumulators[members] if ctx.accumulators is not None else (None,) * groups
        # Another gradient of all ranks' operands is summed over ranks with the rest.
        extra, dnorm = (dnorm, None) if stage.gather_norm else (None, dnorm)
        weights = None
        if start > 0 or any(wanted[direct.FIRST - 2 : direct.FIRST]) or any(n.gamma or n.beta for n in needs):
            weights = partial(dgrad_operands, stage, saved, ctx.sources, start, fwd_scale, dy.dtype)
        scales = [column_of(fwd_scale, input_column(i)) for i in range(start, start + groups)]
        dx, dweight = products_backward(
            stage, saved, grads, scales, weights, any(need.weight for need in needs), extra, add,
            ctx.weight_dtypes[start], dy.dtype,
        )  # fmt: skip
        if dx is None or (start == 0 and not has_producer(stage)):
            found[members] = [StageGradients(None, None, w, b) for w, b in zip(dweight, dbias)]
            break
        dnorms = None if dnorm is None else _parts(dnorm, ctx.splits)
        needs_bias = [start > 0 and bool(all_needs[i - groups].bias) for i in range(start, start + groups)]
        made = producers_backward(
            chain, start, _parts(dx, ctx.splits), dnorms, dtotal if start == 0 else None, saved, state, needs_bias
        )
        grads = [one.grad for one in made]
        found[members] = [StageGradients(m.dgamma, m.dbeta, w, b) for m, w, b in zip(made, dweight, dbias)]
    if dx is not None and has_producer(chain.stages[0]):
        dx = _joined([grad.value for grad in grads])
    return *(None,) * (direct.FIRST - 2), dx if ctx.adds else None, dx, *pack(found), *DelayedTensors()


def _parts(x: Tensor, splits: tuple[int, ...] | None) -> list[Tensor]:
    """The rows of each group."""
    return [x] if splits is None else list(x.split(splits))


def _of_output(chain: Chain, splits: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The rows of each group of the chain's output, from those of its input. (Chains of several groups have one stage.)"""
    return None if splits is None else tuple(map(chain.stages[-1].strategy.output_tokens, splits))


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    """The groups' rows under one another."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # type: ignore[arg-type]
