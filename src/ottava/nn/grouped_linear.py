"""`GroupedLinear`: several linear layers applied to consecutive groups of rows, as a layer of experts needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.kernels.cast import Buffers, operand_amax
from ottava.nn.base import InitMethod, QuantizedModule, default_device
from ottava.nn.core import refuse_double_backward
from ottava.nn.options import OverlapOptions, ParallelOptions, refuse_delayed_wgrad
from ottava.nn.parallel_module import join_meshes, linear_layouts
from ottava.nn.stage import PER_STAGE, Chain, Stage, StageTensors, tensor_amax
from ottava.nn.strategy import Strategy, local

ops = torch.ops.ottava


class _GroupedFunction(torch.autograd.Function):
    """One GEMM a group, in the sense of `core`: quantize, multiply, keep the columnwise FP8 copies."""

    @staticmethod
    def forward(
        ctx: Any, chain: Chain, splits: tuple[int, ...], keep: bool, accumulators: Any, x: Tensor, *flat: Any
    ) -> Tensor:
        fwd_scale, fwd_history, bwd_scale, bwd_history = flat[-4:]
        groups = [StageTensors(*flat[g * PER_STAGE : (g + 1) * PER_STAGE]) for g in range(len(splits))]
        stage = chain.stages[0]
        parts = list(x.split(splits))
        row = stage.strategy is not None and stage.strategy.mode == "row"
        bias = [t.bias for t in groups] if groups[0].bias is not None and not row else []
        saved: list[Tensor | None] = []
        quantized_back = keep and stage.backward == "quantized"
        if stage.input is None:
            out = ops.grouped_mm(parts, [t.weight for t in groups], bias, x.dtype)
            saved += [x, *(t.weight for t in groups)]
        else:
            q = []
            for g, part in enumerate(parts):
                scale = fwd_scale[3 * g : 3 * g + 1] if stage.delayed else None
                amax = _shared_amax(stage, "row", stage.input, part)
                q.append(Buffers(*ops.quantize(part, stage.input, scale, amax, True, quantized_back)))
                if stage.delayed and chain.record:
                    ops.record_amax_(fwd_history, q[g].rowwise_amax, 3 * g, 0)
            out = ops.grouped_scaled_mm(
                [b.rowwise_data for b in q], [b.rowwise_scale_inv for b in q], [b.rowwise_amax for b in q],
                [t.row for t in groups], [t.row_scale for t in groups], [t.row_amax for t in groups],
                stage.input, stage.weight, bias, x.dtype, stage.split_fprop,
            )  # fmt: skip
            if quantized_back:
                for b, t in zip(q, groups, strict=True):
                    saved += [
                        b.columnwise_data,
                        b.columnwise_scale_inv,
                        b.columnwise_amax,
                        t.col,
                        t.col_scale,
                        t.col_amax,
                    ]
            elif keep:  # "high_precision" or "dequantized": see [Note: three ways back] in core.py
                saved += [_back_operand(stage, part, b) for part, b in zip(parts, q, strict=True)]
                saved += [_back_weight(stage, t, x.dtype) for t in groups]
        if row:
            out = _reduced(stage, out, splits, [t.bias for t in groups])
        ctx.save_for_backward(*saved)
        ctx.bwd_scale, ctx.bwd_history = (
            (bwd_scale, bwd_history) if stage.delayed else (None, None)
        )  # live, as in core.py
        ctx.chain, ctx.splits, ctx.accumulators = chain, splits, accumulators
        ctx.weight_dtype = groups[0].weight.dtype if accumulators is None else torch.float32
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_double_backward()
        saved, bwd_scale, bwd_history = list(ctx.saved_tensors), ctx.bwd_scale, ctx.bwd_history
        chain: Chain = ctx.chain
        stage, splits = chain.stages[0], ctx.splits
        parts = [p.contiguous() for p in dy.split(splits)]
        needs_dx, needs = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        needs_dw, needs_db = needs[2], needs[3]
        dx = dw = None
        if stage.grad is None or stage.backward != "quantized":
            operands = list(saved[0].split(splits)) if stage.input is None else saved[: len(splits)]
            weights = saved[-len(splits) :]
            if needs_dx:
                dx = ops.grouped_mm(parts, [w.t() for w in weights], [], dy.dtype)
            if needs_dw:
                dw = ops.grouped_mm([p.t() for p in parts], [x.t() for x in operands], [], ctx.weight_dtype)
        else:
            dx, dw = _quantized_backward(
                chain, parts, saved, bwd_scale, bwd_history, needs_dx, needs_dw, ctx.weight_dtype
            )
        if dx is not None and stage.strategy is not None and stage.strategy.mode == "column":
            dx = stage.strategy.reduce(dx)
        grads: list[Tensor | None] = [None] * (len(splits) * PER_STAGE + 4)
        dws = list(dw.chunk(len(splits))) if dw is not None else [None] * len(splits)
        if ctx.accumulators is not None and dw is not None:
            dws = [add(part) for add, part in zip(ctx.accumulators, dws, strict=True)]
        for g in range(len(splits)):
            grads[g * PER_STAGE + 2] = dws[g]
            grads[g * PER_STAGE + 3] = ops.column_sum(parts[g]) if needs_db else None
        return None, None, None, None, dx, *grads


def _shared_amax(stage: Stage, mode: str, scheme: str, part: Tensor) -> Tensor | None:
    """The amax of a tensor that ranks of a `mode`-parallel layer hold parts of, if its scale depends on it."""
    if stage.strategy is None or stage.strategy.mode != mode or stage.delayed or not tensor_amax(scheme):
        return None
    return stage.strategy.share_amax(operand_amax(part, scheme))


def _reduced(stage: Stage, out: Tensor, splits: tuple[int, ...], biases: list[Tensor | None]) -> Tensor:
    """Partial sums [M, N] summed over ranks, then each group's bias."""
    assert stage.strategy is not None
    out = stage.strategy.reduce(out)
    if biases[0] is None:
        return out
    return torch.cat([(y.float() + b.float()).to(y.dtype) for y, b in zip(out.split(splits), biases) if b is not None])


