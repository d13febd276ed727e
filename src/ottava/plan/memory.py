"""How much memory a rank needs, before any rank exists: one training step on tensors without data, in one process.

A fake process group plays any number of ranks and answers every collective at once; under torch's FakeTensorMode operators compute
shapes only. What is run is the real program: the modules, their kernels' fake functions, FSDP's gathers, the optimizer. torch's
`FSDPMemTracker` finds the peak; what a rank holds between steps is added up from its tensors.

Counted are tensors, on the CPU's code path (the loss takes the GPU's, `models/head_loss.py`): no allocator's rounding or cache, no
workspaces of libraries, no communicator's buffers. On a GPU keep a tenth or two in reserve.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ottava import torch_private
from ottava.distributed.fsdp import attach, refresh
from ottava.distributed.parallel_model import shard_fsdp2
from ottava.distributed.plan import ParallelPlan
from ottava.distributed.recompute import apply_recompute, layers_of
from ottava.distributed.tensor_parallel import set_parallel_modes, split_tensors
from ottava.quant.state import autocast
from ottava.quant.weight import Weight
from ottava.recipe import Recipe

__all__ = ["RankMemory", "estimate"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank (the first) of `ranks`.

    >>> at_8.sharded / at_1.sharded  # a little over 1/8
    0.1251
    """

    ranks: int
    parameters: int
    """What this rank holds of the parameters."""
    gradients: int
    """And of their gradients, after backward."""
    optimizer: int
    copies: int
    """FP8 copies of the parameters, made once a step and gathered as bytes."""
    gathered: int
    """At the peak: gathered weights, gradients before they are reduced, and the buffers of both."""
    activations: int
    """At the peak: what forward keeps for backward, what backward works with, and the modules' buffers."""
    peak: int
    """The most that lives at once during a step."""

    @property
    def sharded(self) -> int:
        """What falls as 1 / dp_shard. The rest is a floor that only smaller batches, recomputation or tensor parallelism lower."""
        return self.parameters + self.gradients + self.optimizer + self.copies


def estimate(
    build: Callable[[], nn.Module],
    plan_for: Callable[[int], ParallelPlan],
    ranks: Iterable[int],
    recipe: Recipe | None,
    loss: Callable[[nn.Module], Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> list[RankMemory]:
    """Memory of a rank for each number of ranks. Call it where no process group exists: it makes its own.

    build: a model of whole layers on the meta device. plan_for: the plan for a number of ranks (strategy "fsdp2"). recipe: that of
    the `autocast` around the forward, None for none. loss: runs the forward of a microbatch of one rank. optimizer: from parameters;
    AdamW if not given. It must keep its step count as a tensor, as `fused=True` does: numbers cannot be read here.

        >>> def loss(model):
        ...     tokens = torch.randint(32000, (1, 2049))
        ...     return model.loss(tokens[:, :-1], tokens[:, 1:])
        >>> build = lambda: Llama(LlamaConfig(layers=12), device="meta")
        >>> for found in estimate(build, lambda n: ParallelPlan(), [1, 8, 1024], recipe.Float8CurrentScaling(), loss):
        ...     print(found.ranks, found.peak / 2**30)
    """
    if dist.is_initialized():
        raise ValueError(
            "estimate plays all ranks itself, but this process is in a process group: call it in a process without one."
        )
    return [_estimate(build, plan_for(n), n, recipe, loss, optimizer or _adamw) for n in ranks]


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _estimate(
    build: Callable[[], nn.Module],
    plan: ParallelPlan,
    ranks: int,
    recipe: Recipe | None,
    loss: Callable[[nn.Module], Tensor],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> RankMemory:
    with _fake_ranks(ranks):
        model, plan = build(), plan.resolve(ranks)
        if plan.strategy != "fsdp2" or plan.cpu_offload:
            raise ValueError(f'estimate knows strategy "fsdp2" without cpu_offload, got a plan with {plan.as_dict()}.')
        _spread(model, plan, recipe)  # on the meta device, because the tensors of meshes are read
        with torch_private.fake_mode():
            model.to_empty(device="cpu")
            if recipe is not None:
                refresh(model)
            optimizer = make_optimizer(model.parameters())
            if recipe is not None:
                attach(optimizer, model)  # not at the next forward: the tracker's hooks gather weights before that
            held: dict[str, int] = {}

            def step() -> None:
                with autocast(enabled=recipe is not None, recipe=recipe):
                    value = loss(model)
                value.backward()
                held["gradients"] = _bytes(p.grad for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()

            step()  # DTensor works out its layouts with whole tensors the first time, and the optimizer makes its state
            peak = torch_private.peak_memory(model, optimizer, step)
            held["parameters"] = _bytes(model.parameters())
            held["optimizer"] = _bytes(t for state in optimizer.state.values() for t in state.values())
            held["copies"] = _bytes(_copies(model))
            return _sorted_out(ranks, held, peak)


def _spread(model: nn.Module, plan: ParallelPlan, recipe: Recipe | None) -> None:
    """What `parallelize` does, without drawing values."""
    meshes, blocks = plan.meshes("cpu"), layers_of(model)
    set_parallel_modes(model)
    if plan.tp > 1:
        split_tensors(model, meshes.tp, meshes.weight, sequence_parallel=plan.sequence_parallel)
    apply_recompute(model, plan.recompute, blocks or None)
    shard_fsdp2(model, plan, meshes, recipe, blocks)


def _sorted_out(ranks: int, held: dict[str, int], peak: dict[str, int]) -> RankMemory:
    """peak: torch's names. It takes the FP8 copies, which are nobody's parameters, for activations."""
    gathered = sum(peak.get(kind, 0) for kind in ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter"))
    kinds = (
        "Sharded Param",
        "Sharded Grad",
        "OptState",
        "Parameter",
        "Gradient",
        "Optstate",
    )  # the latter three of one rank
    sharded = sum(peak.get(kind, 0) for kind in kinds)
    activations = max(peak["Total"] - sharded - gathered - held["copies"], 0)
    return RankMemory(ranks, **held, gathered=gathered, activations=activations, peak=peak["Total"])


def _copies(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        local = torch_private.local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
        if isinstance(local, Weight) and local.master is not None:
            yield from local.memory.data.values()


def _bytes(tensors: Iterable[Any]) -> int:
    """What this rank holds of the tensors; None holds nothing."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            local = torch_private.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            total += local.numel() * local.element_size()
    return total


@contextmanager
def _fake_ranks(count: int) -> Iterator[None]:
    """This process is the first of `count` ranks; collectives return at once."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=count)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        dist.destroy_process_group()
