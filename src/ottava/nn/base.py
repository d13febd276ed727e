"""What all quantized modules share: parameters (split or whole), quantized weight copies, delayed-scaling state, input checks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.kernels import tally
from ottava.kernels.cast import Buffers, operand_amax
from ottava.kernels.registry import plain_functions
from ottava.nn.columnwise import WeightSource, source_of_weight
from ottava.nn.construction import ORDER
from ottava.nn.delayed_columns import DelayedTensors, cell_of
from ottava.nn.direct import direct
from ottava.nn.draw import check_local
from ottava.nn.follows_autocast import FollowsAutocast
from ottava.nn.initialize import materialize_
from ottava.nn.parallel_module import ParallelModule
from ottava.nn.saves_weights import SavesWeights
from ottava.nn.stage import Chain, Stage, StageTensors, Texts, count_into
from ottava.nn.strategy import backend, local
from ottava.notices import warn_once
from ottava.quant.delayed import DelayedState
from ottava.quant.quantization import Quantization
from ottava.quant.quantizer import FLOAT_DTYPES, check_float, check_tensor
from ottava.quant.recompute import forward_scale
from ottava.quant.scheme import Scheme
from ottava.quant.state import CURRENT
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import State, Weight
from ottava.quant.weight_parts import as_one_matrix, link_copies, one_matrix
from ottava.recipe import Recipe


def default_device(device: torch.device | str | None) -> torch.device:
    """`device` if given; else torch's default device if one was set, the GPU if there is one, the CPU."""
    if device is not None:
        return torch.device(device)
    chosen = torch.get_default_device()
    if chosen.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def feature_multiple(recipe: Recipe) -> int:
    """What the feature dimensions of a quantized GEMM must be a multiple of."""
    return Quantization.of(recipe).feature_multiple


def quantized_stage(stage: Stage, quantization: Quantization, gated_backward: bool = False) -> Stage:
    """`stage` as a recipe quantizes it. gated_backward: its output's gradient comes from a gated activation.

    Written out field by field: dynamo of torch 2.11 cannot trace `vars()` or `dataclasses.replace` of a frozen dataclass.
    """
    return Stage(
        norm=stage.norm,
        activation=stage.activation,
        input=quantization.input,
        weight=quantization.weight,
        grad=quantization.grad,
        fused_grad=quantization.gated_grad if gated_backward else quantization.grad,
        delayed=quantization.delayed,
        split_fprop=quantization.split_fprop,
        split_dgrad=quantization.split_dgrad,
        split_wgrad=quantization.split_wgrad,
        backward=quantization.backward,
        # A compiler would keep the live scale for the recomputation, which the update after the forward pass overwrites.
        recompute=stage.recompute and not (quantization.delayed and torch.compiler.is_compiling()),
        return_norm=stage.return_norm,
        output_parts=stage.output_parts,
        gather_norm=stage.gather_norm,
        two_copies=quantization.weight.two_copies,
        texts=None if torch.compiler.is_compiling() else _texts(quantization, gated_backward),
        strategy=stage.strategy,
    )


def _texts(quantization: Quantization, gated_backward: bool) -> Texts:
    fused = quantization.gated_grad if gated_backward else quantization.grad
    return Texts(str(quantization.input), str(quantization.weight), str(quantization.grad), str(fused))


class _KeptChain(NamedTuple):
    """The chain of a module's last forward, and what it was made from."""

    recipe: Recipe | None
    delayed: bool
    key: tuple
    chain: Chain


