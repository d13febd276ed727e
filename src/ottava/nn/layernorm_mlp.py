"""`LayerNormMLP`: norm, fc1, activation, fc2, as one chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels.activation import get as get_activation
from ottava.nn.base import QuantizedModule, default_device
from ottava.nn.core import run_chain
from ottava.nn.draw import InitMethod
from ottava.nn.options import OverlapOptions, ParallelOptions, check_norm, check_recompute, refuse_delayed_wgrad
from ottava.nn.parallel_module import join_meshes
from ottava.nn.stage import Norm, Stage
from ottava.nn.strategy import REPLICATED, Layout


class LayerNormMLP(QuantizedModule):
    """`fc2(activation(fc1(norm(x))))`. Gated activations (swiglu, geglu, ...) double fc1's width.

    Arguments are TransformerEngine's. With `recompute="selective"` (or TransformerEngine's `checkpoint=True`) the norm's and the
    activation's outputs are made again in backward instead of kept.

        >>> mlp = ottava.LayerNormMLP(128, 512, activation="swiglu", normalization="RMSNorm", bias=False)
        >>> mlp(torch.randn(4, 128)).shape, mlp.fc1_weight.shape
        (torch.Size([4, 128]), torch.Size([1024, 128]))
    """

    stage_names = ("", "fc2.")
    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    fc1_weight: torch.nn.Parameter
    fc2_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        recompute: str = "none",
        tp_mesh: Any = None,
        weight_mesh: Any = None,
    ) -> None:
        super().__init__(2, default_device(device), params_dtype, name)
        refuse_delayed_wgrad(delay_wgrad_compute)
        if activation_params:
            raise ValueError(f"activation_params={activation_params!r}: {activation!r} takes no parameters.")
        mode = "column" if set_parallel_mode else None
        self.parallel = ParallelOptions(tp_group, tp_size, sequence_parallel, mode, get_rng_state_tracker)
        self.overlap = OverlapOptions(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, None, symmetric_ar_type
        )
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.normalization = check_norm(normalization)
        self.activation = activation
        self._gated_stages = (_gated(activation), False)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.wgrad_accumulation = fuse_wgrad_accumulation
        self.recompute = check_recompute(recompute) or checkpoint
        self.init_method, self.output_layer_init_method = init_method, output_layer_init_method
        self.add_parameter("layer_norm_weight", (hidden_size,))
        if normalization == "LayerNorm":
            self.add_parameter("layer_norm_bias", (hidden_size,))
        else:
            self.layer_norm_bias = None
        fc1, fc2 = (Layout(0), Layout(1)) if set_parallel_mode else (REPLICATED, REPLICATED)
        fc1_width = sum(self._fc1_rows().values()) if _gated(activation) else ffn_hidden_size
        split = self._fc1_rows() if set_parallel_mode and _gated(activation) else {}
        # In TransformerEngine's order: optimizers keep their state by position.
        self._add_fc1("weight", (fc1_width, hidden_size), split, fc1)
        if bias:
            self._add_fc1("bias", (fc1_width,), split, fc1)
        self.add_parameter("fc2_weight", (hidden_size, ffn_hidden_size), layout=fc2)
        if bias:
            self.add_parameter("fc2_bias", (hidden_size,))
        else:
            self.fc1_bias = self.fc2_bias = None
        if self.parallel.size > 1:
            self.divide_features(self.parallel.size)
        self.reset_parameters(defer_init=self.device_at_init.type == "meta")
        join_meshes(self, tp_group, tp_mesh, weight_mesh)

    def _fc1_rows(self) -> dict[str, int]:
        """Gate and up: each is split over ranks by itself, so a module that may be split has a parameter for each."""
        return {"gate": self.ffn_hidden_size, "up": self.ffn_hidden_size}

    def _add_fc1(self, kind: str, shape: tuple[int, ...], split: dict[str, int], layout: Layout) -> None:
        rows = {f"fc1_{part}_{kind}": count for part, count in split.items()}
        self.add_parameter(f"fc1_{kind}", shape, rows or None, layout)
        if rows:
            self.fuse_names(f"fc1_{kind}", rows)
        elif _gated(self.activation):
            self.unsplit[f"fc1_{kind}"] = {f"fc1_{part}_{kind}": count for part, count in self._fc1_rows().items()}

    def _fc1_names(self, kind: str) -> list[str]:
        """The parameters that make up fc1's weight or bias."""
        return list(self.fused.get(f"fc1_{kind}", (f"fc1_{kind}",)))

    @property
    def gemm_weights(self) -> list[list[str]]:
        """Of fc1 and fc2."""
        return [self._fc1_names("weight"), ["fc2_weight"]]

    @property
    def modes(self) -> tuple[str | None, ...]:
        """fc1 by columns of its output, fc2 by rows of its input."""
        return (None, None) if self.parallel.mode is None else ("column", "row")

    @property
    def overlap_names(self) -> tuple[str, ...]:
        """As TransformerEngine has them."""
        return ("fc1", "fc2")

    def set_parallel_mode(self) -> None:
        """What the constructor's `set_parallel_mode` asks for, later: whole weights will be split by `set_device_mesh`."""
        if self.parallel.mode is None:
            self.parallel.mode = "column"
            self.layouts.update({"fc1_weight": Layout(0), "fc1_bias": Layout(0), "fc2_weight": Layout(1)})
            for kind in ("weight", "bias") if _gated(self.activation) else ():
                if f"fc1_{kind}" in self._parameters and self._parameters[f"fc1_{kind}"] is not None:
                    self.split_rows(f"fc1_{kind}", {f"fc1_{n}_{kind}": rows for n, rows in self._fc1_rows().items()})

    def divide_features(self, size: int) -> None:
        """One rank's share of the inner features."""
        if self.parallel.mode is not None:
            self.ffn_hidden_size //= size

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draws the weights anew, resets gain and biases, and forgets delayed-scaling history."""
        if defer_init or self.leave_meta():
            return
        self.initialize_weight(self._fc1_names("weight"), self.init_method)
        self.initialize_weight(["fc2_weight"], self.output_layer_init_method)
        with torch.no_grad():
            self.layer_norm_weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            for name in ("layer_norm_bias", *self._fc1_names("bias"), "fc2_bias"):
                if getattr(self, name) is not None:
                    getattr(self, name).zero_()
        self.delayed.reset()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, residual: Tensor | None = None) -> Any:
        """inp [..., hidden] -> output, or (output, bias), (output, norm output), (output, bias, norm output) as asked for.

        residual, like inp: is added to inp before the norm, in one kernel with it; the sum is returned too, last.
        """
        fc1_weight, fc2_weight = self.joined(self._fc1_names("weight")), self.joined(["fc2_weight"])
        x = self.check_input(inp, self.hidden_size, fc1_weight)
        norm = (self.normalization, self.eps, self.zero_centered_gamma)
        returns = (self.return_layernorm_output, self.return_layernorm_output_gathered)
        strategies = (self.strategy(0), self.strategy(1))

        def stages() -> list[Stage]:
            self.check_features(hidden_size=self.hidden_size, ffn_hidden_size=self.ffn_hidden_size)
            first = Stage(
                Norm(*norm),
                recompute=self.recompute,
                return_norm=self.return_layernorm_output,
                gather_norm=self.return_layernorm_output_gathered,
                output_parts=2 if _gated(self.activation) else 1,
                strategy=strategies[0],
            )
            return [first, Stage(activation=self.activation, recompute=self.recompute, strategy=strategies[1])]

        key = (norm, returns, self.activation, self.recompute, strategies)
        chain, scale = self.prepare(key, stages)
        fc1 = self.stage_tensors(
            chain, 0, fc1_weight, self._fc1_bias(), scale, is_first_microbatch,
            self.input_parameter("layer_norm_weight"), self.input_parameter("layer_norm_bias"), x.dtype,
        )  # fmt: skip
        bias = self.output_parameter("fc2_bias", 1)
        fc2_bias = None if self.return_bias else bias
        fc2 = self.stage_tensors(chain, 1, fc2_weight, fc2_bias, scale, is_first_microbatch, dtype=x.dtype)
        accumulators = (
            (self.accumulator(self._fc1_names("weight")), self.accumulator(["fc2_weight"]))
            if self.wgrad_accumulation
            else None
        )
        added = self.check_residual(residual, x)
        out = run_chain(
            chain, x.reshape(-1, self.hidden_size), [fc1, fc2], self.state(scale), accumulators, residual=added
        )
        y, *more = out if isinstance(out, tuple) else (out,)
        result: tuple[Any, ...] = (torch_private.reshaped(y, x.shape),)
        if self.return_bias:
            result += (self.returned_bias(bias),)
        if self.return_layernorm_output:
            gathered = self.return_layernorm_output_gathered
            # A view, whose changes autograd sees: backward may need it as it is.
            result += (more[0].reshape(self.output_shape(x.shape, self.hidden_size) if gathered else x.shape),)
        if residual is not None:
            result += (more[-1].reshape(x.shape),)  # a view, as above: backward keeps the sum
        return result if len(result) > 1 else result[0]

    def _fc1_bias(self) -> Tensor | None:
        return self.joined(self._fc1_names("bias")) if self.use_bias else None

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.use_bias}, "
            f"normalization={self.normalization}, activation={self.activation}, {self.quantization_repr()}"
        )


def _gated(activation: str) -> bool:
    """Whether the activation takes two halves and returns one."""
    return get_activation(activation).gated
