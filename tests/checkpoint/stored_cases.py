"""Weights that are stored in FP8, saved and loaded on 1, 2 and 3 ranks and with tensor parallelism. For `test_stored_weights.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ottava
from distributed.fsdp_cases import RECIPES
from ottava.checkpoint import Checkpoints, load_model_state, model_state
from ottava.distributed import shard_model
from ottava.optimizers import FusedAdam

HIDDEN, FFN = 128, 256


def build(recipe: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe=RECIPES[recipe]):
        return nn.Sequential(
            ottava.LayerNormMLP(HIDDEN, FFN, activation="swiglu", params_dtype=torch.float32, device="cpu"),
            ottava.Linear(HIDDEN, 96, params_dtype=torch.float32, device="cpu"),
        )


class Run:
    """On the ranks there are; in one process without a group."""

    def __init__(self, recipe: str, how: str, seed: int) -> None:
        self.recipe, self.model = RECIPES[recipe], build(recipe, seed)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
            if how == "shard_model":
                shard_model(self.model, mesh, self.recipe)
            else:
                for layer in self.model:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.model, mesh=mesh)
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-2)

    def steps(self, first: int, count: int) -> list[float]:
        found = []
        for step in range(first, first + count):
            x = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(step))
            with ottava.autocast(recipe=self.recipe):
                loss = self.model(x).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found

    def whole(self) -> dict[str, Tensor]:
        """Dequantized weights and the optimizer's state, gathered by torch."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            for key, tensor in {"": parameter, **self.optimizer.state[parameter]}.items():
                value: Any = tensor.detach()
                if key == "" and hasattr(_local(value), "dequantize") and hasattr(_local(value), "scheme"):
                    value = _like(value, _local(value).dequantize(torch.float32))
                found[f"{name}.{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        return found


def _local(tensor: Tensor) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def cases(root: str, recipes: list[str], hows: list[str], sources: list[str]) -> list[str]:
    """Saves under this world's name, goes on, loads again; then loads what `sources` saved. What differs."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    problems = []
    for recipe in recipes:
        for how in hows:
            folder, name = Path(root) / recipe, f"{world}-{how}"
            folder.mkdir(exist_ok=True, parents=True)
            run = Run(recipe, how, seed=world)
            run.steps(0, 2)
            with Checkpoints(folder / name) as checkpoints:
                checkpoints.save(2, model_state(run.model, run.optimizer))
                reference = run.whole()
                if world == 1 or dist.get_rank() == 0:
                    torch.save(reference, folder / f"{name}.pt")
                wanted = run.steps(2, 5)
                again = Run(recipe, how, seed=9)
                load_model_state(checkpoints, again.model, again.optimizer)
            if again.steps(2, 5) != wanted:
                problems.append(f"{recipe} {name}: losses after loading")
            problems += [f"{recipe} {name}: {n}" for n in differing(again.whole(), run.whole())]
            for source in sources:
                with Checkpoints(folder / source) as checkpoints:
                    load_model_state(checkpoints, again.model, again.optimizer)
                reference = torch.load(folder / f"{source}.pt")
                problems += [f"{recipe} {source} -> {name}: {n}" for n in differing(again.whole(), reference)]
    return problems


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert set(found) == set(wanted)
    return [n for n in found if not torch.equal(found[n], wanted[n])]
