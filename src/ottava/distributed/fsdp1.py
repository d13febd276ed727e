"""Data parallelism by torch's wrappers: `FullyShardedDataParallel` (FSDP1) and `DistributedDataParallel`.

    model = shard_model_fsdp1(model, group)      # check, wrap every layer and the root, prepare
    model = ddp(model, group)

or torch's own calls in TransformerEngine's order:

    model = FullyShardedDataParallel(model, process_group=group, auto_wrap_policy=wrap_layers(model), use_orig_params=True)
    prepare_te_modules_for_fsdp(model)

FSDP1 gathers weights in high precision and every rank makes the FP8 copies itself. They are equal on all ranks, so the copies that
live longer than the gathered weight may be cut into shares over the sharding group ([Note: what is cut]).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ottava import torch_private
from ottava.distributed.recompute import layers_of, restored
from ottava.distributed.shares import Share
from ottava.nn.base import QuantizedModule
from ottava.nn.initialize import materialize_
from ottava.nn.stage import StageTensors
from ottava.quant.tensor import QuantizedTensor

__all__ = ["ddp", "param_init_fn", "prepare_te_modules_for_fsdp", "shard_model_fsdp1", "wrap_layers"]

# The strategies under which FSDP1 frees a gathered weight after forward and gathers it again in backward.
_RESHARDING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

# torch 2.13 has a new name for this argument and warns about the old one, which is all that 2.11 has.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers"


# -------------------------------------------------------------------------------------------------------------- preparation


def prepare_te_modules_for_fsdp(fsdp_root: nn.Module) -> None:
    """Tells every Ottava module below an FSDP1 unit the unit's process group. Call it once, after wrapping.

    Two things follow from the group, at any depth and also where the root wraps an Ottava module directly:

    * Delayed scaling reduces amax, and so shares scales, over all ranks that hold the same weights and see other data: the unit's
      process group, and for HYBRID_SHARD that of its replicas too; in a tensor-parallel module also its tensor-parallel group,
      whose ranks hold parts of the same tensors. `autocast(amax_reduction_group=...)` wins where it is given.
    * [Note: what is cut] Under FULL_SHARD and HYBRID_SHARD, FP8 copies of weights are kept as one share a rank of the sharding
      group and gathered when they are needed: those that wait for backward, and those that `is_first_microbatch=True` keeps for
      later microbatches. Weights are equal on the group, and so are their copies. Activations are not, and are never cut. Where
      FSDP1 keeps the gathered weight itself (SHARD_GRAD_OP, NO_SHARD), the copies stay whole too. Inside an activation
      checkpoint the copies do not wait for backward, so there is nothing to cut.

        >>> model = FullyShardedDataParallel(model, auto_wrap_policy=wrap_layers(model), use_orig_params=True)
        >>> prepare_te_modules_for_fsdp(model)
    """
    found = list(_modules_and_units(fsdp_root, None))
    if not any(isinstance(module, FullyShardedDataParallel) for module in fsdp_root.modules()):
        raise ValueError(
            f"prepare_te_modules_for_fsdp takes a model that is wrapped by FullyShardedDataParallel, got {type(fsdp_root).__name__}: "
            "wrap it first. A model that is sharded by fully_shard needs no preparation."
        )
    for module, unit in found:
        _refuse_quantized_storage(module)
        module.fsdp_group = unit.process_group  # type: ignore[assignment]
        replicas = torch_private.fsdp1_replicas(unit) if unit.sharding_strategy.name in _HYBRID else None
        data_groups = (unit.process_group,) if replicas is None else (unit.process_group, replicas)
        module.delayed.data_groups = data_groups + _tensor_parallel_group(module)
        if unit.sharding_strategy in _RESHARDING and unit.process_group.size() > 1:
            _keep_shares(module, unit.process_group)


def _modules_and_units(module: nn.Module, unit: Any) -> Iterator[tuple[QuantizedModule, Any]]:
    """Every quantized module with the innermost FSDP1 unit around it."""
    if isinstance(module, FullyShardedDataParallel):
        unit = module
    if isinstance(module, QuantizedModule) and unit is not None:
        yield module, unit
    for child in module.children():
        yield from _modules_and_units(child, unit)


def _tensor_parallel_group(module: QuantizedModule) -> tuple[Any, ...]:
    group = getattr(getattr(module, "parallel", None), "group", None)
    return (group,) if group is not None and group.size() > 1 else ()


def _refuse_quantized_storage(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            raise ValueError(
                f"{type(model).__name__}.{name} is stored in FP8 (quantized_model_init), which FSDP1 and DDP cannot flatten or "
                "reduce: build the model outside of quantized_model_init, or use fully_shard (ottava.distributed.fsdp)."
            )


# ------------------------------------------------------------------------------------------------- shares of FP8 weights


def _keep_shares(module: QuantizedModule, group: Any) -> None:
    if isinstance(module._weight_cache, SharedWeights):  # prepared before
        module._weight_cache = SharedWeights(group)
        return
    module._weight_cache = SharedWeights(group)
    module.stage_tensors = types.MethodType(_noting_operands, module)  # type: ignore[method-assign]
    module.register_forward_pre_hook(_start_saving)
    module.register_forward_hook(_stop_saving, always_call=True)


class SharedWeights(dict[int, Any]):
    """A module's FP8 weights for later microbatches, by stage, of which this rank keeps its share of `group`.

    Takes and gives `QuantizedTensor`s. Scales and amax are small and stay whole.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.addresses: set[int] = set()
        """Where the FP8 weights lie that the forward of now uses."""
        self.saving: torch.autograd.graph.saved_tensors_hooks | None = None

    def __setitem__(self, stage: int, weight: QuantizedTensor) -> None:
        parts = {n: Share(t, self.group) if n.endswith("_data") else t for n, t in weight._parts.items()}
        super().__setitem__(stage, (parts, weight.scheme, weight.shape, weight.dtype))

    def get(self, stage: int, default: Any = None) -> Any:  # type: ignore[override]
        """The whole weight: every rank of the group has to ask for it."""
        if stage not in self:
            return default
        parts, scheme, shape, dtype = super().__getitem__(stage)
        return QuantizedTensor({n: restored(t) for n, t in parts.items()}, scheme, shape, dtype)

    def __deepcopy__(self, memo: dict) -> dict:
        return {}  # a copy of the module is not prepared, and quantizes its weights anew

    def __reduce__(self) -> Any:
        return dict, ()

    def save(self, tensor: Tensor) -> Tensor | Share:
        """What autograd keeps in place of `tensor`."""
        return Share(tensor, self.group) if tensor.data_ptr() in self.addresses else tensor


