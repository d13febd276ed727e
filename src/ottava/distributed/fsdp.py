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

The parameters are `quant.weight.Weight`s: `quant.weight_state` says what a rank holds ([Note: states of a weight]), `quant.weight_gather`
what travels.
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
from ottava.distributed.recompute import layers_of
from ottava.nn.base import QuantizedModule
from ottava.nn.precision import multiply_in
from ottava.nn.strategy import like_dtensor
from ottava.notices import warn_once
from ottava.overlap.collectives import FixedOrderReduceScatter
from ottava.quant.quantization import Quantization
from ottava.quant.scheme import Scheme, weight_scheme
from ottava.quant.state import CURRENT
from ottava.quant.weight import Weight
from ottava.quant.weight_parts import join_parts
from ottava.quant.weight_renew import renew
from ottava.quant.weight_state import fresh, note_made
from ottava.recipe import Recipe

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
    _give_masters(model, mp_policy)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    for block in chosen:
        if block is not model:
            fully_shard(block, **options)
    fully_shard(model, **options)
    if mesh.device_type == "cpu" and torch.distributed.get_backend(mesh.get_group(mesh.ndim - 1)) != "fake":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(FixedOrderReduceScatter())  # type: ignore[arg-type]
    _bind(model, mesh, weight_mesh, recomputed)
    return _follow(model, recipe, GatherPlan(reshard_after_forward))


def keep_whole(
    model: nn.Module, mesh: DeviceMesh, recipe: Recipe | None, weight_mesh: DeviceMesh | None, dtype: torch.dtype | None
) -> nn.Module:
    """What `shard_model` does, for one rank that has the whole model: FP8 copies once a step, products in `dtype`.

    Nothing is gathered, copied or reduced, and gradients are made in the type in which they are kept. Works in place.

        >>> keep_whole(model, meshes.dp, recipe.DelayedScaling(), meshes.weight, torch.bfloat16)
    """
    _check_meshes(model, mesh, weight_mesh)
    _give_masters(model, None)
    _bind(model, mesh, weight_mesh, ())
    multiply_in(model, mesh.device_type, dtype)
    return _follow(model, recipe, GatherPlan(reshard_after_forward=False, whole=True))


def _follow(model: nn.Module, recipe: Recipe | None, wire: GatherPlan) -> nn.Module:
    """Makes bytes follow masters and `autocast`. recipe: if it is known already."""
    _PLANS[model] = wire
    if recipe is not None:
        wire.take_recipe(model, recipe)
    model.register_load_state_dict_post_hook(lambda module, keys: refresh(module))
    model.register_forward_pre_hook(before_forward, prepend=True)
    if recipe is not None and not any(weight.is_meta for weight in _mastered(model)):
        refresh(model)
    return model


class GatherPlan:
    """What travels for one sharded model: the recipe of its bytes, and when they were made."""

    def __init__(self, reshard_after_forward: bool, whole: bool = False) -> None:
        self.reshard_after_forward, self.whole = reshard_after_forward, whole
        """whole: no other rank has a part, and weights that were changed by hand are renewed. (FSDP2 refuses to gather them.)"""
        self.recipe: Recipe | None = None
        self.refused: Recipe | None = None
        """A recipe whose bytes cannot travel."""
        self.made_at = -1
        """`_STEPS` when the copies were renewed."""
        self.weights: list[Weight] = []
        """Those that were renewed then."""

    def take_recipe(self, model: nn.Module, recipe: Recipe) -> None:
        """Makes the weights travel as bytes of `recipe`. `refresh` has to follow."""
        scheme = _check_recipe(model, recipe)
        _set_scheme(model, recipe, scheme)
        self.recipe = recipe
        one_direction = scheme.two_copies and Quantization.of(recipe).backward == "quantized"
        for module in model.modules():
            if isinstance(module, FSDPModule):
                torch_private.forget_gathered(module)
                module.set_reshard_after_forward(self.reshard_after_forward or one_direction, recurse=False)


