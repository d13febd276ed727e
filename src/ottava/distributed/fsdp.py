"""FSDP2 with FP8 on the wire: torch's `fully_shard`, where the weights of Ottava's modules are gathered as bytes.

The sharded parameter is the float32 (or bf16) master: any optimizer works on it and checkpoints hold it. Its FP8 copy is renewed
once a step, with one or two MAX all-reduces for the whole model. A model that was built inside
`quantized_model_init` has FP8 bytes as its parameters instead, and its masters in `optimizers.FusedAdam`, which renews the bytes.

    shard_model(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with ottava.autocast(recipe=recipe):
        loss = model(x)                          # the first forward says what travels: bytes of this recipe
    loss.backward()
    optimizer.step()                             # the next forward renews the FP8 copies first

    sharded_weight.py   the parameter        wire_copy.py   its FP8 copy, and what travels
    stored_shard.py     the same without a master          gathered.py   what comes out of the all-gather
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ottava import torch_private
from ottava.distributed.collectives import FixedOrderReduceScatter
from ottava.distributed.recompute import layers_of
from ottava.distributed.sharded_weight import ShardedWeight
from ottava.distributed.stored_shard import StoredShard
from ottava.distributed.wire_copy import Joint, WireCopy, renew_copies
from ottava.nn import GroupedLinear, LayerNormMLP
from ottava.nn.base import QuantizedModule, feature_multiple
from ottava.notices import warn_once
from ottava.quant.delayed import DelayedState
from ottava.quant.scheme import Scheme
from ottava.quant.state import CURRENT
from ottava.quant.tensor import QuantizedTensor
from ottava.recipe import DelayedScaling, Recipe

__all__ = ["attach", "refresh", "shard_model"]


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    recipe: Recipe | None = None,
    *,
    weight_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    blocks: Iterable[nn.Module] | None = None,
    recomputed: Iterable[nn.Module] = (),
) -> nn.Module:
    """Shards `model` with torch's `fully_shard`, block by block and the root last; quantized weights travel as FP8 bytes.

    Works in place and returns the model. Every rank has to call it. Norms and biases stay as they are; outside `autocast` the
    gathered weights are dequantized.

    mesh: one dimension to shard over, or (replicate, shard) for HSDP.
    recipe: that of the `autocast` the model will train under. None: the model takes it from its first forward inside `autocast`;
        before, and outside of one, weights are gathered in the precision of `mp_policy`.
    weight_mesh: the ranks that hold parts of one weight and share its scale, `ParallelPlan(...).meshes().weight`; needed where
        parameters are DTensors of a tensor-parallel mesh. By default those that `mesh` shards over.
    reshard_after_forward: whether gathered weights are freed after forward. Weights with 1-D blocks (MXFP8,
        Float8BlockScaling(w_block_scaling_dim=1), NVFP4 without 2-D blocks) always are: forward gathers their rowwise bytes, which
        backward cannot use, and backward their columnwise ones. Do not call set_reshard_after_forward(False) on them.
    mp_policy, offload_policy: as `fully_shard` takes them.
    blocks: the modules that are gathered one at a time; by default the `TransformerLayer`s, or what `ModuleList`s and
        `Sequential`s hold where there are none.
    recomputed: modules whose forward runs again in backward (activation checkpointing). 1-D blocks are gathered in both
        directions there, at about the bytes of bf16; other weights are gathered as always.

        >>> meshes = ParallelPlan(tp=2).meshes()
        >>> policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        >>> shard_model(model, meshes.dp, weight_mesh=meshes.weight, mp_policy=policy)
    """
    _check_meshes(model, mesh, weight_mesh)
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward must be True or False, got {reshard_after_forward!r}: torch cannot reshard weights that are "
            "gathered as FP8 to a smaller group."
        )
    if recipe is not None:
        _check_recipe(model, recipe)
    chosen = layers_of(model) if blocks is None else list(blocks)
    _wrap_weights(model, mp_policy)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    for block in chosen:
        if block is not model:
            fully_shard(block, **options)
    fully_shard(model, **options)
    if mesh.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(FixedOrderReduceScatter())  # type: ignore[arg-type]
    _bind(model, mesh, weight_mesh, recomputed)
    wire = _Wire(reshard_after_forward)
    _WIRES[model] = wire
    if recipe is not None:
        wire.take_recipe(model, recipe)
    model.register_load_state_dict_post_hook(lambda module, keys: refresh(module))
    model.register_forward_pre_hook(_before_forward, prepend=True)
    if recipe is not None and not any(master.is_meta for master, _ in _weights(model)):
        refresh(model)
    return model


class _Wire:
    """What travels for one sharded model: the recipe of its bytes, and when they were made."""

    def __init__(self, reshard_after_forward: bool) -> None:
        self.reshard_after_forward = reshard_after_forward
        self.recipe: Recipe | None = None
        self.refused: Recipe | None = None
        """A recipe whose bytes cannot travel."""
        self.made_at = -1
        """`_STEPS` when the copies were renewed."""

    def take_recipe(self, model: nn.Module, recipe: Recipe) -> None:
        """Makes the weights travel as bytes of `recipe`. `refresh` has to follow."""
        scheme = _check_recipe(model, recipe)
        _set_scheme(model, recipe, scheme)
        self.recipe = recipe
        one_direction = not scheme.transposable and recipe.backward_override is None  # type: ignore[attr-defined]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                torch_private.forget_gathered(module)
                module.set_reshard_after_forward(self.reshard_after_forward or one_direction, recurse=False)


_WIRES: weakref.WeakKeyDictionary[nn.Module, _Wire] = weakref.WeakKeyDictionary()
_STEPS = [0]  # optimizer steps that have begun in this process: masters may have changed since


def _count_step(*_: Any) -> None:
    _STEPS[0] += 1


register_optimizer_step_pre_hook(_count_step)


def _before_forward(model: nn.Module, args: Any) -> None:
    """Before the root gathers anything: what `autocast` asks for now, and bytes of the masters as they are now.

    Every rank decides alike: by the recipe in force and by optimizer steps, never by looking at its own shard.
    """
    if torch.compiler.is_compiling() or torch_private.inside_backward():
        return
    wire = _WIRES[model]
    wanted = None if CURRENT.calibrating else CURRENT.recipe
    if wanted is not None and wanted not in (wire.recipe, wire.refused):
        reshard(model)
        try:
            wire.take_recipe(model, wanted)
        except ValueError as error:
            if wire.recipe is not None:
                raise
            # The modules quantize what was gathered in high precision.
            wire.refused = wanted
            warn_once(f"ottava: weights travel in high precision. {error}")
            return
        refresh(model)
    elif wire.recipe is not None and wire.made_at != _STEPS[0]:
        refresh(model)


def reshard(model: nn.Module) -> None:
    """Frees every gathered weight of the model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Renews the FP8 copy of every sharded weight from its master: one or two MAX all-reduces, then local work.

    The model's forward calls it after an optimizer has stepped, and `model.load_state_dict` when it is done; call it yourself after
    changing masters in another way. Every rank has to call it.

        >>> with torch.no_grad():
        ...     model.layers[0].weight.mul_(2)
        >>> refresh(model)
    """
    reshard(model)  # what is gathered now holds the old bytes
    for module in model.modules():
        if module in _WIRES:
            _WIRES[module].made_at = _STEPS[0]
    weights = list(_weights(model))
    for master, copy in weights:
        if master.is_meta:
            raise ValueError(f"{copy.name} is on the meta device: call model.to_empty(...) and initialize it first.")
    renew_copies(weights)


def attach(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """Makes every `optimizer.step()` end with `refresh(model)`, instead of the next forward beginning with it.

    Then a model whose parts are called one by one, not through its own forward, has fresh bytes too. Returns a handle;
    `handle.remove()` undoes it.

        >>> attach(optimizer, model)
    """
    return optimizer.register_step_post_hook(lambda *_: refresh(model))


# ------------------------------------------------------------------------------------------------------------------- pieces


class Gemm(NamedTuple):
    """The parameters that one GEMM multiplies by: several where one weight is split."""

    path: str
    module: QuantizedModule
    number: int
    """Which GEMM of the module."""
    names: list[str]

    def where(self, name: str) -> str:
        """How error messages call the parameter `name`."""
        return f"{self.path}.{name}" if self.path else name


def _gemms(model: nn.Module) -> Iterator[Gemm]:
    """Those that are quantized."""
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule) or module.plain:
            continue
        if isinstance(module, LayerNormMLP):
            groups = [["fc1_weight"], ["fc2_weight"]]
        elif isinstance(module, GroupedLinear):
            groups = [[f"weight{g}"] for g in range(module.num_gemms)]
        else:
            groups = [list(module.weight_names)]  # type: ignore[arg-type]
        for number, names in enumerate(groups):
            yield Gemm(path, module, number, names)


def _local(parameter: Any) -> Any:
    """What this rank holds of a parameter: that of a DTensor, or the parameter itself."""
    return torch_private.local_tensor(parameter) if isinstance(parameter, DTensor) else parameter


def _check_meshes(model: nn.Module, mesh: DeviceMesh, weight_mesh: DeviceMesh | None) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must be a DeviceMesh (shard) or (replicate, shard), got {mesh!r}: ParallelPlan().meshes().dp is one."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("A mesh of replicas and shards needs names: init_device_mesh(..., mesh_dim_names=(...)).")
    if weight_mesh is not None and (not isinstance(weight_mesh, DeviceMesh) or weight_mesh.ndim != 1):
        raise ValueError(
            f"weight_mesh must be a DeviceMesh of one dimension, got {weight_mesh!r}: ParallelPlan(...).meshes().weight is one."
        )
    for path, module in model.named_modules():
        children = list(module.modules())
        if isinstance(module, FSDPModule) and any(isinstance(child, QuantizedModule) for child in children):
            raise ValueError(
                f"{path or 'The model'} is sharded already: shard_model takes modules that fully_shard has not seen."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1 and weight_mesh is None:
            raise ValueError(
                f"{name} is split over {parameter.device_mesh.size()} tensor-parallel ranks, and its scale is shared with them: pass "
                "weight_mesh, the ranks of dp_shard x tp, such as ParallelPlan(...).meshes().weight."
            )


def _wire_scheme(recipe: Recipe) -> Scheme:
    """How weights are quantized, if a rank can do so with its rows."""
    scheme = Scheme.of(recipe, "weight")
    if scheme.hadamard or scheme.stochastic:
        raise ValueError(
            f"shard_model cannot quantize weights as {scheme}: a Hadamard transform mixes rows of several ranks, and stochastic "
            "rounding would differ between forward and backward. Use a recipe without them for weights."
        )
    if recipe.backward_override == "high_precision":  # type: ignore[attr-defined]
        raise ValueError(
            f"{type(recipe).__name__}(backward_override='high_precision') multiplies by the unquantized weight in backward, and "
            "shard_model gathers FP8 bytes only: use torch's own fully_shard, or backward_override='dequantized'."
        )
    return Scheme(**{**vars(scheme), "from_float32": False})


def _wrap_weights(model: nn.Module, policy: MixedPrecisionPolicy | None) -> None:
    """Puts a ShardedWeight in place of every weight; weights that are stored in FP8 stay."""
    wrapped: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for gemm in _gemms(model):
        for name in gemm.names:
            parameter = getattr(gemm.module, name)
            if isinstance(_local(parameter), QuantizedTensor):
                continue
            if parameter not in wrapped:
                wrapped[parameter] = _wrapped(parameter, gemm.where(name), policy)
                wrapped[wrapped[parameter]] = wrapped[parameter]
            setattr(gemm.module, name, wrapped[parameter])
    for module in {id(gemm.module): gemm.module for gemm in _gemms(model)}.values():
        module.register_state_dict_post_hook(_plain_state)


def _wrapped(parameter: nn.Parameter, where: str, policy: MixedPrecisionPolicy | None) -> nn.Parameter:
    local = _local(parameter).detach().contiguous()
    copy = WireCopy(where, None, tuple(local.shape))
    copy.plain_dtype = None if policy is None else policy.param_dtype
    weight: Tensor = ShardedWeight(local, copy)
    if isinstance(parameter, DTensor):
        weight = DTensor.from_local(
            weight,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(weight, requires_grad=parameter.requires_grad)


def _check_recipe(model: nn.Module, recipe: Recipe) -> Scheme:
    """The scheme of the weights. Raises, by name, if a weight or its parts cannot be quantized as one process would."""
    scheme = _wire_scheme(recipe)
    for gemm in _gemms(model):
        _check_split(gemm, recipe, scheme)
        for name in gemm.names:
            _check_weight(_local(getattr(gemm.module, name)), gemm.where(name), recipe, scheme)
    return scheme


def _shape(local: Any) -> tuple[int, ...]:
    """Of what FSDP gathers: the weight, or this rank's tensor-parallel part of it."""
    return tuple(local.copy.shape if isinstance(local, ShardedWeight | StoredShard) else local.shape)


