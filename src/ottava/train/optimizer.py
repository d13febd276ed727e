"""The optimizer: which parameters decay, the learning rate, and the norm of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ottava.distributed.gradients import clip_grad_norm_, grad_norm_and_scale
from ottava.models import CausalLM
from ottava.nn.initialize import WRAPPERS
from ottava.optimizers import FusedAdam
from ottava.train.config import Config

MOMENTS = {"float32": "float32", "bfloat16": "bfloat16", "float8": "float8_block128"}
"""optimizer.moments, as FusedAdam calls it."""


def decaying(model: CausalLM) -> frozenset[str]:
    """Names of the parameters that decay: matrices, but not embeddings. To be asked before the model is wrapped.

    >>> "head.weight" in decaying(model), "norm.weight" in decaying(model)
    (True, False)
    """
    tables = {id(table.weight) for table in model.tables}
    return frozenset(name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in tables)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that they have in one process.

    >>> [name for name, _ in named(DistributedDataParallel(model))] == [name for name, _ in model.named_parameters()]
    True
    """
    root = model.module if isinstance(model, DistributedDataParallel) else model
    for name, parameter in root.named_parameters():
        yield ".".join(part for part in name.split(".") if part not in WRAPPERS), parameter


def make_optimizer(config: Config, model: nn.Module, decay: frozenset[str]) -> torch.optim.Optimizer:
    """AdamW or FusedAdam over two groups: what decays and what does not.

    >>> optimizer = make_optimizer(config, model, decaying(model))
    """
    section = config.optimizer
    parameters = [(name, p) for name, p in named(model) if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in parameters if name in decay], "weight_decay": section.weight_decay},
        {"params": [p for name, p in parameters if name not in decay], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    if section.name == "fused_adam":
        low, kept = config.precision.weights != "float32", MOMENTS[section.moments]
        optimizer: torch.optim.Optimizer = FusedAdam(
            groups,
            master_weights=low and section.masters != "none",
            store_param_remainders=low and section.masters == "remainder",
            exp_avg_dtype=kept,
            exp_avg_sq_dtype=kept,
            stochastic_rounding=section.stochastic_rounding,
            seed=config.train.seed,
            **options,
        )
    else:
        on_gpu = all(p.is_cuda for _, p in parameters)  # in one kernel there; else torch goes parameter by parameter
        optimizer = torch.optim.AdamW(groups, fused=on_gpu, **options)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, limit: float) -> tuple[Tensor, dict[str, Any]]:
    """(norm of the gradients, the same on all ranks; what `optimizer.step` takes so that those above `limit` are scaled down to it).

    FusedAdam scales as it reads them; for others they are scaled here. limit 0: never. A norm that is not finite leaves gradients that
    must not be used.

        >>> norm, options = clip_gradients(model, optimizer, 1.0)
        >>> optimizer.step(**options)
    """
    if not isinstance(optimizer, FusedAdam):
        return clip_grad_norm_(model, limit or math.inf), {}
    norm, scale = grad_norm_and_scale(model, limit or math.inf)
    return norm, {"grad_scale": scale}


def can_step_if(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_if` takes it."""
    return isinstance(optimizer, FusedAdam) or all(group.get("fused") for group in optimizer.param_groups)


def step_if(fine: Tensor, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    """`optimizer.step(**options)`, unless `fine` (bool []) is false when the device comes to it: then nothing is changed. Nobody waits.

    >>> norm, options = clip_gradients(model, optimizer, 1.0)
    >>> step_if(norm.isfinite(), optimizer, options)
    """
    make_step: Any = optimizer.step
    if isinstance(optimizer, FusedAdam):
        make_step(grad_scale=torch.where(fine, options["grad_scale"], math.nan))
        return
    asked: Any = optimizer
    asked.found_inf = (~fine).float()  # where torch.amp.GradScaler tells torch's fused optimizers of infinities
    try:
        make_step(**options)
    finally:
        del asked.found_inf


class Numbers:
    """A few numbers of a device, and vectors of some, on their way to the host, in one list.

    What is launched after this was made need not be done when they are read.

    >>> numbers = Numbers(loss, norm)
    >>> optimizer.step()
    >>> loss, norm = numbers.read()
    """

    def __init__(self, *numbers: Tensor) -> None:
        self.together = together = torch.cat([number.detach().double().reshape(-1) for number in numbers])
        """float64 [n] on the device."""
        self._event: torch.cuda.Event | None = None
        self._read: list[float] | None = None
        if together.is_cuda:
            self._numbers = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
            self._numbers.copy_(together, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._numbers = together

    def read(self) -> list[float]:
        """Waits until they are there."""
        if self._read is None:
            if self._event is not None:
                self._event.synchronize()
            self._read = self._numbers.tolist()
        return self._read
