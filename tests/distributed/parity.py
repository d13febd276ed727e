"""Training on many ranks and in one process: the same models, data and steps. What `test_parity.py` runs in its ranks.

The single process sees every data-parallel rank's part as a microbatch: all forwards inside one `autocast`, one backward of the sum of
their losses. So statistics of current scaling are taken over the same tensors, and delayed scaling is updated once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ottava
import ottava.recipe as recipe
from ottava.distributed import ParallelPlan, meshes_of, parallelize
from ottava.models.gpt import GPT, GPTConfig
from ottava.models.llama import Llama, LlamaConfig
from ottava.nn.initialize import materialize_

RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
STEPS, SEED = 3, 1234


@dataclass(frozen=True)
class Case:
    """One way to spread one model."""

    model: str
    recipe: str
    plan: dict[str, Any] = field(default_factory=dict)
    batch: int = 12
    """Sequences in the global batch: a multiple of every dp size here."""

    def __str__(self) -> str:
        sizes = "x".join(str(self.plan.get(k, 1)) for k in ("dp_replicate", "dp_shard", "tp"))
        rest = "-".join(str(v) for k, v in self.plan.items() if k not in ("dp_replicate", "dp_shard", "tp"))
        return f"{self.model}-{self.recipe}-{sizes}-{rest}"


def build(name: str) -> nn.Module:
    """On the meta device. tp up to 4 divides heads, groups, ffn and vocabulary."""
    if name == "llama":
        return Llama(LlamaConfig(256, 256, 512, layers=2, heads=4, kv_heads=4, max_length=32), device="meta")
    return GPT(GPTConfig(256, 256, 512, layers=2, heads=4, max_length=32, dropout=0.0, tie_embeddings=True), device="meta")


def batch_of(step: int, size: int) -> Tensor:
    """Tokens [size, 33] of a step, the same everywhere."""
    return torch.randint(256, (size, 33), generator=torch.Generator().manual_seed(step))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as one process holds it, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name.removeprefix("module.")] = value.detach().clone()
    return found


def scales(model: nn.Module) -> dict[str, Tensor]:
    """Delayed scaling's state, by name."""
    return {n: b.clone() for n, b in model.named_buffers() if "delayed." in n and "history" not in n}


def run_steps(
    model: nn.Module, chosen: recipe.Recipe | None, parts: list[int], of: int, batch: int, optimizer: Any
) -> list[float]:
    """Trains on the microbatches `parts` of `of`; the losses."""
    losses = []
    for step in range(STEPS):
        tokens = batch_of(step, batch)
        optimizer.zero_grad()
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            micro = [tokens[p * (batch // of) : (p + 1) * (batch // of)] for p in parts]
            loss = torch.stack([model(t[:, :-1], t[:, 1:]) for t in micro]).sum()
        loss.backward()
        for parameter in model.parameters() if len(parts) > 1 else ():
            parameter.grad /= len(parts)  # after backward, where data-parallel ranks average theirs
        optimizer.step()
        losses.append(loss.item() / len(parts))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Large steps and a large epsilon: a gradient that is all rounding must not become a whole step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1)


def alone(model_name: str, recipe_name: str, dp: int, batch: int) -> dict[str, Any]:
    """The single process: start, losses, weights and scales after the steps."""
    model = materialize_(build(model_name), SEED, "cpu")
    start = weights(model)
    losses = run_steps(model, RECIPES[recipe_name], list(range(dp)), dp, batch, adam(model))
    return {"start": start, "losses": losses, "end": weights(model), "scales": scales(model)}


def spread(case: Case) -> dict[str, Any] | None:
    """The same on the ranks of the plan; None in ranks that the plan has no place for."""
    chosen = RECIPES[case.recipe]
    plan = ParallelPlan(**{"param_dtype": torch.float32, **case.plan})
    model = parallelize(build(case.model), plan, seed=SEED)
    meshes = meshes_of(model)
    start = weights(model)
    losses = run_steps(model, chosen, [meshes.dp_rank], meshes.dp_size, case.batch, adam(model))
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return {"start": start, "losses": mean.tolist(), "end": weights(model), "scales": scales(model)}