def _check_weight(local: Any, where: str, recipe: Recipe, scheme: Scheme) -> None:
    if _is_stored(local):
        if (local.scheme.format, local.scheme.block) != (scheme.format, scheme.block):
            raise ValueError(
                f"{where} is stored as {local.scheme}, but {type(recipe).__name__} multiplies by {scheme}: give shard_model the recipe "
                "that quantized_model_init had."
            )
        return
    multiple, shape = feature_multiple(recipe), _shape(local)
    if shape[0] % multiple or shape[1] % multiple:
        raise ValueError(
            f"{where} of shape {shape} cannot be multiplied by {type(recipe).__name__}: both sizes must be "
            f"multiples of {multiple}."
        )


def _is_stored(local: Any) -> bool:
    """Whether the parameter is FP8 bytes, whole or sharded."""
    return isinstance(local, QuantizedTensor | StoredShard)


def _rows_of_a_part(recipe: Recipe, scheme: Scheme) -> int:
    """What the rows of each part of a split weight must be a multiple of, for its bytes to be those of the one matrix."""
    if scheme.block is None:
        return 1
    return scheme.block[0] if recipe.backward_override is not None else max(scheme.block)  # type: ignore[attr-defined]


def _check_split(gemm: Gemm, recipe: Recipe, scheme: Scheme) -> None:
    """A weight in several parameters is multiplied as one: its bytes have to be those of the one matrix."""
    locals_ = [_local(getattr(gemm.module, name)) for name in gemm.names]
    multiple = _rows_of_a_part(recipe, scheme)
    if len(locals_) == 1 or _is_stored(locals_[0]) or not any(_shape(w)[0] % multiple for w in locals_):
        return
    sizes = ", ".join(f"{name} {_shape(local)}" for name, local in zip(gemm.names, locals_, strict=True))
    raise ValueError(
        f"{gemm.path or type(gemm.module).__name__} splits its weight into {sizes}, which {type(recipe).__name__} quantizes as one "
        f"matrix in blocks of {multiple} rows: shard_model cannot put FP8 parts of it together. Build it with one fused weight "
        f"(fuse_qkv_params=True, or no parameters_split), or with rows in multiples of {multiple}."
    )


