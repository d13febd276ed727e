"""`parallelize`: a model of whole layers becomes one that trains on all ranks, as a `ParallelPlan` says.

    check            do plan, machine and ranks agree                       topology.py, agreement.py
    random streams   dropout masks that tensor-parallel ranks must not share  nn.random_streams.use_tracker
    split            parameters over tensor-parallel ranks                  tensor_parallel.split_tensors
    recompute        what is kept for backward                              recompute.apply_recompute
    shard            weights over data-parallel ranks, blocks then root     fsdp.shard_model, fsdp1.shard_model_fsdp1, fsdp1.ddp
    prefetch         which block's weights are gathered ahead               prefetch_blocks
    fill             first values of a model on the meta device             nn.initialize.materialize_

Each step is a function that works alone on a model of one's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecision, MixedPrecisionPolicy

from ottava import torch_private
from ottava.distributed.agreement import check_agreement
from ottava.distributed.fsdp import keep_whole, refresh, shard_model
from ottava.distributed.fsdp1 import ddp, shard_model_fsdp1
from ottava.distributed.plan import Meshes, ParallelPlan
from ottava.distributed.recompute import apply_recompute, layers_of
from ottava.distributed.tensor_parallel import set_parallel_modes, split_tensors
from ottava.distributed.topology import Machine, check_model, check_topology, enforce
from ottava.nn.initialize import materialize_
from ottava.nn.random_streams import CudaRNGStatesTracker, seed_tracker, use_tracker
from ottava.quant.delayed import DelayedState
from ottava.recipe import Recipe

__all__ = ["meshes_of", "parallelize", "prefetch_blocks", "tracker_of"]

_MESHES: weakref.WeakKeyDictionary[nn.Module, Meshes] = weakref.WeakKeyDictionary()
_TRACKERS: weakref.WeakKeyDictionary[nn.Module, CudaRNGStatesTracker] = weakref.WeakKeyDictionary()


def parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    recipe: Recipe | None = None,
    blocks: Iterable[nn.Module] | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    device_type: str | None = None,
) -> nn.Module:
    """Makes `model` train on all ranks. Every rank has to call it, with the same model and plan; it says so if they differ.

    Works in place and returns the model (a wrapper of it for "fsdp1" and "ddp"). `meshes_of(model)` has the meshes afterwards: a
    rank trains on part `dp_rank` of `dp_size` of the data.

    recipe: the recipe of the `autocast` that the model will train under, if it is to be checked now. FSDP2 gathers weights as FP8
        bytes, made from the float32 parameters once a step; without a recipe here, from the first forward inside `autocast` on.
    blocks: the modules that are sharded, prefetched and recomputed one at a time; by default the `TransformerLayer`s.
    seed: of the first values of a model on the meta device, which are the same on every mesh; and of dropout where tensor-parallel
        ranks hold different heads or tokens (`tracker_of`). Elsewhere dropout draws from torch's default stream.
    config: what else all ranks must agree on. machine: `Machine.detect()` if not given.

        >>> plan = ParallelPlan(dp_shard=-1, tp=2)
        >>> model = parallelize(Llama(config, device="meta"), plan)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    if not isinstance(plan, ParallelPlan):
        raise ValueError(
            f"parallelize takes a ParallelPlan, got {type(plan).__name__}: ParallelPlan(tp=2), for example."
        )
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "parallelize needs a process group, and there is none: call torch.distributed.init_process_group first "
            "(one process alone is a group of world_size=1)."
        )
    check_agreement(None, plan, {} if config is None else config, model)
    enforce(check_topology(plan, getattr(model, "config", None), machine))
    plan = plan.resolve(dist.get_world_size())
    meshes = plan.meshes(device_type)
    chosen = layers_of(model) if blocks is None else list(blocks)
    device = torch.device(meshes.root.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    set_parallel_modes(model)  # the same parameters on every mesh, also where nothing is split
    tracker = CudaRNGStatesTracker()
    seed_tracker(tracker, seed, meshes.tp.get_local_rank(), meshes.dp_rank)
    if plan.tp > 1:
        use_tracker(model, tracker)
        split_tensors(
            model,
            meshes.tp,
            meshes.weight,
            sequence_parallel=plan.sequence_parallel,
            overlap=plan.overlap,
            overlap_transport=plan.overlap_transport,
            overlap_minimum_tokens=plan.overlap_minimum_tokens,
        )
    apply_recompute(model, plan.recompute, chosen or None)
    wrapped = _shard(model, plan, meshes, recipe, chosen, seed, device)
    for module in wrapped.modules():
        # The mesh of a plan is all ranks, and every rank runs every module.
        if isinstance(module, DelayedState) and not module.data_groups:
            module.data_groups = (dist.group.WORLD,)
    enforce(check_model(wrapped))
    _MESHES[wrapped], _TRACKERS[wrapped] = meshes, tracker
    return wrapped


def meshes_of(model: nn.Module) -> Meshes:
    """The meshes that `parallelize` has spread `model` over.

    >>> part = dataset[meshes_of(model).dp_rank :: meshes_of(model).dp_size]
    """
    if model not in _MESHES:
        raise ValueError(f"This {type(model).__name__} was not returned by parallelize.")
    return _MESHES[model]


def tracker_of(model: nn.Module) -> CudaRNGStatesTracker:
    """The random streams that `parallelize` gave to dropout of tensor-parallel ranks. They belong into a checkpoint.

    >>> state = model_state(model, optimizer, tracker=tracker_of(model))
    """
    if model not in _TRACKERS:
        raise ValueError(f"This {type(model).__name__} was not returned by parallelize.")
    return _TRACKERS[model]


def prefetch_blocks(blocks: Iterable[nn.Module], count: int) -> None:
    """Gathers the weights of the next `count` blocks while one runs: forward in the order given, backward in reverse.

    blocks: modules that `fully_shard` has sharded, in the order in which they run. 0: torch's own choice, the next one when
    backward runs.

        >>> prefetch_blocks(model.layers, 2)
    """
    sharded: list[FSDPModule] = []
    for block in blocks:
        if not isinstance(block, FSDPModule):
            raise ValueError(f"prefetch_blocks takes modules that fully_shard has sharded, got {type(block).__name__}.")
        sharded.append(block)
    for i, unit in enumerate(sharded if count > 0 else []):
        torch_private.gather_without_streams(unit)
        unit.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + count])
        unit.set_modules_to_backward_prefetch(sharded[max(i - count, 0) : i][::-1])