class QuantizedModule(FollowsAutocast, SavesWeights, ParallelModule):
    """Base of the modules that multiply by weights: `Linear`, `LayerNormLinear`, `LayerNormMLP`, `GroupedLinear`."""

    _gated_stages: tuple[bool, ...] = (False,)
    """For each stage, whether its output goes through a gated activation."""
    groups = 1
    """Stages that run side by side, on groups of rows (see `Chain`)."""
    stage_names: tuple[str, ...] = ("",)
    """What is put before "input", "weight" and "grad" to name the operands of each stage."""
    tally = 0
    """See `Chain.tally`."""
    handed: dict[str, Any] | None = None
    """What a compiled forward takes instead of its weights: [Note: handed weights] in `traced_weights.py`."""

    def __init__(self, stages: int, device: torch.device, params_dtype: torch.dtype | None, name: str | None) -> None:
        super().__init__(stages)
        self.name = name
        self.params_dtype = params_dtype or torch.get_default_dtype()
        if self.params_dtype not in FLOAT_DTYPES:
            raise ValueError(f"params_dtype must be float32, bfloat16 or float16, got {self.params_dtype}.")
        self.device_at_init = device
        self._number = ORDER.number()
        self.delayed = DelayedState(stages, device=device)
        self._weight_cache: dict[int, QuantizedTensor] = {}
        self._remember_init()
        self._last_context = {}
        self._last_chain: _KeptChain | None = None
        self.wgrad_accumulation = False

    def __getstate__(self) -> dict[str, Any]:
        # What refers to this process or to this module's own state is found again by the next forward.
        return {**self.__dict__, "_last_chain": None, "_last_context": {}}

    def _replicate_for_data_parallel(self) -> Any:
        # Its replicas share what a module remembers (`_weight_cache`, chains), and what they record of delayed scaling is thrown away.
        raise ValueError(
            f"{self._who()} cannot be replicated by torch.nn.DataParallel: use DistributedDataParallel, a process a GPU."
        )

    # --------------------------------------------------------------------------------------------------------- parameters

    def leave_meta(self) -> bool:
        """Gives parameters on the meta device memory and first values, also where they are shards; whether there were any.

        For scripts that build on the meta device, shard, and then call every module's `reset_parameters`. Numbers are drawn by the
        order in which modules were constructed (`construction.py`), and so are equal on every mesh; `materialize_` draws by name.
        """
        if not any(p.is_meta for p in self.parameters()):
            return False
        materialize_(self, torch.initial_seed(), prefix=f"{self.name or type(self).__name__}#{self._number}")
        return True

    def joined(self, names: list[str]) -> Tensor:
        """The parameters as one tensor: themselves, a view over their common memory, or a concatenation."""
        if self.handed is not None and names[0] in self.handed and torch.compiler.is_compiling():
            return self.handed[names[0]].leaf
        if len(names) == 1:
            one = self._parameters.get(names[0])  # past `__getattr__`, which is Python
            return one if type(one) is nn.Parameter else local(getattr(self, names[0]))
        traced = torch.compiler.is_compiling() or torch_private.is_tracing()
        if not traced:
            plain = [self._parameters.get(name) for name in names]
            if all(map(_is_plain, plain)):
                return _join(plain)
        tensors: list[Any] = [local(getattr(self, name)) for name in names]
        if traced:
            self._refuse_export(names[0], tensors[0])
        if one_matrix(tensors) or (not traced and link_copies(tensors)):
            return as_one_matrix(tensors)
        if any(map(_is_stored, tensors)):
            # Somebody has put parts of several matrices together, or values in the place of one.
            return torch.cat([t.dequantize() if _is_stored(t) else t for t in tensors])
        return torch.cat(tensors) if traced else _join(tensors)

    def _refuse_export(self, name: str, weight: Any) -> None:
        if torch_private.is_exporting() and isinstance(weight, QuantizedTensor):
            raise ValueError(
                f"{self.describe(name)} is stored in FP8, which torch.export cannot hold: load the state dict into a module that is made "
                "without quantized_model_init, and export that one; its forward quantizes as the recipe says."
            )

    def returned_bias(self, bias: Tensor | None) -> Tensor | None:
        """The bias, for whoever called the module to add. FSDP may free its memory as soon as the module has returned: then a copy."""
        return bias.clone() if bias is not None and torch_private.is_fsdp_managed(self) else bias

    # ------------------------------------------------------------------------------------------------- delayed-scaling state

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """TransformerEngine's name for the delayed-scaling state: keys "scaling_fwd", "scaling_bwd", "recipe"."""
        view: dict[str, Any] = {key: self.delayed.view(key) for key in ("scaling_fwd", "scaling_bwd")}
        view["recipe"] = self.delayed.recipe
        return view

    # ------------------------------------------------------------------------------------------------------------- forward

    def check_input(self, x: Tensor, features: int, weight: Tensor) -> Tensor:
        """Checks dtype, device and last dimension; returns x in the dtype of `torch.autocast` if that is on, its features side by side: on
        a CPU the order of a sum over them would follow their strides."""
        if not isinstance(x, Tensor) or x.shape[-1] != features or x.device != weight.device:
            self._refuse_input(x, features, weight)
        if type(x) is not Tensor:
            check_local(x, f"The input of {self._who()}")
        if x.dtype not in FLOAT_DTYPES:
            check_float(x, f"The input of {self._who()}")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x if x.stride(-1) == 1 else x.contiguous()

    def check_residual(self, residual: Tensor | None, x: Tensor) -> Tensor | None:
        """What is added to x, the checked input, as rows [M, K] in its dtype."""
        if residual is None:
            return None
        if residual.shape != x.shape or residual.device != x.device:
            raise ValueError(
                f"The residual of {self._who()} must be like its input, {tuple(x.shape)} on {x.device}; got {tuple(residual.shape)} on "
                f"{residual.device}."
            )
        check_float(residual, f"The residual of {self._who()}")
        return residual.to(x.dtype).reshape(-1, x.shape[-1])

    def _who(self) -> str:
        return type(self).__name__ if self.name is None else f"{type(self).__name__} {self.name!r}"

    def _refuse_input(self, x: Any, features: int, weight: Tensor) -> None:
        who = self._who()
        check_tensor(x, f"The input of {who}")
        if x.shape[-1] != features:
            raise ValueError(f"{who} expects a last dimension of {features}, got an input of shape {tuple(x.shape)}.")
        raise ValueError(
            f"{who} is on {weight.device} but its input is on {x.device}: move the input with .to({str(weight.device)!r}), "
            f"or the module with .to({str(x.device)!r})."
        )

    def check_features(self, **sizes: int) -> None:
        """Raises if a feature dimension cannot be quantized by the recipe in force."""
        recipe = CURRENT.recipe
        if recipe is None or CURRENT.calibrating or self.unquantized:
            return
        quantization = Quantization.of(recipe)
        multiple = quantization.feature_multiple
        for name, size in sizes.items():
            if size % multiple:
                raise ValueError(
                    f"{type(self).__name__}: {name}={size} must be a multiple of {multiple} to run with {quantization.name}; "
                    f"the next one is {math.ceil(size / multiple) * multiple}. Pad it, or run this module with autocast(enabled=False)."
                )

    def prepare(self, key: tuple, stages: Callable[[], list[Stage]]) -> tuple[Chain, Tensor | None]:
        """Resolves `autocast` into a chain, and the forward scales where delayed scaling is on.

        stages: makes the module's stages, for which `key` has everything that they are made from.
        """
        compiling = torch.compiler.is_compiling()
        if compiling or self.unquantized or CURRENT.depth == 0:
            recipe, calibrating, group = self._context(compiling)
        else:  # the usual case of `_context`
            recipe, calibrating, group = now = (CURRENT.recipe, CURRENT.calibrating, CURRENT.group)
            self._last_context[torch.is_grad_enabled()] = now
        # Building the chain takes longer than launching a kernel: keep the last one. Recipes are frozen: the same object is the same.
        last = None if compiling else self._last_chain
        if last is not None and last.recipe is recipe:
            delayed = last.delayed
        else:
            delayed, last = recipe is not None and Quantization.of(recipe).delayed, None
        state: Any = self._modules["delayed"]  # past `__getattr__`, which is Python
        scale, record = forward_scale(state, compiling) if delayed else (None, False)
        if last is None or last.key != (calibrating, record, key):
            chain = self._resolve(stages(), recipe, calibrating, record)
            if not compiling:
                self._last_chain = _KeptChain(recipe, delayed, (calibrating, record, key), chain)
        else:
            chain = last.chain
        if record and not (compiling and self.handed is not None):  # whoever handed the weights has marked it
            state.mark_for_update(recipe, group, compiling)
        return chain, scale

    def _resolve(self, stages: list[Stage], recipe: Recipe | None, calibrating: bool, record: bool) -> Chain:
        if not torch.compiler.is_compiling():
            name, spread = type(self).__name__, self.parallel.sequence_parallel
            backend().warn_of_idle_overlap(name, self.overlap, self.modes, spread, self.parallel.size)
        if recipe is not None:
            quantization = Quantization.of(recipe)
            _check_shared_scales(quantization, stages)
            if not calibrating:
                stages = [
                    quantized_stage(stage, quantization, gated)
                    for stage, gated in zip(stages, self._gated_stages, strict=True)
                ]
        described, calibrate = tuple(stages), calibrating and record
        compiling = torch.compiler.is_compiling()
        straight = not (calibrate or compiling) and direct(described, self.groups)
        # An id in the compiled code would make it this module's alone.
        shared = compiling and (self.handed is not None or not any(stage.delayed for stage in stages))
        owner = 0 if shared else self.delayed.id
        slots = 0 if compiling else self.tally
        return Chain(described, record, calibrate, owner, self.groups, straight, slots)

    def count_from(self, slot: int) -> int:
        """Counts what is not finite from `slot` on (see `Chain.tally`); returns the first slot after those of this module."""
        self.tally, self._last_chain = slot, None
        return slot + len(tally.OPERANDS) * self.delayed.stages

    def state(self, scale: Tensor | None) -> DelayedTensors | None:
        """What `run_chain` takes as its state."""
        if scale is None:
            return None
        live = self._modules["delayed"]._buffers  # type: ignore[union-attr]
        forward, backward = live["fwd_amax_history"], live["bwd_amax_history"]
        if torch_private.PIPELINE_STAGES in sys.modules and torch_private.tries_pipeline_stage():
            forward, backward = forward.clone(), backward.clone()  # type: ignore[union-attr]  # its numbers mean nothing
        return DelayedTensors(scale, forward, live["bwd_scale"], backward)

    def stage_tensors(
        self,
        chain: Chain,
        index: int,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        is_first_microbatch: bool | None,
        gamma: Tensor | None = None,
        beta: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> StageTensors:
        """The tensors of stage `index`: quantizes its weight, or takes the copy cached by an earlier microbatch."""
        stage = chain.stages[index]
        if torch_private.is_exporting():
            self._refuse_export(self.gemm_weights[index][0], weight)
        if stage.weight is None:
            values = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            values = values if dtype is None or values.dtype == dtype else values.to(dtype)
            return StageTensors(gamma, beta, values, bias, None, None, None, None, None, None)
        operands = self._weight_operands(chain, index, weight, scale, is_first_microbatch)
        return StageTensors(gamma, beta, weight, bias, *operands)

    def _weight_operands(
        self, chain: Chain, index: int, weight: Tensor, scale: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Any, ...]:
        """(data, scale_inv, amax) rowwise, then columnwise (Nones if no backward will need it), and what backward makes the latter from."""
        stage = chain.stages[index]
        assert stage.weight is not None
        if self.handed is not None and torch.compiler.is_compiling():
            return self.handed[self.gemm_weights[index][0]].operands
        stored = weight if isinstance(weight, QuantizedTensor) else None
        remedy = "use the recipe that quantized_model_init was given"
        if is_first_microbatch is False and stored is None:
            stored, remedy = self._weight_cache.get(index), "pass is_first_microbatch=True to quantize again"
            if stored is None:
                raise ValueError(
                    "is_first_microbatch=False, but no earlier call had is_first_microbatch=True: no quantized weight is cached."
                )
        if stored is not None:
            self._check_same_scheme(stored, stage.weight, remedy)
            return operands_of(stored)
        if self.quantized_init is not None and not torch.compiler.is_compiling():
            warn_once(
                f"ottava: {self._who()} was made inside quantized_model_init, but a weight of it is a plain tensor now: every forward "
                "quantizes it, and it takes the memory of its dtype. (FSDP1 makes it so, and parametrizations; FSDP2 keeps the bytes.)"
            )
        # A copy that is kept may serve a later forward that does have a backward. Bytes that can be transposed are, by that backward.
        wanted = stage.backward == "quantized" and (torch.is_grad_enabled() or bool(is_first_microbatch))
        weight_scale = scale.narrow(0, 3 * index + 1, 1) if stage.delayed else None  # type: ignore[union-attr]
        if weight.dtype not in FLOAT_DTYPES:
            check_float(weight, self.describe("weight"))
        scheme = str(stage.weight) if stage.texts is None else stage.texts.weight
        amax = shared_weight_amax(stage, weight) if stage.strategy.shares_weight_amax and not stage.delayed else None
        detached = weight.detach()
        source: WeightSource | None = None
        if wanted and is_first_microbatch is None and stage.texts is not None:
            if type(weight) is nn.Parameter and not weight.is_inference():
                source = (detached, (weight,), (weight._version,))  # what `source_of_weight` finds
            else:
                owners = [self._parameters.get(name) for name in self.gemm_weights[index]]
                source = source_of_weight(weight, detached, owners)
        columnwise = wanted and source is None and stage.two_copies
        ops = torch.ops.ottava if stage.texts is None else plain_functions(weight)
        if chain.tally:
            count_into(chain, index, 1)
        cell = None
        records = stage.delayed and chain.record
        if records:
            history = self._modules["delayed"]._buffers["fwd_amax_history"]  # type: ignore[union-attr]  # past `__getattr__`
            if not is_first_microbatch:  # what is kept has an amax of its own
                cell = cell_of(ops, history, 3 * index + 1)  # type: ignore[arg-type]
        made = ops.quantize(detached, scheme, weight_scale, amax if cell is None else cell, True, columnwise)
        row, row_scale, column, column_scale, row_amax, column_amax = made
        if records and row_amax is not cell:
            ops.record_amax_(history, row_amax, 3 * index + 1, 0)
        if is_first_microbatch:
            self._weight_cache[index] = QuantizedTensor.from_buffers(
                Buffers(*made), stage.weight, weight.shape, weight.dtype, True, columnwise
            )
        if source is not None:
            if amax is None and stage.weight.block is None and not stage.delayed:  # `per_tensor`, which is a call
                amax = row_amax
            return row, row_scale, row_amax, None, None, amax, source
        columns = (column, column_scale, column_amax) if columnwise else (None, None, None)
        return row, row_scale, row_amax, *columns

    def _check_same_scheme(self, stored: QuantizedTensor, wanted: Scheme, remedy: str) -> None:
        if not stored.scheme.same_bytes(wanted):
            raise ValueError(
                f"{type(self).__name__} holds its weight as {stored.scheme}, but the recipe of this autocast needs {wanted}: {remedy}."
            )

    def accumulator(self, names: list[str]) -> Callable[[Tensor], None] | None:
        """Adds a float32 weight gradient into `main_grad` of the parameters, if the module was asked to."""
        if not self.wgrad_accumulation:
            return None
        parameters = [getattr(self, name) for name in names]
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return None  # there will be no gradient to add
        if any(isinstance(p, Weight) and p.state is State.GATHERED for p in parameters):
            # Adding them into `main_grad` would leave out the other ranks'.
            warn_once(
                f"ottava: {type(self).__name__}: fuse_wgrad_accumulation=True has no effect on weights that FSDP2 shards: FSDP2 sums their "
                "gradients over ranks, into `grad` of the sharded parameters."
            )
            return None
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.requires_grad and getattr(parameter, "main_grad", None) is None:
                raise ValueError(
                    f"fuse_wgrad_accumulation=True needs {self.describe(name)}.main_grad: give it a float32 tensor of the weight's shape."
                )

        def add(wgrad: Tensor) -> None:
            for parameter, part in zip(parameters, wgrad.split([local(p).shape[0] for p in parameters]), strict=True):
                if parameter.requires_grad:
                    parameter.main_grad.add_(part)
                    parameter.grad_added_to_main_grad = True

        return add

    def quantization_repr(self) -> str:
        """What `extra_repr` says about quantization: the scheme of stored weights, or that of the recipe in force."""
        if self.unquantized:
            return "unquantized"
        stored = list(self.stored_weights().values())
        if stored:
            return f"weights stored as {stored[0].scheme}"
        recipe = CURRENT.recipe
        if recipe is None:
            return "quantized by autocast"
        return str(Quantization.of(recipe))


def leave_unquantized(module: nn.Module) -> nn.Module:
    """Makes every module in `module` multiply unquantized, also inside of `autocast`; returns it.

    For layers that a recipe does not suit, such as the last ones under NVFP4. Unlike an inner `autocast(enabled=False)` it is known
    to what shards the model: FSDP2 gathers these weights as they are, not as FP8 bytes. To be called before the model is sharded.

        >>> for layer in model.layers[-2:]:
        ...     ottava.leave_unquantized(layer)
    """
    for child in module.modules():
        if not isinstance(child, FollowsAutocast):
            continue
        if isinstance(child, QuantizedModule) and child.stored_weights():
            raise ValueError(
                f"{child.describe('weight')} is stored in FP8: build what shall stay unquantized outside of quantized_model_init."
            )
        child.unquantized = True
    return module


def shared_weight_amax(stage: Stage, weight: Tensor) -> Tensor | None:
    """The amax over all parts of a weight whose scale depends on it; None if this rank has the whole weight, or blocks suffice."""
    assert stage.weight is not None
    if not stage.strategy.shares_weight_amax or not stage.weight.needs_tensor_amax:
        return None
    return stage.strategy.share_amax(operand_amax(weight.detach(), stage.weight))


def _check_shared_scales(quantization: Quantization, stages: list[Stage]) -> None:
    """Bytes of spread tokens are gathered and multiplied as one tensor: their ranks must have the same scale."""
    if not quantization.shares_scales and any(stage.strategy.spreads_tokens for stage in stages):
        raise ValueError(
            "DelayedScaling(reduce_amax=False) gives every rank scales of its own, but sequence_parallel=True gathers FP8 tokens of "
            "all tensor-parallel ranks into one tensor, with one scale: use reduce_amax=True."
        )


def operands_of(q: QuantizedTensor) -> tuple[Tensor | None, ...]:
    """(data, scale_inv, amax) rowwise, then columnwise (Nones where backward transposes)."""
    columnwise = q.operand("columnwise") if q.has_columnwise else (None, None, None)
    return *q.operand("rowwise"), *columnwise


def _plain_rows(tensor: Any) -> Tensor:
    """The values of a weight that was gathered in high precision; other tensors as they are."""
    return tensor.master if isinstance(tensor, Weight) and tensor.master is not None else tensor


def _adjacent(tensors: list[Tensor]) -> bool:
    """Whether the tensors are adjacent in one storage, in this order."""
    if type(tensors[0]) is not nn.Parameter:
        tensors = [_plain_rows(tensor) for tensor in tensors]
        if torch_private.is_fake(tensors[0]):
            return False
    first = tensors[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if (
            not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != offset
        ):
            return False
        offset += tensor.numel()
    return True


class _JoinAdjacent(torch.autograd.Function):
    """Concatenates adjacent tensors along the first dimension without a copy."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.rows = [t.shape[0] for t in tensors]
        ctx.set_materialize_grads(False)  # no gradient comes where it went into main_grad
        first = _plain_rows(tensors[0])
        shape = (sum(ctx.rows), *first.shape[1:])
        joined = first.new_empty(0)
        return joined.set_(first.untyped_storage(), first.storage_offset(), shape)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None,) * len(ctx.rows) if grad is None else grad.split(ctx.rows)


_BARE_JOIN = torch_private.bare_apply(_JoinAdjacent)


def _is_stored(tensor: Any) -> bool:
    return isinstance(tensor, QuantizedTensor) and tensor.stored_quantized


def _is_plain(parameter: Any) -> bool:
    return type(parameter) is nn.Parameter


def _join(tensors: list[Any]) -> Tensor:
    """The tensors one under the other; a view where they lie so."""
    if not _adjacent(tensors):
        return torch.cat(tensors)
    return (_JoinAdjacent.apply if torch_private.transforms_active() else _BARE_JOIN)(*tensors)