def _noting_operands(self: QuantizedModule, *args: Any, **kwargs: Any) -> StageTensors:
    """Stands in for `stage_tensors`: remembers where the FP8 weights lie, so that they are known when autograd saves them."""
    tensors = type(self).stage_tensors(self, *args, **kwargs)
    cache = self._weight_cache
    if isinstance(cache, SharedWeights) and cache.saving is not None:
        cache.addresses.update(t.data_ptr() for t in (tensors.row, tensors.col) if t is not None and t.numel())
    return tensors


def _start_saving(module: nn.Module, args: Any) -> None:
    cache = module._weight_cache
    if torch.compiler.is_compiling() or not isinstance(cache, SharedWeights):
        return
    if torch_private.saved_tensor_hooks_active():  # a checkpoint: it drops the copies altogether
        return
    cache.saving = torch.autograd.graph.saved_tensors_hooks(cache.save, restored)
    cache.saving.__enter__()


def _stop_saving(module: nn.Module, args: Any, output: Any) -> None:
    cache = module._weight_cache
    if isinstance(cache, SharedWeights) and cache.saving is not None:
        cache.saving.__exit__()
        cache.saving = None
        cache.addresses.clear()


# ------------------------------------------------------------------------------------------------------------------ wrapping


def wrap_layers(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> CustomPolicy:
    """An `auto_wrap_policy` that makes each block a unit of its own, gathered and freed as one.

    blocks: by default the `TransformerLayer`s, or what `ModuleList`s and `Sequential`s hold where there are none.

        >>> FullyShardedDataParallel(model, auto_wrap_policy=wrap_layers(model), use_orig_params=True)
    """
    chosen = {id(block) for block in (layers_of(model) if blocks is None else blocks)}
    return CustomPolicy(lambda module: id(module) in chosen)


def param_init_fn(
    model: nn.Module, seed: int = 0, device: torch.device | str | None = None
) -> Callable[[nn.Module], None]:
    """A `param_init_fn` for a model on the meta device: one unit at a time gets memory and its first values.

    Values depend on the parameter's name in `model` and on `seed` alone, so the start is that of `materialize_(model, seed)` in one
    process, to the bit, whatever the number of ranks and whatever is wrapped.

        >>> FullyShardedDataParallel(model, auto_wrap_policy=wrap_layers(model), param_init_fn=param_init_fn(model, seed=1234))
    """
    names: dict[int, str] = {}
    owners: dict[int, nn.Module] = {}  # of a tied parameter the first module, after which it is named
    for name, module in model.named_modules():
        names[id(module)] = name
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), module)

    def initialize(module: nn.Module) -> None:
        if id(module) not in names:
            raise ValueError(
                f"param_init_fn met a {type(module).__name__} that is no part of the model it was made for: make it from the model "
                "that FullyShardedDataParallel wraps, after its last change."
            )
        for parameter in list(module.parameters(recurse=False)):
            owner = owners.get(id(parameter), module)
            materialize_(owner, seed, device, prefix=names[id(owner)])
        materialize_(module, seed, device, prefix=names[id(module)])

    return initialize


