"""FSDP2 with FP8 on the wire: torch's `fully_shard`, where the weights of Ottava's modules are gathered as bytes.

The sharded parameter is the float32 (or bf16) master: any optimizer works on it and checkpoints hold it. Its FP8 copy is renewed
once after each optimizer step, with one MAX all-reduce for the whole model (`gathered.py` has the tensors).

    shard_model(model, mesh, recipe)
    optimizer = torch.optim.AdamW(model.parameters())
    attach(optimizer, model)                     # every step renews the FP8 copies
    with ottava.autocast(recipe=recipe):
        loss = model(x)
    loss.backward()
    optimizer.step()
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ottava import torch_private
from ottava.distributed.gathered import Copy, ShardedWeight
from ottava.nn import GroupedLinear, LayerNormMLP, TransformerLayer
from ottava.nn.base import QuantizedModule, feature_multiple
from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor
from ottava.recipe import DelayedScaling, Recipe

__all__ = ["attach", "refresh", "shard_model"]


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    recipe: Recipe,
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: Iterable[nn.Module] | None = None,
) -> nn.Module:
    """Shards `model` with torch's `fully_shard`, block by block and the root last; quantized weights travel as FP8 bytes.

    mesh: one dimension to shard over, or (replicate, shard) for HSDP. recipe: that of the `autocast` the model will train under.
    Outside `autocast` the gathered weights are dequantized. blocks: the modules that are gathered one at a time; by default the
    `TransformerLayer`s, or what `ModuleList`s and `Sequential`s hold where there are none. Norms and biases stay as they are.
    Works in place and returns the model. Every rank has to call it.

        >>> mesh = ParallelPlan().meshes().dp
        >>> shard_model(model, mesh, recipe.Float8CurrentScaling(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        >>> attach(optimizer, model)
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must be a DeviceMesh (shard) or (replicate, shard), got {mesh!r}: ParallelPlan().meshes().dp is one."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("A mesh of replicas and shards needs names: init_device_mesh(..., mesh_dim_names=(...)).")
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward must be True or False, got {reshard_after_forward!r}: torch cannot reshard weights that are "
            "gathered as FP8 to a smaller group."
        )
    scheme = _wire_scheme(recipe)
    chosen = _default_blocks(model) if blocks is None else list(blocks)
    _wrap_weights(model, recipe, scheme)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    for block in chosen:
        if block is not model:
            fully_shard(block, **options)
    fully_shard(model, **options)
    _bind(model, mesh)
    model.register_load_state_dict_post_hook(lambda module, keys: refresh(module))
    if not any(weight.is_meta for weight, _ in _weights(model)):
        refresh(model)
    return model


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Renews the FP8 copy of every sharded weight from its master: one MAX all-reduce, then local work.

    `attach` calls it after each optimizer step and `model.load_state_dict` when it is done; call it yourself after changing or
    initializing masters in another way. Every rank has to call it.

        >>> with torch.no_grad():
        ...     model.layers[0].weight.mul_(2)
        >>> refresh(model)
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what is gathered now holds the old bytes
    by_group: dict[Any, list[tuple[Tensor, Copy]]] = defaultdict(list)
    for weight, copy in _weights(model):
        if weight.is_meta:
            raise ValueError(f"{copy.name} is on the meta device: call model.to_empty(...) and initialize it first.")
        by_group[copy.group].append((weight, copy))
    for group, weights in by_group.items():
        flat = [copy.local_amax(master) for master, copy in weights]
        sizes = [amax.numel() for amax in flat]
        reduced = torch.cat(flat)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
        amaxes = {copy: amax for (_, copy), amax in zip(weights, reduced.split(sizes), strict=True)}
        for master, copy in weights:
            amax = amaxes[copy]
            if copy.scheme.block is None and len(copy.joint) > 1:
                amax = torch.stack([amaxes[part] for part in copy.joint]).amax(dim=0)
            copy.renew(master, amax)


def attach(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """Makes every `optimizer.step()` end with `refresh(model)`. Returns a handle; `handle.remove()` undoes it.

    >>> attach(optimizer, model)
    """
    return optimizer.register_step_post_hook(lambda *_: refresh(model))


# ------------------------------------------------------------------------------------------------------------------- pieces


def _wire_scheme(recipe: Recipe) -> Scheme:
    """How weights are quantized, if that can be gathered in one byte an element: the columnwise copy must be the transpose."""
    scheme = Scheme.of(recipe, "weight")
    if not scheme.transposable or scheme.stochastic:
        raise ValueError(
            f"shard_model cannot gather weights of {type(recipe).__name__} ({scheme}) as bytes: their columnwise copy is not the "
            "transpose of the rowwise one. Use DelayedScaling, Float8CurrentScaling, Float8BlockScaling with "
            "w_block_scaling_dim=2, or NVFP4BlockScaling with 2-D blocks without a Hadamard transform for weights; "
            "or torch's own fully_shard, which gathers the high-precision weights."
        )
    return Scheme(**{**vars(scheme), "from_float32": False})


def _weight_names(module: QuantizedModule) -> list[list[str]]:
    """The weights of each GEMM of a module; several names where one weight is split into several parameters."""
    if isinstance(module, LayerNormMLP):
        return [["fc1_weight"], ["fc2_weight"]]
    if isinstance(module, GroupedLinear):
        return [[f"weight{g}"] for g in range(module.num_gemms)]
    return [list(module.weight_names)]  # type: ignore[arg-type]


def _wrap_weights(model: nn.Module, recipe: Recipe, scheme: Scheme) -> None:
    wrapped: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        for index, names in enumerate(_weight_names(module)):
            _check_split(module, path, names, recipe, scheme)
            copies: list[Copy] = []
            for name in names:
                parameter = getattr(module, name)
                if parameter not in wrapped:
                    where = f"{path}.{name}" if path else name
                    _check_weight(parameter, where, recipe)
                    state = module.delayed if isinstance(recipe, DelayedScaling) else None
                    copies.append(Copy(where, scheme, tuple(parameter.shape), state, 3 * index + 1))
                    weight = ShardedWeight(parameter.detach().contiguous(), copies[-1])
                    wrapped[parameter] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
                setattr(module, name, wrapped[parameter])
            for copy in copies:
                copy.joint = copies
        module.register_state_dict_post_hook(_plain_state)


def _check_weight(parameter: nn.Parameter, where: str, recipe: Recipe) -> None:
    if isinstance(parameter, QuantizedTensor):
        raise ValueError(
            f"{where} is stored in FP8 (quantized_model_init), but shard_model keeps high-precision masters: build the model "
            "outside of quantized_model_init."
        )
    if isinstance(parameter, DTensor | ShardedWeight):
        raise ValueError(
            f"{where} is sharded already ({type(parameter.data).__name__}): shard_model takes a model whose parameters are plain "
            "tensors, without tensor parallelism."
        )
    multiple = feature_multiple(recipe)
    if parameter.shape[0] % multiple or parameter.shape[1] % multiple:
        raise ValueError(
            f"{where} of shape {tuple(parameter.shape)} cannot be multiplied by {type(recipe).__name__}: both sizes must be "
            f"multiples of {multiple}."
        )


def _check_split(module: QuantizedModule, path: str, names: list[str], recipe: Recipe, scheme: Scheme) -> None:
    """A weight in several parameters is multiplied as one: its bytes have to be those of the one matrix."""
    if len(names) == 1:
        return
    whole_blocks = scheme.kind == "block" and all(getattr(module, name).shape[0] % 128 == 0 for name in names)
    if not whole_blocks and not (scheme.kind == "tensor" and not isinstance(recipe, DelayedScaling)):
        sizes = ", ".join(f"{name} {tuple(getattr(module, name).shape)}" for name in names)
        raise ValueError(
            f"{path or type(module).__name__} splits its weight into {sizes}, which {type(recipe).__name__} quantizes as one matrix: "
            "shard_model cannot put FP8 parts of it together. Build it with one fused weight (fuse_qkv_params=True, or no "
            "parameters_split), or with rows in multiples of 128 for Float8BlockScaling."
        )


def _default_blocks(model: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, TransformerLayer)]
    if layers:
        return layers
    held: list[nn.Module] = []
    for container in model.modules():
        # Only the outermost lists: a list inside a block is part of that block.
        if isinstance(container, nn.ModuleList | nn.Sequential) and not any(container in b.modules() for b in held):
            held += [child for child in container if any(True for _ in child.parameters())]
    return [m for m in held if not isinstance(m, nn.ModuleList | nn.ModuleDict)]  # lists have no forward to gather for


def _sharded(model: nn.Module) -> Iterator[tuple[DTensor, ShardedWeight]]:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = torch_private.local_tensor(parameter)
            if isinstance(local, ShardedWeight):
                yield parameter, local


def _weights(model: nn.Module) -> Iterator[tuple[Tensor, Copy]]:
    """(master, copy) of every sharded weight, in the same order on all ranks."""
    for _, local in _sharded(model):
        yield local.master, local.copy


def _bind(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tells every copy where its shard lies. Known only now: `fully_shard` decides it."""
    shard_mesh = mesh.ndim - 1
    for parameter, local in _sharded(model):
        _, offset = torch_private.local_box(parameter)
        rows = local.copy.shape[0]
        local.copy.offset = (offset[0], offset[1])
        local.copy.padded_rows = -(-rows // mesh.size(shard_mesh))
        local.copy.group = mesh.get_group(shard_mesh)


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
