"""`LayerNormLinear`: norm, then a linear layer, with the norm's output quantized as it is computed."""

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
    check_norm,
    check_recompute,
    normalize_split,
    refuse_delayed_wgrad,
    split_names,
)
from ottava.nn.parallel_module import join_meshes, linear_layouts
from ottava.nn.stage import Norm, Stage


class LayerNormLinear(QuantizedModule):
    """`y = norm(x) @ weight.T + bias`, with LayerNorm or RMSNorm.

    Arguments are TransformerEngine's. With `recompute="selective"` the norm's FP8 output is made again in backward instead of kept.

        >>> layer = ottava.LayerNormLinear(128, 256, normalization="RMSNorm", bias=False)
        >>> layer(torch.randn(4, 128)).shape
        torch.Size([4, 256])
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: dict[str, int] | tuple[str, ...] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        recompute: str = "none",
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        super().__init__(1, default_device(device), params_dtype, name)
        refuse_delayed_wgrad(delay_wgrad_compute)
        if parallel_mode == "row":
            raise ValueError(
                "LayerNormLinear normalizes whole rows, which parallel_mode='row' would cut: use 'column'."
            )
        self.parallel = ParallelOptions(tp_group, tp_size, sequence_parallel, parallel_mode, get_rng_state_tracker)
        self.overlap = OverlapOptions(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name, symmetric_ar_type
        )
        self.in_features, self.out_features = in_features, out_features
        self.normalization = check_norm(normalization)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.wgrad_accumulation = fuse_wgrad_accumulation
        self.recompute = check_recompute(recompute)
        self.init_method = init_method
        self.add_parameter("layer_norm_weight", (in_features,))
        if normalization == "LayerNorm":
            self.add_parameter("layer_norm_bias", (in_features,))
        else:
            self.layer_norm_bias = None
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

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draws the weights anew, resets gain and biases, and forgets delayed-scaling history."""
        if defer_init or self.leave_meta():
            return
        self.initialize_weight(self.weight_names, self.init_method)
        with torch.no_grad():
            self.layer_norm_weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            for name in self.bias_names:
                getattr(self, name).zero_()
            if self.layer_norm_bias is not None:
                self.layer_norm_bias.zero_()
        self.delayed.reset()

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        residual: Tensor | None = None,
    ) -> Any:
        """inp [..., in_features] -> output, or (output, bias), (output, norm output), (output, bias, norm output) as asked for.

        residual, like inp: is added to inp before the norm, in one kernel with it; the sum is returned too, last.
        """
        if fp8_output or fp8_grad:
            raise ValueError(
                "fp8_output and fp8_grad are not offered: modules hand each other tensors in the activation dtype."
            )
        weight = self.joined(self.weight_names)
        x = self.check_input(inp, self.in_features, weight)
        bias = self.joined(self.bias_names) if self.use_bias else None
        norm = (self.normalization, self.eps, self.zero_centered_gamma)
        returns = (self.return_layernorm_output, self.return_layernorm_output_gathered)
        strategy = self.strategy()

        def stages() -> list[Stage]:
            self.check_features(in_features=self.in_features, out_features=self.out_features)
            return [
                Stage(
                    Norm(*norm),
                    recompute=self.recompute,
                    return_norm=self.return_layernorm_output,
                    gather_norm=self.return_layernorm_output_gathered,
                    strategy=strategy,
                )
            ]

        chain, scale = self.prepare((norm, returns, self.recompute, strategy), stages)
        tensors = self.stage_tensors(
            chain, 0, weight, None if self.return_bias else bias, scale, is_first_microbatch,
            self.input_parameter("layer_norm_weight"), self.input_parameter("layer_norm_bias"), x.dtype,
        )  # fmt: skip
        accumulate = self.accumulator(self.weight_names) if self.wgrad_accumulation else None
        out = run_chain(
            chain, x.reshape(-1, self.in_features), [tensors], self.state(scale), (accumulate,) if accumulate else None,
            residual=self.check_residual(residual, x),
        )  # fmt: skip
        y, *more = out if isinstance(out, tuple) else (out,)
        result: tuple[Any, ...] = (torch_private.reshaped(y, self.output_shape(x.shape, self.out_features)),)
        if self.return_bias:
            result += (self.returned_bias(bias),)
        if self.return_layernorm_output:
            gathered = self.return_layernorm_output_gathered
            # A view, whose changes autograd sees: backward may need it as it is.
            result += (more[0].reshape(self.output_shape(x.shape, self.in_features) if gathered else x.shape),)
        if residual is not None:
            result += (more[-1].reshape(x.shape),)
        return result if len(result) > 1 else result[0]

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}, {self.quantization_repr()}"
        )