def _weights(model: nn.Module) -> Iterator[tuple[Tensor, WireCopy]]:
    """(master, copy) of every sharded weight that has a master, in the same order on all ranks."""
    for parameter in model.parameters():
        local = _local(parameter)
        if isinstance(local, ShardedWeight):
            yield local.master, local.copy


def _bind(model: nn.Module, mesh: DeviceMesh, weight_mesh: DeviceMesh | None, recomputed: Iterable[nn.Module]) -> None:
    """Tells every copy where its rows lie and with whom it shares scales."""
    shard = mesh.ndim - 1
    again = {id(module) for root in recomputed for module in root.modules()}
    bound: set[int] = set()  # the copy of a tied weight belongs to the first module that has it
    for gemm in _gemms(model):
        for name in gemm.names:
            copy = _local(getattr(gemm.module, name)).copy
            if id(copy) not in bound:
                copy.name, copy.gathers_both = gemm.where(name), False
                weight_group = None if weight_mesh is None else weight_mesh.get_group()
                copy.bind(
                    mesh.get_local_rank(shard), mesh.size(shard), mesh.get_group(shard), weight_group, mesh.device_type
                )
            copy.gathers_both |= id(gemm.module) in again
            bound.add(id(copy))


def _set_scheme(model: nn.Module, recipe: Recipe, scheme: Scheme) -> None:
    """Tells every copy how its bytes are made, and what it is multiplied together with. Stored weights have their scheme."""
    done: set[int] = set()  # the copy of a tied weight belongs to the first module that has it
    for gemm in _gemms(model):
        locals_ = [_local(getattr(gemm.module, name)) for name in gemm.names]
        copies = [local.copy for local in locals_]
        for local in locals_:
            if isinstance(local, ShardedWeight) and id(local.copy) not in done:
                local.copy.set_scheme(scheme, recipe.backward_override is None)  # type: ignore[attr-defined]
        if id(copies[0]) not in done and _shares_scales(locals_, recipe):
            state: DelayedState | None = gemm.module.delayed if isinstance(recipe, DelayedScaling) else None
            joint = Joint(copies, None if isinstance(locals_[0], StoredShard) else state, 3 * gemm.number + 1)
            for copy in copies:
                copy.joint = joint
        done.update(map(id, copies))


def _shares_scales(parts: list[ShardedWeight | StoredShard], recipe: Recipe) -> bool:
    """Whether the parts of a weight are quantized as one matrix. Stored parts have a scale of the tensor each, as they were made."""
    if isinstance(parts[0], ShardedWeight):
        return True
    scheme, multiple = parts[0].copy.scheme, _rows_of_a_part(recipe, parts[0].copy.scheme)
    return len(parts) > 1 and scheme.kind in ("block", "mx") and all(p.copy.shape[0] % multiple == 0 for p in parts)


def _plain_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict holds the masters as plain tensors (DTensors of them), sharing their memory."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(value, nn.Parameter) or not isinstance(value, DTensor):
            continue  # keep_vars=True asks for the parameter itself
        # The parameter's own tensor, not that of `value`, which is a detached alias: its version would not show a write.
        local = torch_private.local_tensor(parameter if isinstance(parameter, DTensor) else value)
        if isinstance(local, ShardedWeight):
            state[prefix + name] = DTensor.from_local(
                local.master,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
