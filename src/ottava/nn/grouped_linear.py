"""`GroupedLinear`: several linear layers applied to consecutive groups of rows, as a layer of experts needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.nn.base import QuantizedModule, default_device
from ottava.nn.core import run_chain
from ottava.nn.draw import InitMethod
from ottava.nn.options import OverlapOptions, ParallelOptions, refuse_delayed_wgrad, tell_of_rng_tracker
from ottava.nn.parallel_module import join_meshes, linear_layouts
from ottava.nn.stage import Stage
from ottava.nn.strategy import local


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
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be at least 1, got {num_gemms}.")
        super().__init__(num_gemms, default_device(device), params_dtype, name)
        refuse_delayed_wgrad(delay_wgrad_compute)
        tell_of_rng_tracker("GroupedLinear", rng_tracker_name)
        if single_grouped_weight or single_grouped_bias or use_grouped_tensor:
            raise ValueError(
                "GroupedLinear offers neither single_grouped_weight, single_grouped_bias nor use_grouped_tensor: each group has parameters "
                "of its own (weight0, bias0, ...). Its products are one launch on a GPU all the same; leave them out."
            )
        if save_original_input:
            raise ValueError("GroupedLinear does not offer save_original_input: it keeps FP8 copies.")
        self.wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel = ParallelOptions(tp_group, tp_size, sequence_parallel, parallel_mode, get_rng_state_tracker)
        self.overlap = OverlapOptions(ub_overlap_ag, ub_overlap_rs, False, False, False, ub_name)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.init_method = init_method
        self._gated_stages = (False,) * num_gemms
        self.groups, self.stage_names = num_gemms, tuple(f"{g}." for g in range(num_gemms))
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

    def forward(
        self,
        inp: Tensor,
        m_splits: list[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """inp [..., in_features]; m_splits: rows of each group, adding up to all rows. Returns [..., out_features].

        With sequence_parallel the rows of each group are spread over the ranks, the same number on each: a column's output has
        tp_size * m_splits[g] rows of group g, those of rank 0 first; a row's output has m_splits[g] / tp_size of them.
        """
        if out is not None or dgrad_out is not None:
            raise ValueError(
                "GroupedLinear does not write into out or dgrad_out: take what it returns, and the input's grad."
            )
        x = self.check_input(inp, self.in_features, local(self.weight0))
        rows = x.reshape(-1, self.in_features)
        if isinstance(m_splits, Tensor):
            m_splits = m_splits.tolist()
        if any(isinstance(count, float) for count in m_splits):
            raise ValueError(f"m_splits are numbers of rows, which are integers, got {list(m_splits)}.")
        if len(m_splits) != self.num_gemms or sum(m_splits) != rows.shape[0] or min(m_splits) < 0:
            raise ValueError(
                f"m_splits must have {self.num_gemms} numbers, none negative, that add up to {rows.shape[0]} rows, got {list(m_splits)} "
                f"(sum {sum(m_splits)})."
            )
        strategy = self.strategy()
        if strategy.spreads_tokens and x.dim() > 2:
            raise ValueError(
                f"GroupedLinear with sequence_parallel=True takes [tokens, {self.in_features}]: a group's tokens of all ranks lie "
                f"together in its output, got an input of {tuple(x.shape)}."
            )

        def stages() -> list[Stage]:
            self.check_features(in_features=self.in_features, out_features=self.out_features)
            return [Stage(strategy=strategy)] * self.num_gemms

        chain, scale = self.prepare((strategy,), stages)
        biases = [self.output_parameter(f"bias{g}") if self.use_bias else None for g in range(self.num_gemms)]
        tensors = [
            self.stage_tensors(
                chain, g, local(getattr(self, f"weight{g}")), None if self.return_bias else biases[g], scale,
                is_first_microbatch, dtype=x.dtype,
            )
            for g in range(self.num_gemms)
        ]  # fmt: skip
        accumulators = (
            tuple(self.accumulator([f"weight{g}"]) for g in range(self.num_gemms)) if self.wgrad_accumulation else None
        )
        splits = tuple(m_splits) if self.num_gemms > 1 else None
        y = run_chain(chain, rows, tensors, self.state(scale), accumulators, splits)
        y = torch_private.reshaped(y, self.output_shape(x.shape, self.out_features))
        return (y, [self.returned_bias(bias) for bias in biases]) if self.return_bias else y

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"{self.quantization_repr()}"
        )