_PLANS: weakref.WeakKeyDictionary[nn.Module, GatherPlan] = weakref.WeakKeyDictionary()
_STEPS = [0]  # optimizer steps that have begun in this process: masters may have changed since


def _count_step(*_: Any) -> None:
    _STEPS[0] += 1


register_optimizer_step_pre_hook(_count_step)


def before_forward(model: nn.Module, args: Any) -> None:
    """Before the root gathers anything: what `autocast` asks for now, and bytes of the masters as they are now.

    Every rank decides alike: by the recipe in force and by optimizer steps, never by looking at its own shard.
    """
    if torch.compiler.is_compiling() or torch_private.inside_backward() or model not in _PLANS:
        return
    wire = _PLANS[model]
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
    elif wire.recipe is not None and not all(map(fresh, wire.weights)):
        # Changed by hand. Other ranks do not know: what was gathered before is freed here, and the next gather raises with the name.
        refresh(model) if wire.whole else reshard(model)


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
    weights = list(_mastered(model))
    for module in model.modules():
        if module in _PLANS:
            _PLANS[module].made_at, _PLANS[module].weights = _STEPS[0], weights
    for weight in weights:
        if weight.is_meta:
            raise ValueError(
                f"{weight.memory.name} is on the meta device: call model.to_empty(...) and initialize it first."
            )
    renew((weight.master, weight.memory) for weight in weights)  # type: ignore[misc]
    for weight in weights:
        note_made(weight)


def keeps_copies(model: nn.Module) -> bool:
    """Whether FP8 copies of the model's weights are kept from step to step: `shard_model` and `keep_whole` see to that."""
    return model in _PLANS


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

    def weights(self) -> list[Any]:
        """What this rank holds of each."""
        return [_local(getattr(self.module, name)) for name in self.names]


def _gemms(model: nn.Module) -> Iterator[Gemm]:
    """Those that are quantized, each set of parameters once."""
    seen: set[int] = set()  # a tied weight belongs to the first module that has it
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule) or module.unquantized:
            continue
        for number, names in enumerate(module.gemm_weights):
            first = getattr(module, names[0])
            if id(first) not in seen:
                seen.add(id(first))
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


def _travelling_scheme(recipe: Recipe) -> Scheme:
    """How weights are quantized, if a rank can do so with its rows."""
    scheme = weight_scheme(recipe)
    if scheme.hadamard or scheme.stochastic:
        raise ValueError(
            f"shard_model cannot quantize weights as {scheme}: a Hadamard transform mixes rows of several ranks, and stochastic "
            "rounding would differ between forward and backward. Use a recipe without them for weights."
        )
    if Quantization.of(recipe).backward == "high_precision":
        raise ValueError(
            f"{type(recipe).__name__}(backward_override='high_precision') multiplies by the unquantized weight in backward, and "
            "shard_model gathers FP8 bytes only: use torch's own fully_shard, or backward_override='dequantized'."
        )
    return scheme


def _give_masters(model: nn.Module, policy: MixedPrecisionPolicy | None) -> None:
    """Puts a Weight with a master in place of every parameter that GEMMs multiply by; weights that are stored in FP8 stay."""
    for gemm in _gemms(model):
        for name in gemm.names:
            parameter = getattr(gemm.module, name)
            if not isinstance(_local(parameter), Weight):
                replacement = _mastered_parameter(parameter, gemm, name, policy)
                _replace_everywhere(model, parameter, replacement)
        weights = gemm.weights()
        if len(weights) > 1 and weights[0].master is not None:
            join_parts(weights)
    for module in model.modules():
        if isinstance(module, QuantizedModule) and not module.unquantized:
            module.register_state_dict_post_hook(_state_of_masters)


