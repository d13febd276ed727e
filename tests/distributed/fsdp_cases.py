"""What the tests of FSDP2 share: recipes, meshes, a small model, one process to compare with, and counted collectives.

One process that sees the global batch runs it as one microbatch a rank, since per-tensor scales of activations are those of what a
rank sees. Two ranks add two gradients, which has one order: all is equal bit for bit. More ranks add in gloo's order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import ottava
from ottava import recipe, torch_private
from ottava.distributed import fsdp
from ottava.quant.weight import State, Weight

RECIPES: dict[str, recipe.Recipe] = {
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    # 1-D blocks: rowwise and columnwise bytes differ.
    "mxfp8": recipe.MXFP8BlockScaling(),
    "block1d": recipe.Float8BlockScaling(w_block_scaling_dim=1),
    "nvfp4_1d": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
}
OTHER_RECIPES = {"dequantized": recipe.MXFP8BlockScaling(backward_override="dequantized")}  # rows serve backward too
ONE_DIRECTION = ("mxfp8", "block1d", "nvfp4_1d")
# What `fully_shard` takes: ranks to shard over, or (replicas, ranks to shard over).
MESHES: dict[str, Any] = {"2": [0, 1], "3 uneven": [0, 1, 2], "4": [0, 1, 2, 3], "hsdp": [[0, 1], [2, 3]]}
HIDDEN, FFN, TOKENS, STEPS = 160, 288, 32, 2  # borders between ranks cut blocks of 128, 32 and (three ranks) 16 rows


class Block(nn.Module):
    """All four kinds of modules with quantized weights, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_linear = ottava.LayerNormLinear(HIDDEN, HIDDEN, device="cpu")
        self.experts = ottava.GroupedLinear(2, HIDDEN, HIDDEN, device="cpu")
        self.mlp = ottava.LayerNormMLP(HIDDEN, FFN, activation="swiglu", device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return x + self.mlp(self.experts(self.norm_linear(x), m_splits=[half, x.shape[0] - half]))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = ottava.Linear(HIDDEN, 96, bias=False, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(blocks: int = 2) -> Model:
    torch.manual_seed(1)
    model = Model(blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(step: int, part: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * step + part))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


_MESHES_MADE = itertools.count()


def make_mesh(ranks: Any) -> DeviceMesh:
    """A mesh with names of its own: DTensor caches by mesh, and equal meshes of an earlier run have groups that are gone."""
    number = next(_MESHES_MADE)
    names = (f"replicate{number}", f"shard{number}")
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names if torch.tensor(ranks).dim() == 2 else names[1:])
    dist.barrier()  # a rank without work must not close its connections while others still make theirs
    return mesh


def mesh_of(name: str) -> DeviceMesh | None:
    """The mesh; None in a rank that has no place in it."""
    mesh = make_mesh(MESHES[name])
    return mesh if mesh.get_coordinate() is not None else None


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}


def one_process(name: str, parts: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses [step][part] and the weights at the end."""
    model = build()
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        with ottava.autocast(recipe=RECIPES[name]):
            each = [model(batch(step, part)).square().mean() for part in range(parts)]
        torch.stack(each).sum().backward()
        for parameter in model.parameters():  # gradients are quantized before they are averaged, as on a rank
            assert parameter.grad is not None
            parameter.grad /= parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, model.state_dict()


def compare_gathered(model: nn.Module, name: str) -> int:
    """Asserts that the bytes and scales of every gathered weight are those of the whole weight; returns how many there are."""
    masters = whole(model)
    scales = {
        weight.memory.name: weight.memory.group.delayed.fwd_scale[weight.memory.group.column].item()
        for weight in fsdp._mastered(model)
        if weight.memory.group.delayed is not None
    }
    for direction in ("rowwise", "columnwise"):
        with unsharded(model, direction):
            gathered = gathered_weights(model)
            for key, weight in gathered.items():
                assert weight._gather.direction in (direction, "rowwise", "both")
                expected = ottava.quantize(
                    masters[key], (RECIPES | OTHER_RECIPES)[name], role="weight", scale=scales.get(key)
                )
                for part in (n for n in weight._parts if n.startswith(direction)):
                    assert torch.equal(weight._parts[part], expected._parts[part]), (name, key, part)
                    assert same_layout(weight._parts[part], expected._parts[part]), (key, part)
    return len(gathered)


def gathered_weights(model: nn.Module) -> dict[str, Any]:
    """The parameters that are gathered as bytes now, by name."""
    return {n: p for n, p in model.named_parameters() if isinstance(p, Weight) and p.state is State.GATHERED}


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is contiguous, or its transpose, where `b` is."""
    return a.is_contiguous() >= b.is_contiguous() and a.t().is_contiguous() >= b.t().is_contiguous()


@contextlib.contextmanager
def unsharded(model: nn.Module, direction: str = "rowwise") -> Iterator[None]:
    """Gathers all weights as forward does, or, for "columnwise", as backward does."""
    inside_backward = torch_private.inside_backward
    torch_private.inside_backward = lambda: direction == "columnwise"
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module in modules:
            module.unshard()
        yield
    finally:
        torch_private.inside_backward = inside_backward
        for module in modules:
            module.reshard()


class Counted:
    """Counts the bytes that this rank gives to all-gathers, and the MAX all-reduces."""

    def __enter__(self) -> Counted:
        self.bytes = self.maxima = 0
        self._kept = {
            n: getattr(dist, n)
            for n in ("all_gather_into_tensor", "all_gather_single", "all_reduce")
            if hasattr(dist, n)
        }

        def gather(original: Any) -> Any:
            def counted(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.bytes += input_tensor.nbytes
                return original(output_tensor, input_tensor, *args, **kwargs)

            return counted

        def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
            self.maxima += op == dist.ReduceOp.MAX
            return self._kept["all_reduce"](tensor, op, *args, **kwargs)

        for name, original in self._kept.items():
            setattr(dist, name, reduce if name == "all_reduce" else gather(original))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, original in self._kept.items():
            setattr(dist, name, original)


def one_rank_mesh() -> DeviceMesh:
    """Every rank alone: a mesh of one rank to shard over."""
    mesh = make_mesh([[rank] for rank in range(dist.get_world_size())])
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[1]]


def two_ranks() -> DeviceMesh | None:
    """Ranks 0 and 1; None in the others."""
    return mesh_of("2")


def step(model: nn.Module, name: str, number: int, part: int, group: Any = None) -> Tensor:
    """One forward and backward of part `part` of batch `number`; the loss. group: that shares delayed scales, if not all ranks."""
    with ottava.autocast(recipe=(RECIPES | OTHER_RECIPES)[name], amax_reduction_group=group):
        loss = model(batch(number, part)).square().mean()
    loss.backward()
    return loss.detach()


def local_of(value: Any) -> Any:
    """What a rank holds of a DTensor."""
    return value._local_tensor if isinstance(value, DTensor) else value
