"""What a run is made of, as a state that `Checkpoints` can save and load: the same names and tensors on every mesh.

checkpoints.save(step, model_state(model, optimizer) | {"step": step})
loaded = load_model_state(checkpoints, model, optimizer)

model.NAME                       parameters and persistent buffers, as one process names them and orders their rows
model.NAME.rowwise_data, ...     weights that are stored in FP8: their bytes and scales
delayed.NAME.fwd_scale, ...      delayed scaling, of modules that have used it
optimizer.state.NAME.exp_avg     state of the optimizer, by parameter; placed like the parameter
optimizer.groups.0.lr            its settings
rng.world4-tp2.0.cpu             random streams of rank 0 of 4, for a mesh of the same kind
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ottava import torch_private
from ottava.checkpoint.boxes import Part
from ottava.checkpoint.checkpoints import Checkpoints
from ottava.checkpoint.load import Loaded, Relaxed
from ottava.checkpoint.placement import Placed, modules_of, placed_parameters
from ottava.distributed.fsdp import keeps_copies, refresh
from ottava.nn.random_streams import CudaRNGStatesTracker
from ottava.nn.rotary import RotaryPositionEmbedding
from ottava.nn.weight_entries import weight_format
from ottava.optimizers import FusedAdam
from ottava.quant.delayed import DelayedState
from ottava.quant.weight import Weight

__all__ = ["load_model_state", "model_state"]

RNG = "rng"


def model_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, tracker: CudaRNGStatesTracker | None = None
) -> dict[str, Any]:
    """The live tensors of a run: views, no copies. All ranks have to call it together.

    model: of one process, or as `parallelize`, `shard_model`, torch's `fully_shard`, FSDP1 (use_orig_params=True) or DDP return it,
    tensor parallel or not. optimizer: gets the state it would make at its first step, if it has none yet. tracker: random streams
    beside torch's own.

        >>> checkpoints.save(100, model_state(model, optimizer) | {"step": 100, "data": {"position": 6400}})
    """
    if optimizer is not None:
        # First: it reads stored weights, which may move the memory of parts of a matrix together.
        complete_state(optimizer)
    parameters = list(placed_parameters(model))
    state: dict[str, Any] = {"model": {p.name: _named(p.entry(), "model") for p in parameters}}
    state["model"] |= {name: _whole(buffer) for name, buffer in _buffers(model)}
    state["delayed"] = {name: _delayed_entry(found) for name, found in _delayed(model)}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(optimizer, parameters)
    state[RNG] = {_mesh_name(model): {str(_rank()): _streams(tracker)}}
    return {key: value for key, value in state.items() if value}


def load_model_state(
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tracker: CudaRNGStatesTracker | None = None,
    extra: dict[str, Any] | None = None,
    which: str | int | Path = "newest",
    relaxed: Relaxed = Relaxed(),  # noqa: B008
) -> Loaded | None:
    """Restores a run from a checkpoint that any mesh saved; None if there is none. All ranks have to call it together.

    extra: what was saved beside the model; restored in place. which, relaxed: as for `Checkpoints.load`. Random streams are
    restored on a mesh of the same number of ranks and the same tensor parallelism; on another they stay as they are, because
    ranks that have to draw equal numbers there may have drawn different ones here.

        >>> run = {"step": 0, "data": {"position": 0}}
        >>> loaded = load_model_state(checkpoints, model, optimizer, extra=run)
    """
    state = model_state(model, optimizer, tracker=tracker)
    if taken := sorted(set(state) & set(extra or {})):
        raise ValueError(f"extra has {taken}, which are names of the model's own state: rename them.")
    allowed = relaxed.extra if isinstance(relaxed.extra, bool) and relaxed.extra else [*_patterns(relaxed), f"{RNG}.*"]
    wanted = {**state, **(extra or {})}
    loaded = checkpoints.load(wanted, which, replace(relaxed, extra=allowed))
    if loaded is not None:
        for key in extra or {}:
            extra[key] = wanted[key]  # type: ignore[index]  # a plain value was assigned in `wanted`
        settle(model, optimizer, tracker, state, set(loaded.kept))
    return loaded


def _patterns(relaxed: Relaxed) -> list[str]:
    return [] if isinstance(relaxed.extra, bool) else list(relaxed.extra)


def _named(entry: Any, section: str) -> Any:
    """`entry`, whose former name is that of the state: it begins with the section."""
    if isinstance(entry, dict):
        return {key: _named(part, section) for key, part in entry.items()}
    if not isinstance(entry, Part) or entry.former is None:
        return entry
    return replace(entry, former=replace(entry.former, name=f"{section}.{entry.former.name}"))


# ---------------------------------------------------------------------------------------------------------------- the model


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _whole(tensor: Tensor, **options: Any) -> Part:
    """A tensor that every rank has as a whole."""
    local = tensor.detach()
    return Part(tuple(local.shape), local.dtype, (((0,) * local.dim(), local),), **options)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers, which are equal on all ranks. Those of delayed scaling are for `_delayed`; rotary angles are constants."""
    for path, module in modules_of(model):
        if not isinstance(module, DelayedState | RotaryPositionEmbedding):
            for name, buffer in torch_private.persistent_buffers(module):
                yield f"{path}.{name}".strip("."), buffer


def _delayed(model: nn.Module) -> Iterator[tuple[str, DelayedState]]:
    for path, module in modules_of(model):
        if isinstance(module, DelayedState):
            yield path, module


