"""A state that every mesh can hold, for tests: its canonical tensors, and a rank's part of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ottava.checkpoint import Part

Mesh = tuple[tuple[int, ...], tuple[str, ...]]
"""(shape, names)"""

MESHES: dict[str, Mesh] = {
    "(2,2)": ((2, 2), ("dp", "tp")),
    "(4,1)": ((4, 1), ("dp", "tp")),
    "(1,4)": ((1, 4), ("dp", "tp")),
    "hsdp (2,1,2)": ((2, 1, 2), ("dp_replicate", "dp", "tp")),
}
GATED = "gated"  # the tensor whose local rows are [gate; up], see `with_parts`


def canonical() -> dict[str, Tensor]:
    """What one process holds. 7 rows: uneven over 2 and 4 ranks, and one of 4 ranks holds fewer than the others."""
    draw = torch.Generator().manual_seed(11)
    return {
        "rows": torch.randn(7, 6, generator=draw),
        "columns": torch.randn(5, 8, generator=draw),
        "both": torch.randn(8, 12, generator=draw),
        "few": torch.randn(2, 3, generator=draw).bfloat16(),
        "everywhere": torch.randn(9, generator=draw),
        "bytes": torch.randint(0, 256, (12, 5), generator=draw, dtype=torch.uint8),
        "fp8": torch.randn(8, 8, generator=draw).to(torch.float8_e4m3fn).view(torch.uint8),
        "scale": torch.tensor(0.25),
        "empty": torch.zeros(0, 3),
        "plain": torch.arange(10),
        GATED: torch.randn(16, 3, generator=draw),
    }


def placements(name: str, mesh: DeviceMesh) -> list[Placement] | None:
    """On the last two dimensions (dp, tp); None: a plain tensor."""
    table: dict[str, list[Placement]] = {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "few": [Shard(0), Replicate()],
        "everywhere": [Replicate(), Replicate()],
        "bytes": [Replicate(), Shard(0)],
        "fp8": [Shard(1), Shard(0)],
        "empty": [Shard(0), Replicate()],
        GATED: [Replicate(), Shard(0)],
    }
    if name not in table:
        return None
    return [Replicate()] * (mesh.ndim - 2) + table[name]


def sharded(mesh: DeviceMesh, fill: bool) -> dict[str, Tensor]:
    """This rank's part of the canonical state; ones where the values are to be loaded."""
    state: dict[str, Tensor] = {}
    for name, tensor in canonical().items():
        tensor = tensor if fill else torch.ones_like(tensor)
        where = placements(name, mesh)
        tensor = _gate_up_by_rank(tensor, mesh["tp"].size()) if name == GATED else tensor
        state[name] = tensor if where is None else distribute_tensor(tensor, mesh, where, src_data_rank=None)
    return state


def gathered(state: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """The canonical tensors that the ranks hold together."""
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    full[GATED] = _canonical_order(full[GATED], mesh["tp"].size())
    return full


def _gate_up_by_rank(tensor: Tensor, tp: int) -> Tensor:
    """[gates; ups] -> [gates of tp rank 0; ups of tp rank 0; gates of tp rank 1; ...]"""
    return tensor.unflatten(0, (2, tp, -1)).transpose(0, 1).flatten(0, 2)


def _canonical_order(tensor: Tensor, tp: int) -> Tensor:
    return tensor.unflatten(0, (tp, 2, -1)).transpose(0, 1).flatten(0, 2)


def with_parts(state: dict[str, Tensor]) -> dict[str, Any]:
    """A state of `sharded` in which the tensor with permuted rows says where they lie."""
    tensor = state[GATED]
    if not isinstance(tensor, DTensor):
        return state
    local = tensor.to_local()
    half, first = local.shape[0] // 2, tensor.device_mesh["tp"].get_local_rank() * (local.shape[0] // 2)
    views = (((first, 0), local[:half]), ((tensor.shape[0] // 2 + first, 0), local[half:]))
    return {**state, GATED: Part(tuple(tensor.shape), tensor.dtype, views)}


def mesh_of(name: str) -> DeviceMesh:
    """A mesh of `MESHES`, for which there have to be enough ranks."""
    shape, names = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp_model(mesh_name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two linear layers under tensor parallelism and FSDP2, as a run has them: one step of AdamW has been made."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    mesh = mesh_of(mesh_name)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = mesh[("dp_replicate", "dp")] if "dp_replicate" in (mesh.mesh_dim_names or ()) else mesh["dp"]
    fully_shard(model, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(5))).square().mean().backward()
    optimizer.step()
    return model, optimizer


def fsdp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a run, as torch gives it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, f"rng-{dist.get_rank()}": torch.get_rng_state()}