def _back_operand(stage: Stage, part: Tensor, q: Buffers) -> Tensor:
    if stage.backward == "high_precision":
        return part
    return ops.dequantize(q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax, stage.input, part.dtype)


def _back_weight(stage: Stage, t: StageTensors, dtype: torch.dtype) -> Tensor:
    if stage.backward == "high_precision" and not hasattr(t.weight, "scheme"):
        return t.weight.to(dtype)
    return ops.dequantize(t.row, t.row_scale, t.row_amax, stage.weight, dtype)


def _quantized_backward(
    chain: Chain,
    parts: list[Tensor],
    saved: list[Tensor],
    bwd_scale: Tensor | None,
    bwd_history: Tensor | None,
    needs_dx: bool,
    needs_dw: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    stage = chain.stages[0]
    q = []
    for g, part in enumerate(parts):
        scale = bwd_scale[2 * g : 2 * g + 1] if bwd_scale is not None else None
        assert stage.grad is not None
        amax = _shared_amax(stage, "column", stage.grad, part)
        q.append(Buffers(*ops.quantize(part, stage.grad, scale, amax, True, True)))
        if stage.delayed:
            ops.record_amax_(bwd_history, q[g].rowwise_amax, 2 * g, chain.owner)
    x_data, x_scale, x_amax, w_data, w_scale, w_amax = (saved[i::6] for i in range(6))
    dx = dw = None
    if needs_dx:
        dx = ops.grouped_scaled_mm(
            [b.rowwise_data for b in q], [b.rowwise_scale_inv for b in q], [b.rowwise_amax for b in q],
            w_data, w_scale, w_amax, stage.grad, stage.weight, [], parts[0].dtype, stage.split_dgrad,
        )  # fmt: skip
    if needs_dw:
        dw = ops.grouped_scaled_mm(
            [b.columnwise_data for b in q], [b.columnwise_scale_inv for b in q], [b.columnwise_amax for b in q],
            x_data, x_scale, x_amax, stage.grad, stage.input, [], weight_dtype, stage.split_wgrad,
        )  # fmt: skip
    return dx, dw


class GroupedLinear(QuantizedModule):
    """`num_gemms` linear layers (`weight0`, `bias0`, `weight1`, ...); group g of the rows goes through layer g.

    Arguments are TransformerEngine's. Each group is quantized by itself, so what one expert sees does not change another's scales.

        >>> experts = ottava.GroupedLinear(2, 64, 128)
        >>> experts(torch.randn(10, 64), m_splits=[4, 6]).shape
        torch.Size([10, 128])
    """

    weight0: torch.nn.Parameter

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be at least 1, got {num_gemms}.")
        super().__init__(num_gemms, default_device(device), params_dtype, name)
        refuse_delayed_wgrad(delay_wgrad_compute)
        if save_original_input:
            raise ValueError("GroupedLinear does not offer save_original_input: it keeps FP8 copies.")
        self.wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel = ParallelOptions(tp_group, tp_size, sequence_parallel, parallel_mode, get_rng_state_tracker)
        self.overlap = OverlapOptions(ub_overlap_ag, ub_overlap_rs, False, False, False, ub_name)
        self.rng_tracker_name = rng_tracker_name
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.init_method = init_method
        self._gated_stages = (False,) * num_gemms
        weight, vector = linear_layouts(parallel_mode)
        for g in range(num_gemms):
            self.add_parameter(f"weight{g}", (out_features, in_features), layout=weight)
            if bias:
                self.add_parameter(f"bias{g}", (out_features,), layout=vector)
        if self.parallel.size > 1:
            self.divide_features(self.parallel.size)
        self.reset_parameters(defer_init=self.device_at_init.type == "meta")
        join_meshes(self, tp_group, tp_mesh, weight_mesh)

    @property
    def gemm_weights(self) -> list[list[str]]:
        """One weight a group."""
        return [[f"weight{g}"] for g in range(self.num_gemms)]

    def divide_features(self, size: int) -> None:
        """One rank's share of the features."""
        if self.parallel.mode == "column":
            self.out_features //= size
        elif self.parallel.mode == "row":
            self.in_features //= size

    def strategy(self, index: int = 0) -> Strategy | None:
        """One strategy for all groups. Their rows are counted by `m_splits`, so they cannot be spread over ranks."""
        strategy = super().strategy(index)
        if strategy is not None and strategy.sequence_parallel:
            raise ValueError(
                "GroupedLinear takes all tokens of its groups on every rank: sequence_parallel is not offered."
            )
        return strategy

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draws the weights anew, zeroes the biases and forgets delayed-scaling history."""
        if defer_init or self.leave_meta():
            return
        names = [f"weight{g}" for g in range(self.num_gemms)]
        self.initialize_weight(names, self.init_method)
        with torch.no_grad():
            for g in range(self.num_gemms if self.use_bias else 0):
                getattr(self, f"bias{g}").zero_()
        self.delayed.reset()

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        """inp [..., in_features]; m_splits: rows of each group, adding up to all rows. Returns [..., out_features]."""
        x = self.check_input(inp, self.in_features, local(self.weight0))
        rows = x.reshape(-1, self.in_features)
        if len(m_splits) != self.num_gemms or sum(m_splits) != rows.shape[0] or min(m_splits) < 0:
            raise ValueError(
                f"m_splits must have {self.num_gemms} numbers, none negative, that add up to {rows.shape[0]} rows, got {list(m_splits)} "
                f"(sum {sum(m_splits)})."
            )
        self.check_features(in_features=self.in_features, out_features=self.out_features)
        chain, scale = self.prepare([Stage(strategy=self.strategy())] * self.num_gemms)
        biases = [self.parameter(f"bias{g}") if self.use_bias else None for g in range(self.num_gemms)]
        flat: list[Any] = []
        for g in range(self.num_gemms):
            bias = None if self.return_bias else biases[g]
            weight = local(getattr(self, f"weight{g}"))
            flat += self.stage_tensors(chain, g, weight, bias, scale, is_first_microbatch, dtype=x.dtype)
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *flat))
        accumulators = (
            [self.accumulator([f"weight{g}"]) for g in range(self.num_gemms)] if self.wgrad_accumulation else None
        )
        state = self.state(scale) or (None,) * 4
        y = _GroupedFunction.apply(chain, tuple(m_splits), keep, accumulators, rows, *flat, *state)
        y = y.reshape(*x.shape[:-1], self.out_features)
        return (y, biases) if self.return_bias else y

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"{self.quantization_repr()}"
        )