# ------------------------------------------------------------------------------------------------------------------- pieces


def shard_fsdp2(
    model: nn.Module, plan: ParallelPlan, meshes: Meshes, recipe: Recipe | None, blocks: list[nn.Module]
) -> None:
    """`shard_model` and `prefetch_blocks` with what the plan says, or `keep_whole`; `ottava.plan.estimate` measures the same.

    >>> shard_fsdp2(model, plan, plan.meshes(), recipe.Float8CurrentScaling(), list(model.layers))
    """
    if meshes.dp.size() == 1 and not plan.cpu_offload:
        keep_whole(model, meshes.dp, recipe, meshes.weight, plan.param_dtype)
        return
    options: dict[str, Any] = {
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype),
    }
    if plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    again = blocks if plan.recompute == "full" else ()
    shard_model(model, meshes.dp, recipe, weight_mesh=meshes.weight, blocks=blocks, recomputed=again, **options)
    prefetch_blocks([b for b in blocks if b is not model], plan.prefetch)


def _shard(
    model: nn.Module,
    plan: ParallelPlan,
    meshes: Meshes,
    recipe: Recipe | None,
    blocks: list[nn.Module],
    seed: int,
    device: torch.device,
) -> nn.Module:
    """The plan's strategy over data-parallel ranks, and first values; the model, or a wrapper of it."""
    if plan.strategy == "fsdp1":
        _to_local_tensors(model)
        precision = MixedPrecision(param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype)
        return shard_model_fsdp1(model, meshes.dp, mixed_precision=precision, blocks=blocks, seed=seed, device=device)
    if plan.strategy == "ddp":
        _to_local_tensors(model)
        return ddp(materialize_(model, seed, device), meshes.replicate)
    if plan.strategy == "fsdp2":
        shard_fsdp2(model, plan, meshes, recipe, blocks)
        materialize_(model, seed, torch.device("cpu") if plan.cpu_offload else device)
        if recipe is not None:
            refresh(model)
        return model
    return materialize_(model, seed, device)


def _to_local_tensors(model: nn.Module) -> None:
    """Parameters that tensor parallelism has made DTensors become this rank's plain tensors: FSDP1 and DDP know no others."""
    from torch.distributed.tensor import DTensor

    local: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                if parameter not in local:
                    own = parameter.to_local().detach()
                    local[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
                setattr(module, name, local[parameter])
