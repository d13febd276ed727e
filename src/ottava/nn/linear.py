"""`Linear`: y = x @ weight.T + bias, quantized inside `autocast`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.nn.base import QuantizedModule, default_device
from ottava.nn.core import run_chain
from ottava.nn.draw import InitMethod
from ottava.nn.options import (
    OverlapOptions,
    ParallelOptions,
    check_recompute,
    normalize_split,
    refuse_delayed_wgrad,
    split_names,
    tell_of_rng_tracker,
)
from ottava.nn.parallel_module import join_meshes, linear_layouts
from ottava.nn.stage import Stage
from ottava.nn.strategy import ALONE


class Linear(QuantizedModule):
    """Applies `y = x @ weight.T + bias`; inside `ottava.autocast` the three GEMMs of a training step run in FP8.

    Arguments are TransformerEngine's. `parameters_split` ({"query": 64, "key": 64}, or names) gives separate parameters
    (`query_weight`, ...). `recompute="selective"` keeps the input itself for backward instead of its FP8 copy, which saves memory
    where another op keeps that input anyway.

        >>> layer = ottava.Linear(128, 256, params_dtype=torch.bfloat16)
        >>> with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
        ...     y = layer(torch.randn(32, 128, dtype=torch.bfloat16))
        >>> y.shape
        torch.Size([32, 256])
    """

    input_is_kept = False
    """Whether another op keeps the input for its own backward: then it is kept here too, which costs nothing, and not its FP8 copy.
    Backward reads two bytes an element more, 0.02 ms for 8192x4096 on an H200."""

    def __init__(
        self,
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
        parameters_split: dict[str, int] | tuple[str, ...] | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        recompute: str = "none",
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        super().__init__(1, default_device(device), params_dtype, name)
        refuse_delayed_wgrad(delay_wgrad_compute)
        tell_of_rng_tracker("Linear", rng_tracker_name)
        self.parallel = ParallelOptions(tp_group, tp_size, sequence_parallel, parallel_mode, get_rng_state_tracker)
        self.overlap = OverlapOptions(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name, symmetric_ar_type
        )
        self.in_features, self.out_features = in_features, out_features  # of this rank, once split over several
        self.use_bias, self.return_bias = bias, return_bias
        self.wgrad_accumulation = fuse_wgrad_accumulation
        self.recompute = check_recompute(recompute) or save_original_input
        self.init_method = init_method
        split = normalize_split(parameters_split, out_features)
        weight, vector = linear_layouts(parallel_mode)
        rows = split_names(split, "weight")
        self.weight_names = self.add_parameter("weight", (out_features, in_features), rows, weight)
        rows = split_names(split, "bias")
        self.bias_names = self.add_parameter("bias", (out_features,), rows, vector) if bias else []
        if self.parallel.size > 1:
            self.divide_features(self.parallel.size)
        self.reset_parameters(defer_init=self.device_at_init.type == "meta")
        join_meshes(self, tp_group, tp_mesh, weight_mesh)

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
        self.initialize_weight(self.weight_names, self.init_method)
        with torch.no_grad():
            for name in self.bias_names:
                getattr(self, name).zero_()
        self.delayed.reset()

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """inp [..., in_features] -> [..., out_features]; with `return_bias` the bias is returned instead of added.

        is_first_microbatch: True quantizes the weight and keeps the copy, False uses the kept copy, None does neither.
        """
        if fp8_output or fp8_grad:
            raise ValueError(
                "fp8_output and fp8_grad are not offered: modules hand each other tensors in the activation dtype."
            )
        weight = self.joined(self.weight_names)
        x = self.check_input(inp, self.in_features, weight)
        strategy = self._strategies[0] if self.parallel.size == 1 else self.strategy()
        bias = self.joined(self.bias_names) if self.use_bias else None
        if bias is not None and strategy is not ALONE:
            bias = strategy.output_parameter(bias)

        recompute = self.recompute or (self.input_is_kept and not torch.compiler.is_compiling())

        def stages() -> list[Stage]:
            self.check_features(in_features=self.in_features, out_features=self.out_features)
            return [Stage(recompute=recompute, strategy=strategy)]

        chain, scale = self.prepare((recompute, strategy), stages)
        tensors = self.stage_tensors(
            chain, 0, weight, None if self.return_bias else bias, scale, is_first_microbatch, dtype=x.dtype
        )
        accumulate = self.accumulator(self.weight_names) if self.wgrad_accumulation else None
        rows = x.reshape(-1, self.in_features)
        y = run_chain(
            chain, rows, [tensors], None if scale is None else self.state(scale), (accumulate,) if accumulate else None
        )
        alone = strategy is ALONE
        shape = (*x.shape[:-1], self.out_features) if alone else self.output_shape(x.shape, self.out_features)
        y = torch_private.reshaped(y, shape)
        return (y, self.returned_bias(bias)) if self.return_bias else y

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, {self.quantization_repr()}"
