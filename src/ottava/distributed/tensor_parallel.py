"""Tensor and sequence parallelism: the strategies that modules hold (`ottava.nn.strategy` says what they mean).

layer = ottava.LayerNormLinear(1024, 4096, parallel_mode="column", sequence_parallel=True)
layer.set_device_mesh(meshes.tp, meshes.weight)      # parameters become DTensors; collectives run over the mesh
layer.set_tensor_parallel_group(group)               # or plain tensors and a process group (construct with tp_size)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ottava import torch_private
from ottava.nn import DotProductAttention, MultiheadAttention, TransformerLayer
from ottava.nn import strategy as nn_strategy
from ottava.nn.base import QuantizedModule
from ottava.nn.operand import Operand, token_dims
from ottava.nn.options import OverlapOptions, ParallelOptions
from ottava.nn.product import Product
from ottava.nn.strategy import ALONE, Layout, Operands, Strategy, add_by_group, nothing
from ottava.notices import warn_once
from ottava.overlap import collectives, opaque
from ottava.overlap.bulk import parts_of_ranks
from ottava.overlap.engine import Engine
from ottava.overlap.schedule import Schedule
from ottava.overlap.switches import schedule_of, warn_of_idle_switches
from ottava.quant.weight import Weight

__all__ = ["Column", "Row", "split_tensors"]

NO_SCHEDULE = Schedule()


class _TensorParallel(Strategy):
    """What column and row have in common: a group, whether tokens are spread over it, and what hides collectives under products."""

    def __init__(self, group: Any, sequence_parallel: bool = False, schedule: Schedule = NO_SCHEDULE) -> None:
        self.group, self.spreads_tokens = group, sequence_parallel
        self.size, self.rank = collectives.size_of(group), collectives.rank_of(group)
        self.shares_weight_amax = True
        self.schedule = schedule
        self.engine = Engine(group, schedule) if sequence_parallel and schedule.active else None
        self.handle = opaque.register(self)
        """What ops of a compiled block call this strategy."""

    def share_amax(self, amax: Tensor) -> Tensor:
        """MAX over the ranks, of each element."""
        return collectives.all_reduce_max(amax, self.group)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors concatenated along `dim`."""
        if torch.compiler.is_compiling():
            return opaque.gather_one(self.handle, x, dim)
        return collectives.all_gather(x, self.group, dim)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, on all of them."""
        return collectives.all_reduce(x.reshape(1, -1), self.group).view_as(x)

    def begin_reduce(
        self, y: Tensor, rows: list[int], bias: Tensor | None = None, bulk: bool = False
    ) -> Callable[[], Tensor]:
        """What gives the sum over ranks of y, plus bias: all tokens, or this rank's of each group with sequence parallelism.

        rows: of each group. bulk: it may travel until the function returned is called.
        """
        if not self.spreads_tokens:
            total = collectives.all_reduce(y, self.group, bias)
            return lambda: total
        begun = self.engine.begin_scatter(y, rows) if bulk and self.engine is not None else None
        if begun is not None:
            return lambda: begun(bias)
        _check_tokens(rows, self.size)
        parts = y if len(rows) == 1 else parts_of_ranks(y, rows, self.size).flatten(0, 1)
        if bulk and self.schedule.scatter_dgrad != "none":
            return collectives.begin_reduce_scatter(parts, self.group, bias)
        total = collectives.reduce_scatter(parts, self.group, bias)
        return lambda: total

    def gather_tokens(self, operand: Operand) -> Operand:
        """The operand of all ranks' tokens: bytes, and the scales where they belong to tokens."""
        if torch.compiler.is_compiling():
            return opaque.gather(self.handle, [operand])()[0]
        return self._begin_gather_one(operand)()

    def _begin_gather_one(self, operand: Operand) -> Callable[[], Operand]:
        dims = token_dims(operand)
        data = collectives.begin_all_gather(operand.data, self.group, dims.data)
        if dims.scale is None:
            return lambda: operand._replace(data=data())
        assert operand.scale_inv is not None
        scale = collectives.begin_all_gather(operand.scale_inv, self.group, dims.scale)
        return lambda: operand._replace(data=data(), scale_inv=scale())

    def begin_gather_tokens(self, operands: Operands) -> Callable[[], Operands]:
        """`gather_tokens` of each; in bulk they travel until the function returned is called."""
        if torch.compiler.is_compiling():
            return opaque.gather(self.handle, operands)
        begun = None if self.engine is None else self.engine.begin_gather(operands)
        if begun is not None:
            return begun
        if self.schedule.gather_wgrad == "none":
            return lambda: [self.gather_tokens(operand) for operand in operands]
        travelling = [self._begin_gather_one(operand) for operand in operands]
        return lambda: [arrive() for arrive in travelling]

    def replicated(self, parameter: Tensor) -> Tensor:
        """`parameter`, whose gradient is summed over the ranks."""
        return _SummedGradient.apply(parameter, self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, sequence_parallel={self.spreads_tokens})"


