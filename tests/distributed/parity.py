"""Training on many ranks and in one process: the same models, data and steps. What `test_parity.py` runs in its ranks.

The single process sees every data-parallel rank's part as a microbatch: all forwards inside one `autocast`, one backward of the sum
of their losses; then the mean of the parts' gradients. So statistics of current scaling are taken over the same tensors, and delayed
scaling is updated once a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import ottava
import ottava.recipe as recipe
from ottava import torch_private
from ottava.distributed import ParallelPlan, meshes_of, parallelize, whole_state
from ottava.distributed.whole import modules_of
from ottava.models.gpt import GPT, GPTConfig
from ottava.models.llama import Llama, LlamaConfig
from ottava.nn.base import QuantizedModule
from ottava.nn.initialize import materialize_
from ottava.quant.weight import Weight

RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "hybrid": recipe.HybridScaling(recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling()),
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

    @property
    def width(self) -> int:
        """So wide that every rank's part of a contraction is a multiple of 64, and of 128 where blocks are that long."""
        return 512 if self.recipe == "block" and self.plan.get("tp") == 4 else 256

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.plan.get("dp_replicate", 1) * self.plan.get("dp_shard", 1)

    def __str__(self) -> str:
        sizes = "x".join(str(self.plan.get(k, 1)) for k in ("dp_replicate", "dp_shard", "tp"))
        rest = "-".join(str(v) for k, v in self.plan.items() if k not in ("dp_replicate", "dp_shard", "tp"))
        return f"{self.model}-{self.recipe}-{sizes}-{rest}"


def build(name: str, width: int = 256) -> nn.Module:
    """On the meta device. tp up to 4 divides heads, groups, ffn and vocabulary."""
    if name == "llama":
        config = LlamaConfig(256, width, 2 * width, layers=2, heads=4, kv_heads=4, max_length=16)
        return Llama(config, device="meta")
    plain = GPTConfig(256, width, 2 * width, layers=2, heads=4, max_length=16, dropout=0.0, tie_embeddings=True)
    return GPT(plain, device="meta")


def batch_of(step: int, size: int) -> Tensor:
    """Tokens [size, 17] of a step, the same everywhere."""
    return torch.randint(256, (size, 17), generator=torch.Generator().manual_seed(step))


def scales(model: nn.Module) -> dict[str, Tensor]:
    """Delayed scaling's state, and the scales of weights that travel as bytes: what all ranks of the weight group share."""
    buffers = {f"{path}.{n}": b for path, m in modules_of(model) for n, b in m.named_buffers(recurse=False)}
    found = {n: b.clone() for n, b in buffers.items() if "delayed." in n and "history" not in n}
    for name, parameter in model.named_parameters():
        local = torch_private.local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
        if isinstance(local, Weight) and local.memory.group.scale.numel():
            found[name + " (wire)"] = local.memory.group.scale.clone()
    return found


def run_steps(
    model: nn.Module, chosen: recipe.Recipe | None, meshes: Any, batch: int, device: str = "cpu", lr: float = 1e-3
) -> list[float]:
    """Trains a model on this rank's part of the data; the losses."""
    optimizer, losses, mine = adam(model, lr), [], slice(meshes.dp_rank, None, meshes.dp_size)
    for step in range(STEPS):
        tokens = batch_of(step, batch)[mine].to(device)
        optimizer.zero_grad()
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_steps_alone(
    model: nn.Module,
    chosen: recipe.Recipe | None,
    dp: int,
    batch: int,
    device: str = "cpu",
    compute: torch.dtype | None = None,
) -> list[float]:
    """The same in one process, for `dp` parts of the data. compute: what unquantized weights are used in, if not in their own dtype."""
    optimizer, losses = adam(model), []
    for step in range(STEPS):
        tokens = batch_of(step, batch).to(device)
        with ottava.autocast(enabled=chosen is not None, recipe=chosen):
            # Leaves of its own for each part, so that gradients are added up in the order of ranks, not of the autograd engine.
            leaves = [leaves_of(model, chosen, compute) for _ in range(dp)]
            parts = [tokens[r::dp] for r in range(dp)]
            loss = [functional_call(model, own, (t[:, :-1], t[:, 1:])) for own, t in zip(leaves, parts)]
        torch.stack(loss).sum().backward()
        for name, parameter in model.named_parameters():
            parameter.grad = by_halves([own[name].grad.to(parameter.dtype) for own in leaves]) / dp
        optimizer.step()
        losses.append(float(by_halves([part.detach() for part in loss]) / dp))
    return losses


def leaves_of(model: nn.Module, chosen: recipe.Recipe | None, compute: torch.dtype | None) -> dict[str, Tensor]:
    """Copies of the parameters to differentiate by. What is quantized is quantized from its own dtype, as FSDP2 does it."""
    stays: set[nn.Parameter] = set()
    for module in model.modules():
        if chosen is not None and isinstance(module, QuantizedModule):
            stays |= {p for p in module.parameters(recurse=False) if p.dim() == 2}
    return {
        n: p.detach().to(p.dtype if p in stays or compute is None else compute, copy=True).requires_grad_()
        for n, p in model.named_parameters()
    }


def by_halves(terms: list[Tensor]) -> Tensor:
    """The sum in the order of `overlap/collectives.py`."""
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2])] + odd
    return terms[0]


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Large steps and a large epsilon: a gradient that is all rounding must not become a whole step."""
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-3, weight_decay=0.1)


@functools.cache
def alone(model_name: str, width: int, recipe_name: str, dp: int, batch: int) -> dict[str, Any]:
    """The single process: start, losses, weights and scales after the steps."""
    model = materialize_(build(model_name, width), SEED, "cpu")
    start = whole_state(model)
    losses = run_steps_alone(model, RECIPES[recipe_name], dp, batch)
    return {"start": start, "losses": losses, "end": whole_state(model), "scales": scales(model)}


def spread(case: Case) -> dict[str, Any]:
    """The same on the ranks of the plan."""
    chosen = RECIPES[case.recipe]
    plan = ParallelPlan(**{"param_dtype": torch.float32, **case.plan})
    model = parallelize(build(case.model, case.width), plan, seed=SEED)
    meshes = meshes_of(model)
    start = whole_state(model)
    losses = run_steps(model, chosen, meshes, case.batch)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    found = {"start": start, "losses": mean.tolist(), "end": whole_state(model), "scales": scales(model)}
    return found if dist.get_rank() == 0 else {"scales": found["scales"]}  # the others have the same