def _delayed_entry(state: DelayedState) -> dict[str, Part]:
    """Wanted if it was stored; written if it was used. A run of another recipe has none of it."""
    if state.used and state.recipe is not None and not state.recipe.reduce_amax and dist.is_initialized():
        raise ValueError(
            "DelayedScaling(reduce_amax=False) has other scales in every rank, which no other mesh could load: use reduce_amax=True."
        )
    buffers = torch_private.persistent_buffers(state)
    return {name: _whole(buffer, writes=state.used, optional=True) for name, buffer in buffers}


# ------------------------------------------------------------------------------------------------------------- the optimizer


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter the state that it would have before its first step.

    Optimizers of torch make it in `step()`. So one is made that changes nothing: gradients, learning rate and decay are 0.
    """
    new = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and not optimizer.state.get(p)]
    if not new:
        return
    if isinstance(optimizer, FusedAdam):
        for parameter in new:
            optimizer.initialize_state(parameter)
        return
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    gradients = [p.grad for p in parameters]
    settings: list[dict[str, Any]] = [
        {k: g[k] for k in ("lr", "weight_decay") if k in g} for g in optimizer.param_groups
    ]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
        for group, kept in zip(optimizer.param_groups, settings):
            group.update({k: torch.zeros_like(v) if isinstance(v, Tensor) else 0.0 for k, v in kept.items()})
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        for group, kept in zip(optimizer.param_groups, settings):
            group.update(kept)
    for parameter in new:
        count = optimizer.state[parameter].get("step")
        if isinstance(count, Tensor):
            count.zero_()
        elif count is not None:
            optimizer.state[parameter]["step"] = 0


def _optimizer_state(optimizer: torch.optim.Optimizer, parameters: list[Placed]) -> dict[str, Any]:
    by_id = {id(p.parameter): p for p in parameters}
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in by_id:
                raise ValueError(
                    f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's: make the optimizer "
                    "after the model has been parallelized."
                )
            placed = by_id[id(parameter)]
            if values := optimizer.state.get(parameter):
                found[placed.name] = {
                    key: _named(placed.state_entry(key, value), "optimizer.state") for key, value in values.items()
                }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {"state": found, "groups": groups}


# ------------------------------------------------------------------------------------------------------------------- random


def _mesh_name(model: nn.Module) -> str:
    """Meshes of one name give equal numbers a meaning for equal ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    tp = max((getattr(m, "tp_size", 1) for m in model.modules()), default=1)
    return f"world{world}-tp{tp}"


def _streams(tracker: CudaRNGStatesTracker | None) -> dict[str, Part]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, stream in (tracker.get_states() if tracker is not None else {}).items():
        states[f"tracked-{name}"] = stream
    return {name: _whole(stream, optional=True) for name, stream in states.items()}


def _set_streams(
    tracker: CudaRNGStatesTracker | None, streams: Mapping[str, Part], prefix: str, kept: set[str]
) -> None:
    """Sets the streams that were loaded."""
    loaded = {name: part.views[0][1] for name, part in streams.items() if f"{prefix}.{name}" not in kept}
    if "cpu" in loaded:
        torch.set_rng_state(loaded["cpu"])
    if "cuda" in loaded:
        torch.cuda.set_rng_state(loaded["cuda"])
    if tracker is not None:
        tracked = {n.removeprefix("tracked-"): s for n, s in loaded.items() if n.startswith("tracked-")}
        tracker.set_states({**tracker.get_states(), **tracked})


# ------------------------------------------------------------------------------------------------------------ after loading


def _check_format(placed: Placed, entry: Mapping[str, Part]) -> None:
    """Raises if the bytes that were loaded mean something else than the weight takes them for."""
    (_, found), here = entry["format"].views[0], placed.local.scheme  # type: ignore[attr-defined]
    if not torch.equal(found, here.as_bytes()):
        raise ValueError(
            f"{placed.name} is stored as {here} here, but as {weight_format(found)} in the checkpoint, whose bytes have been loaded: build "
            "the model with the recipe that it was saved with."
        )


def settle(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tracker: CudaRNGStatesTracker | None,
    state: dict[str, Any],
    kept: set[str],
) -> None:
    """What follows from tensors of a `model_state` that were filled: FP8 copies, settings, streams. kept: names that were not filled."""
    parameters = list(placed_parameters(model))
    for placed in parameters:
        if isinstance(placed.local, Weight) and placed.local.stored_quantized:
            _check_format(placed, state["model"][placed.name])
            placed.local.memory.bytes_were_loaded()
    for path, delayed in _delayed(model):
        if f"delayed.{path}.fwd_scale" in kept:
            delayed.reset()
        delayed.used = not delayed.is_fresh()
    if optimizer is not None:
        for group, loaded in zip(optimizer.param_groups, state["optimizer"]["groups"]):
            group.update(loaded)
        for placed in parameters:
            for key, value in state["optimizer"]["state"].get(placed.name, {}).items():
                if not isinstance(value, Part):
                    optimizer.state[placed.parameter][key] = value
    (mesh,) = state[RNG]
    (rank,) = state[RNG][mesh]
    _set_streams(tracker, state[RNG][mesh][rank], f"{RNG}.{mesh}.{rank}", kept)
    if keeps_copies(model) or any(isinstance(module, FSDPModule) for module in model.modules()):
        refresh(model)