def shard_model_fsdp1(
    model: nn.Module,
    group: Any = None,
    *,
    strategy: ShardingStrategy | None = None,
    mixed_precision: MixedPrecision | None = None,
    use_orig_params: bool = True,
    blocks: Iterable[nn.Module] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    **options: Any,
) -> FullyShardedDataParallel:
    """Wraps each block and then `model` in torch's FullyShardedDataParallel, and prepares the modules inside.

    group: a process group to shard over (default: all ranks), a pair (shard, replicate), or a DeviceMesh (shard) or
    (replicate, shard). strategy: by default FULL_SHARD, HYBRID_SHARD where there are replicas. A model on the meta device is
    initialized unit by unit from `seed` (`param_init_fn`). device: by default the GPU if there is one, else the CPU. options: any
    other argument of FullyShardedDataParallel.

        >>> precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> model = shard_model_fsdp1(model, meshes.dp, mixed_precision=precision)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    _refuse_quantized_storage(model)
    where = _device(device)
    placed = _placement(group, strategy)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        options.setdefault("param_init_fn", param_init_fn(model, seed, where))
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=wrap_layers(model, blocks),
        mixed_precision=mixed_precision,
        use_orig_params=use_orig_params,
        device_id=where,
        **placed,
        **options,
    )
    prepare_te_modules_for_fsdp(wrapped)
    return wrapped


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _placement(group: Any, strategy: ShardingStrategy | None) -> dict[str, Any]:
    """The arguments of FullyShardedDataParallel that say who shards and who replicates."""
    mesh = isinstance(group, DeviceMesh)
    if mesh and group.ndim not in (1, 2):
        raise ValueError(f"A mesh for FSDP1 is (shard) or (replicate, shard), got {group}: ParallelPlan().meshes().dp.")
    replicas = group.ndim == 2 if mesh else isinstance(group, tuple)
    strategy = strategy or (ShardingStrategy.HYBRID_SHARD if replicas else ShardingStrategy.FULL_SHARD)
    if replicas != (strategy.name in _HYBRID):
        given = "a group of replicas" if replicas else "one group"
        raise ValueError(
            f"{strategy} was given {given}: HYBRID_SHARD takes a pair (shard, replicate) or a mesh (replicate, shard), and every "
            "other strategy one group or a mesh of one dimension."
        )
    return {"device_mesh" if mesh else "process_group": group, "sharding_strategy": strategy}


def ddp(model: nn.Module, group: Any = None, **options: Any) -> DistributedDataParallel:
    """torch's DistributedDataParallel over the data-parallel ranks, with what FP8 training needs.

    group: a process group or a DeviceMesh of one dimension (default: all ranks). Delayed scaling reduces amax over it, which keeps
    histories and scales equal on all ranks; so buffers are not broadcast at each forward. options: any other argument of
    DistributedDataParallel. Modules may be tensor parallel inside, with `tp_group`; their gradients are reduced over `group` alone.

        >>> model = ddp(model, meshes.replicate)
    """
    _refuse_quantized_storage(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor (set_device_mesh), which DistributedDataParallel cannot hold: fully_shard over a mesh of "
                "(replicate, shard) with shard=1 is data parallelism for DTensors (ParallelPlan(dp_replicate=N, dp_shard=1, ...)). "
                "Or build the modules with tp_group."
            )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"ddp takes a mesh of one dimension, got {group}: ParallelPlan(...).meshes().replicate.")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.delayed.data_groups = (group, *_tensor_parallel_group(module))
    chosen = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True, **options}
    return DistributedDataParallel(model, process_group=group, **chosen)