class Column(_TensorParallel):
    """y[M, N/tp] = x[M, K] @ w[N/tp, K].T: each rank computes some of the outputs."""

    def __init__(self, group: Any, sequence_parallel: bool = False, schedule: Schedule = NO_SCHEDULE) -> None:
        super().__init__(group, sequence_parallel, schedule)
        self.shares_input_amax = self.gathers_input = sequence_parallel
        self.shares_grad_amax = True

    def before_gemm(self, operand: Operand) -> Operand:
        """x[M, K] from x[M/tp, K] where tokens are spread."""
        return self.gather_tokens(operand) if self.spreads_tokens else operand

    def fprop(self, operands: Operands, multiply: Product, biases: list[Tensor]) -> Tensor:
        """Gathers tokens and multiplies, one under the other where there is an engine."""
        if torch.compiler.is_compiling() and self.spreads_tokens:
            return opaque.fprop(self.handle, operands, multiply, biases)
        if self.engine is not None:
            done = self.engine.gather_multiply(operands, lambda part: multiply(part, biases), multiply.features)
            if done is not None:
                return done[0]
        return multiply([self.before_gemm(operand) for operand in operands], biases)

    def dgrad(
        self, grads: Operands, multiply: Product, under: Callable[[], None] = nothing
    ) -> tuple[Callable[[], Tensor], Operands]:
        """Multiplies, and sums over ranks: meanwhile, or under what comes next."""
        under()
        if torch.compiler.is_compiling():
            rows = sum(_rows(grads))
            return opaque.dgrad(self, grads, multiply, rows // self.size if self.spreads_tokens else rows)
        if self.engine is not None and multiply.cuttable:
            begun = self.engine.multiply_scatter(grads, multiply, multiply.features, multiply.dtype, dgrad=True)
            if begun is not None:
                return lambda: begun(None), grads
        return self.begin_reduce(multiply(grads), _rows(grads), bulk=True), grads

    def before_wgrad(self, operands: Operands) -> Callable[[], Operands]:
        """Columnwise copies of all tokens, where they are spread."""
        return self.begin_gather_tokens(operands) if self.spreads_tokens else lambda: operands

    def input_parameter(self, parameter: Tensor) -> Tensor:
        """Acts on this rank's tokens only, where they are spread."""
        return self.replicated(parameter) if self.spreads_tokens else parameter

    def output_tokens(self, tokens: int) -> int:
        """Those of all ranks."""
        return tokens * self.size if self.spreads_tokens else tokens


class Row(_TensorParallel):
    """y[M, N] = sum over ranks of x[M, K/tp] @ w[N, K/tp].T: each rank has some of the inputs."""

    def __init__(self, group: Any, sequence_parallel: bool = False, schedule: Schedule = NO_SCHEDULE) -> None:
        super().__init__(group, sequence_parallel, schedule)
        self.shares_input_amax = True
        self.shares_grad_amax = self.gathers_grad = sequence_parallel

    def after_gemm(self, out: Tensor, biases: list[Tensor], rows: list[int]) -> Tensor:
        """The sum over ranks, then the bias."""
        if len(biases) <= 1:
            return self.begin_reduce(out, rows, biases[0] if biases else None)()
        return add_by_group(self.begin_reduce(out, rows)(), biases, [self.output_tokens(count) for count in rows])

    def fprop(self, operands: Operands, multiply: Product, biases: list[Tensor]) -> Tensor:
        """Multiplies and sums over ranks, one under the other where there is an engine."""
        rows = _rows(operands)
        if torch.compiler.is_compiling():
            return opaque.fprop(self.handle, operands, multiply, biases)
        if self.engine is not None:
            _check_tokens(rows, self.size)
            begun = self.engine.multiply_scatter(operands, multiply, multiply.features, multiply.dtype)
            if begun is not None and len(biases) <= 1:
                return begun(biases[0] if biases else None)
            if begun is not None:
                return add_by_group(begun(None), biases, [count // self.size for count in rows])
        return self.after_gemm(multiply(operands, []), biases, rows)

    def before_dgrad(self, grad: Operand) -> Operand:
        """dy[M, N] from dy[M/tp, N] where tokens are spread."""
        return self.gather_tokens(grad) if self.spreads_tokens else grad

    def dgrad(
        self, grads: Operands, multiply: Product, under: Callable[[], None] = nothing
    ) -> tuple[Callable[[], Tensor], Operands]:
        """Gathers tokens and multiplies, one under the other where there is an engine."""
        if torch.compiler.is_compiling() and self.spreads_tokens:
            under()
            return opaque.dgrad(self, grads, multiply, self.size * sum(_rows(grads)))
        if self.engine is not None:
            done = self.engine.gather_multiply(grads, multiply, multiply.features, under)
            if done is not None:
                dx, whole = done
                return lambda: dx, whole
        whole = [self.before_dgrad(grad) for grad in grads]
        under()
        out = multiply(whole)
        return lambda: out, whole

    def begin_columns(self, grads: Operands) -> Callable[[], Operands]:
        """Columnwise copies of all tokens' gradients, where they are spread."""
        return self.begin_gather_tokens(grads) if self.spreads_tokens else lambda: grads

    def output_parameter(self, parameter: Tensor) -> Tensor:
        """Acts on this rank's tokens only, where they are spread."""
        return self.replicated(parameter) if self.spreads_tokens else parameter

    def output_tokens(self, tokens: int) -> int:
        """This rank's."""
        return tokens // self.size if self.spreads_tokens else tokens


def _rows(operands: Operands) -> list[int]:
    return [operand.data.shape[0] for operand in operands]


def _check_tokens(rows: list[int], size: int) -> None:
    for count in rows:
        if count % size:
            raise ValueError(
                f"Sequence parallelism splits {count} tokens over {size} ranks, which do not divide them: "
                f"pad the sequence to {-(-count // size) * size} tokens."
            )


class _SummedGradient(torch.autograd.Function):
    """The identity; gradients are summed over the strategy's ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, strategy: _TensorParallel) -> Tensor:
        ctx.strategy = strategy
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return opaque.sum_over_ranks(ctx.strategy.handle, grad), None
        return ctx.strategy.sum_over_ranks(grad), None


class _Backend:
    """See `ottava.nn.strategy.Backend`."""

    strategies: dict[str, Callable[..., Strategy]] = {"column": Column, "row": Row}

    def strategy(
        self,
        mode: str,
        group: Any,
        sequence_parallel: bool,
        overlap: OverlapOptions = nn_strategy.NO_OVERLAP,
        name: str = "",
    ) -> Strategy:
        size = collectives.size_of(group)
        schedule = schedule_of(overlap, mode, name, sequence_parallel, size)
        return ALONE if size == 1 else self.strategies[mode](group, sequence_parallel, schedule)

    warn_of_idle_overlap = staticmethod(warn_of_idle_switches)

    def group_of(self, mesh: Any) -> Any:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ValueError(
                f'set_device_mesh takes one dimension of a mesh, such as mesh["tp"], got {mesh!r}: '
                "ParallelPlan(tp=2).meshes().tp is one."
            )
        return mesh.get_group()

    def distribute(self, module: nn.Module, name: str, layout: Layout, mesh: DeviceMesh, already_cut: bool) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        parameter = getattr(module, name)
        placement = Replicate() if layout.dim is None else Shard(layout.dim)
        if isinstance(parameter, DTensor):
            if parameter.device_mesh == mesh and parameter.placements == (placement,):
                return
            raise ValueError(
                f"{type(module).__name__}.{name} is sharded already, on {parameter.device_mesh}: call set_device_mesh before fully_shard."
            )
        size, rank = mesh.size(), mesh.get_local_rank()
        shape = list(parameter.shape)
        if already_cut and layout.dim is not None:
            shape[layout.dim] *= size
        own: Tensor = parameter.detach()
        if not already_cut and layout.dim is not None and size > 1:
            if isinstance(own, Weight):
                own = own.split_tensor_parallel(layout.dim, rank, size)
                own.memory.tensor_groups = (mesh.get_group(),)
            else:  # a copy: a view would keep the memory of the whole weight, and DTensors of views cannot be deep-copied
                own = layout.cut(own, rank, size).clone(memory_format=torch.contiguous_format)
        strides = torch.empty(shape, dtype=torch.float32, device="meta").stride()
        spread = DTensor.from_local(own, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides)
        replacement = nn.Parameter(spread, requires_grad=parameter.requires_grad)
        for key, value in vars(parameter).items():  # what users hang on parameters
            setattr(replacement, key, value)
        setattr(module, name, replacement)


nn_strategy.install(_Backend())


# ----------------------------------------------------------------------------------------------------------- whole models


def split_tensors(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    weight_mesh: DeviceMesh | None = None,
    *,
    sequence_parallel: bool | None = None,
    overlap: str | None = None,
    overlap_transport: str = "auto",
    overlap_minimum_tokens: int | None = None,
) -> nn.Module:
    """Splits a model of whole layers over the ranks of `tp_mesh`, in place. Every parameter becomes a DTensor on it.

    Transformer layers, attention, MLPs and the vocabulary are split; a `Linear` or `GroupedLinear` as its `parallel_mode` says.
    Other modules keep all of their parameters on every rank and run as before; where tokens are spread, only if they are not trained.
    Parameters may be on the meta device.
    sequence_parallel: True spreads the tokens between the layers over the ranks; the model's `VocabParallelEmbedding` and
    `VocabParallelHead` scatter and gather them. overlap, overlap_transport, overlap_minimum_tokens: see `ParallelPlan`.
    None leaves either as the modules were constructed.

        >>> split_tensors(model, meshes.tp, meshes.weight, sequence_parallel=True)
    """
    set_parallel_modes(model)
    if sequence_parallel is not None:
        _set_sequence_parallel(model, sequence_parallel)
    if overlap is not None:
        for module in model.modules():
            if isinstance(module, QuantizedModule):
                module.overlap = replace(
                    module.overlap,
                    method=overlap,
                    transport=overlap_transport,
                    minimum_tokens=overlap_minimum_tokens,
                )
    if tp_mesh.size() > 1 and _spreads_tokens(model):
        _refuse_own_tokens(model, "")
    _split_below(model, tp_mesh, weight_mesh, "", {})
    _warn_of_shared_masks(model, tp_mesh)
    return model


def set_parallel_modes(model: nn.Module) -> None:
    """Makes layers that were built whole ready to be split: gate and up, for one, become parameters of their own."""
    for module in model.modules():
        if hasattr(module, "set_parallel_mode"):
            module.set_parallel_mode()  # type: ignore[operator]


def _warn_of_shared_masks(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Dropout that would draw the same mask for different heads or tokens of the ranks."""
    # "fake": memory is estimated.
    if tp_mesh.size() == 1 or torch.distributed.get_backend(tp_mesh.get_group()) == "fake":
        return
    for module in model.modules():
        heads = isinstance(module, DotProductAttention) and module.attention_dropout > 0.0
        tokens = isinstance(module, TransformerLayer) and module.hidden_dropout > 0.0 and module.sequence_parallel
        if (heads or tokens) and module.get_rng_state_tracker is None:
            warn_once(
                f"ottava: {type(module).__name__} of {type(model).__name__} has dropout and no get_rng_state_tracker: tensor-parallel "
                "ranks would drop the same places of different heads and tokens. Call use_tracker(model, model_parallel_seed(seed, "
                "tp_rank, dp_rank)) before split_tensors."
            )
            return


def _split_below(
    module: nn.Module,
    tp_mesh: DeviceMesh,
    weight_mesh: DeviceMesh | None,
    path: str,
    shared: dict[nn.Parameter, nn.Parameter],
) -> None:
    """shared: whole parameters that several modules may hold, and what has become of them."""
    if hasattr(module, "set_device_mesh"):
        module.set_device_mesh(tp_mesh, weight_mesh)  # type: ignore[operator]
        return
    if any(True for _ in module.parameters(recurse=False)):
        _replicate(module, tp_mesh, path, shared)
    for name, child in module.named_children():
        _split_below(child, tp_mesh, weight_mesh, f"{path}.{name}".strip("."), shared)


def _set_sequence_parallel(model: nn.Module, on: bool) -> None:
    """Every module that can spread its tokens, or not."""
    from ottava.distributed.vocabulary import VocabParallelEmbedding

    if on and not any(isinstance(m, VocabParallelEmbedding) for m in model.modules()):
        raise ValueError(
            f"sequence_parallel=True, but {type(model).__name__} has no VocabParallelEmbedding that would spread its tokens over the "
            "ranks: use one (ottava.distributed.vocabulary), or leave sequence_parallel False."
        )
    per_head = {m for a in model.modules() if isinstance(a, MultiheadAttention) for m in (a.q_norm, a.k_norm)}
    for module in model.modules():
        options = getattr(module, "parallel", None)
        if isinstance(options, ParallelOptions):
            options.sequence_parallel = on and options.mode is not None
        elif hasattr(module, "sequence_parallel") and module not in per_head:
            module.sequence_parallel = on  # type: ignore[assignment]


def _spreads_tokens(model: nn.Module) -> bool:
    from ottava.distributed.vocabulary import VocabParallelEmbedding

    return any(isinstance(m, VocabParallelEmbedding) and m.sequence_parallel for m in model.modules())


def _refuse_own_tokens(module: nn.Module, path: str) -> None:
    """Raises for a module that would take its rank's tokens for all: its parameters' gradients would be parts that nobody sums."""
    from torch.distributed.tensor import DTensor

    knows = any(module.modes) if isinstance(module, QuantizedModule) else hasattr(module, "set_device_mesh")
    trained = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad and not isinstance(p, DTensor)]
    if trained and not knows:
        raise ValueError(
            f"sequence_parallel=True spreads tokens over the ranks, and {path or 'the model'} ({type(module).__name__}) does not know it: "
            f"each rank would train its {', '.join(trained)} by its own tokens alone. Use ottava.LayerNorm or RMSNorm, a Linear with "
            "parallel_mode, or torch's parallelize_module(..., SequenceParallel(sequence_dim=0, use_local_output=True)) before; or leave "
            "sequence_parallel False."
        )
    for name, child in () if hasattr(module, "set_device_mesh") else module.named_children():
        _refuse_own_tokens(child, f"{path}.{name}".strip("."))


def _replicate(module: nn.Module, mesh: DeviceMesh, path: str, shared: dict[nn.Parameter, nn.Parameter]) -> None:
    """All parameters on every rank; a module of torch that computes with DTensors inside and plain tensors outside."""
    from torch.distributed.tensor import DTensor, Replicate

    names = [n for n, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)]
    if not names:
        return  # somebody, such as parallelize_module, has placed them
    if any(True for _ in module.children()):
        raise ValueError(
            f"{path or type(module).__name__} holds the parameters {', '.join(names)} itself, beside other modules. Tensor parallelism "
            "needs to see where they are used: move each into a module of its own, or place them with torch's distribute_tensor."
        )
    for name in names:
        whole = getattr(module, name)
        if whole not in shared:
            _Backend().distribute(module, name, nn_strategy.REPLICATED, mesh, already_cut=False)
            shared[whole] = getattr(module, name)
        setattr(module, name, shared[whole])  # tied parameters stay tied

    def spread(x: Tensor) -> DTensor:
        return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return torch_private.map_instances(Tensor, spread, (args, kwargs))

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        return torch_private.map_instances(DTensor, lambda t: t.to_local(), output)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