def _replace_everywhere(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Tied weights stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(module, name, new)


def _mastered_parameter(
    parameter: nn.Parameter, gemm: Gemm, name: str, policy: MixedPrecisionPolicy | None
) -> nn.Parameter:
    local = Weight.mastered(gemm.where(name), _local(parameter).detach().contiguous())
    local.memory.gather_dtype = None if policy is None else policy.param_dtype
    weight: Tensor = local
    if isinstance(parameter, DTensor):
        local.memory.place_on(parameter.device_mesh, parameter.placements)
        weight = like_dtensor(parameter, local)
    return nn.Parameter(weight, requires_grad=parameter.requires_grad)


def _check_recipe(model: nn.Module, recipe: Recipe) -> Scheme:
    """The scheme of the weights. Raises, by name, if a weight cannot be quantized as one process would."""
    scheme = _travelling_scheme(recipe)
    for gemm in _gemms(model):
        for name, local in zip(gemm.names, gemm.weights(), strict=True):
            _check_weight(local, gemm.where(name), recipe, scheme)
    return scheme


def _check_weight(local: Any, where: str, recipe: Recipe, scheme: Scheme) -> None:
    if isinstance(local, Weight) and local.master is None:
        if not local.scheme.same_bytes(scheme):
            raise ValueError(
                f"{where} is stored as {local.scheme}, but {type(recipe).__name__} multiplies by {scheme}: give shard_model the recipe "
                "that quantized_model_init had."
            )
        return
    shape = local.memory.place.unit if isinstance(local, Weight) else tuple(local.shape)
    if any(size % scheme.feature_multiple for size in shape):
        raise ValueError(
            f"{where} of shape {tuple(shape)} cannot be multiplied by {type(recipe).__name__}: both sizes must be "
            f"multiples of {scheme.feature_multiple}."
        )


def _mastered(model: nn.Module) -> Iterator[Weight]:
    """What this rank holds of every weight that has a master, in the same order on all ranks."""
    for parameter in model.parameters():
        local = _local(parameter)
        if isinstance(local, Weight) and local.master is not None:
            yield local


def _bind(model: nn.Module, mesh: DeviceMesh, weight_mesh: DeviceMesh | None, recomputed: Iterable[nn.Module]) -> None:
    """Tells every weight with whom it shares rows and scales."""
    shard = mesh.ndim - 1
    group = (mesh.get_group(shard),) if mesh.size(shard) > 1 else ()
    again = {id(module) for root in recomputed for module in root.modules()}
    for gemm in _gemms(model):
        for name, weight in zip(gemm.names, gemm.weights(), strict=True):
            memory = weight.memory
            memory.bind(group, mesh.device_type)
            memory.weight_group = None if weight_mesh is None else weight_mesh.get_group()
            memory.name, memory.gathers_both = gemm.where(name), id(gemm.module) in again


def _set_scheme(model: nn.Module, recipe: Recipe, scheme: Scheme) -> None:
    """Tells every weight with a master how its bytes are made. Stored weights know it."""
    for gemm in _gemms(model):
        weights = gemm.weights()
        if weights[0].master is None:
            continue
        group = weights[0].memory.group
        quantization = Quantization.of(recipe)
        group.scheme, group.needs_columnwise = scheme, quantization.backward == "quantized"
        group.delayed = gemm.module.delayed if quantization.delayed else None
        group.column = 3 * gemm.number + 1
        for part in group.parts:
            part.forget_bytes()


def _state_of_masters(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict holds the masters as plain tensors (DTensors of them), sharing their memory."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(value, nn.Parameter) or value is None:
            continue  # keep_vars=True asks for the parameter itself
        # The parameter's own tensor, not that of `value`, which is a detached alias: its version would not show a write.
        local = _local(parameter if isinstance(parameter, DTensor) or not isinstance(value, DTensor) else value)
        if isinstance(local, Weight) and local.master is not None:
            state[prefix + name] = like_dtensor(value, local.master) if isinstance(value, DTensor) else local.master
