"""FSDP2 over tensor-parallel parameters: each rank gathers the bytes of its tp part, in the scales of the whole weight.

The modules here take their local part by hand, as `DTensor.to_local()`; what is compared with is one process that holds the same
bytes, cut out of the whole quantized weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import ottava
from distributed.fsdp_cases import RECIPES, Counted, make_mesh, unsharded
from distributed.ranks import Ranks
from ottava.distributed import fsdp
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import State, Weight

# (dp_shard, tp) -> where `tp` splits; sizes are cut at blocks by tp, and inside blocks by dp.
SIZES = {"column": (512, 160), "row": (160, 512), "replicated": (160, 160)}
PLACEMENTS = {"column": Shard(0), "row": Shard(1), "replicated": Replicate()}


class LocalLinear(ottava.Linear):
    """Multiplies by this rank's part of its weight."""

    def joined(self, names: list[str]) -> Tensor:
        (weight,) = (getattr(self, name) for name in names)
        return weight.to_local() if isinstance(weight, DTensor) else weight


class Model(nn.Module):
    """One layer a placement; each has an input of its own."""

    def __init__(self, parts: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {kind: LocalLinear(k, n, bias=False, device="cpu") for kind, (n, k) in parts.items()}
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return torch.stack([layer(inputs[kind]).square().mean() for kind, layer in self.layers.items()]).sum()


def full_weight(kind: str) -> Tensor:
    return torch.randn(SIZES[kind], generator=torch.Generator().manual_seed(len(kind)))


def local_part(full: Tensor, kind: str, tp: int, rank: int) -> Tensor:
    return full if kind == "replicated" else full.chunk(tp, dim=PLACEMENTS[kind].dim)[rank].contiguous()  # type: ignore[attr-defined]


def inputs(dp_rank: int, tp: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dp_rank)
    widths = {kind: SIZES[kind][1] // (tp if kind == "row" else 1) for kind in SIZES}
    return {kind: torch.randn(32, width, generator=generator).to(dtype) for kind, width in widths.items()}


def quantized_part(full: Tensor, name: str, kind: str, tp: int, rank: int, dtype: torch.dtype) -> QuantizedTensor:
    """The bytes of a part, cut out of the whole quantized weight."""
    q = ottava.quantize(full, RECIPES[name], role="weight")
    parts, shape = {}, list(full.shape)
    for key, tensor in q._parts.items():
        if kind == "replicated" or tensor.dim() != 2:
            parts[key] = tensor
            continue
        dim = PLACEMENTS[kind].dim if key.startswith("rowwise") else 1 - PLACEMENTS[kind].dim  # type: ignore[attr-defined]
        part = tensor.chunk(tp, dim=dim)[rank]
        parts[key] = part.t().contiguous().t() if not tensor.is_contiguous() else part.contiguous()
    if kind != "replicated":
        shape[PLACEMENTS[kind].dim] //= tp  # type: ignore[attr-defined]
    return QuantizedTensor(parts, q.scheme, tuple(shape), dtype)


def make_meshes(dp: int, tp: int) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh] | None:
    """(shard, tp, weight) of dp x tp ranks; None in the others."""
    size = dp * tp
    grid = make_mesh(torch.arange(size).view(dp, tp).tolist())
    weight = make_mesh(list(range(size)))
    if grid.get_coordinate() is None:
        return None
    assert grid.mesh_dim_names is not None
    return grid[grid.mesh_dim_names[0]], grid[grid.mesh_dim_names[1]], weight


def sharded(name: str, meshes: Any, policy: MixedPrecisionPolicy | None) -> Model:
    shard_mesh, tp_mesh, weight_mesh = meshes
    tp, rank = tp_mesh.size(), tp_mesh.get_local_rank()
    fulls = {kind: full_weight(kind) for kind in SIZES}
    parts = {kind: local_part(full, kind, tp, rank) for kind, full in fulls.items()}
    model = Model({kind: tuple(part.shape) for kind, part in parts.items()})
    for kind, part in parts.items():
        weight = DTensor.from_local(part, tp_mesh, [PLACEMENTS[kind]], run_check=False)
        model.layers[kind].weight = nn.Parameter(weight)
    for key, parameter in list(model.norm.named_parameters()):
        replicated = DTensor.from_local(parameter.detach(), tp_mesh, [Replicate()], run_check=False)
        setattr(model.norm, key, nn.Parameter(replicated))
    options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    fsdp.shard_model(model, shard_mesh, RECIPES[name], weight_mesh=weight_mesh, **options)
    return model


def compare_bytes(model: Model, name: str, tp_mesh: DeviceMesh) -> None:
    """The gathered weights are the parts of the whole quantized weights."""
    fulls = {key: value.full_tensor() for key, value in model.state_dict().items() if isinstance(value, DTensor)}
    for direction in ("rowwise", "columnwise"):
        with unsharded(model, direction):
            for kind, layer in model.layers.items():
                assert isinstance(layer.weight, DTensor)
                weight = layer.weight._local_tensor
                assert isinstance(weight, Weight) and weight.state is State.GATHERED
                assert isinstance(layer.weight.to_local(), Weight)
                part = (tp_mesh.size(), tp_mesh.get_local_rank())
                expected = quantized_part(fulls[f"layers.{kind}.weight"], name, kind, *part, torch.float32)
                for key in (k for k in weight._parts if k.startswith(direction)):
                    assert torch.equal(weight._parts[key], expected._parts[key]), (name, kind, key)


def train(name: str, dp: int, tp: int, dtype: torch.dtype) -> tuple[int, bool] | None:
    """(MAX all-reduces of a refresh, whether gradients and weights are those of one process)."""
    meshes = make_meshes(dp, tp)
    if meshes is None:
        return None
    shard_mesh, tp_mesh, _ = meshes
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else None
    model = sharded(name, meshes, policy)
    compare_bytes(model, name, tp_mesh)
    with ottava.autocast(recipe=RECIPES[name]):
        loss = model(inputs(shard_mesh.get_local_rank(), tp, dtype))
    loss.backward()
    equal = True
    for kind, layer in model.layers.items():
        full, rank = full_weight(kind), tp_mesh.get_local_rank()
        grads = []
        for dp_rank in range(dp):
            alone = Model({kind: tuple(local_part(full, kind, tp, rank).shape)})
            stored = quantized_part(full, name, kind, tp, rank, dtype)
            alone.layers[kind].weight = nn.Parameter(stored)
            with ottava.autocast(recipe=RECIPES[name]):
                alone(inputs(dp_rank, tp, dtype)).backward()
            grads.append(alone.layers[kind].weight.grad.float())
        mean = torch.stack(grads).sum(dim=0) / dp
        grad = layer.weight.grad
        assert isinstance(grad, DTensor) and grad.shape == full.shape
        gathered = local_part(grad.full_tensor(), kind, tp, rank)
        if dp <= 2:
            equal &= torch.equal(gathered, mean)
        else:
            equal &= bool((gathered - mean).norm() <= 1e-6 * mean.norm())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fsdp.attach(optimizer, model)
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
    with Counted() as counted:
        optimizer.step()
    compare_bytes(model, name, tp_mesh)
    return counted.maxima, equal


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(6) as ranks:
        yield ranks


# Recipe, dp, tp, dtype, and MAX all-reduces of a refresh: a number a weight over dp x tp, blocks over dp where ranks share any.
CASES = [
    ("current", 2, 2, torch.float32, 1),
    ("block", 2, 2, torch.float32, 1),
    ("nvfp4", 2, 2, torch.float32, 2),
    ("mxfp8", 2, 2, torch.float32, 1),
    ("block1d", 2, 2, torch.float32, 1),
    ("nvfp4_1d", 2, 2, torch.float32, 1),  # 80 rows a rank: no block of 16 is cut
    ("current", 1, 2, torch.float32, 1),
    ("mxfp8", 3, 2, torch.float32, 1),
    ("nvfp4", 3, 2, torch.float32, 2),
    ("current", 2, 2, torch.bfloat16, 1),
    ("mxfp8", 1, 2, torch.bfloat16, 0),
]


@pytest.mark.parametrize(("name", "dp", "tp", "dtype", "maxima"), CASES)
def test_parts_of_weights(ranks: Ranks, name: str, dp: int, tp: int, dtype: torch.dtype, maxima: int) -> None:
    answers = [a for a in ranks.run(train, name, dp, tp, dtype) if a is not None]
    assert answers == [(maxima, True)] * (dp * tp)


def missing_weight_mesh() -> str:
    meshes = make_meshes(2, 2)
    if meshes is None:
        return ""
    shard_mesh, tp_mesh, _ = meshes
    layer = LocalLinear(160, 128, bias=False, device="cpu")
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), tp_mesh, [Shard(0)], run_check=False))
    with pytest.raises(ValueError) as error:
        fsdp.shard_model(layer, shard_mesh, RECIPES["current"])
    dist.barrier(tp_mesh.get_group())
    return str(error.value)


def test_the_ranks_that_share_a_scale_have_to_be_named(ranks: Ranks) -> None:
    message = ranks.run(missing_weight_mesh)[0]
    assert "split over 2 tensor-parallel ranks" in message and "meshes().weight" in message
