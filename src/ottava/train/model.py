"""The model of a run: built from its configuration, spread over the ranks, and run in its precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import ottava
from ottava.distributed import attach, meshes_of, parallelize, tracker_of
from ottava.distributed.fsdp import keeps_copies
from ottava.models import GPT, CausalLM, Llama, LlamaConfig
from ottava.nn.random_streams import seed_default, seed_tracker
from ottava.nn.traced_weights import hand_weights
from ottava.notices import warn_once
from ottava.quant.delayed import BUFFERS, DelayedState
from ottava.quant.scheme import Scheme
from ottava.train.config import Config
from ottava.train.optimizer import decaying

DelayedBuffers = list[tuple[DelayedState, dict[str, torch.Tensor] | None]]
"""What `DistributedModel.delayed_buffers` gives."""


def construct(config: Config, vocab_size: int, device: str | torch.device = "meta") -> CausalLM:
    """The model as one process has it. On the meta device nothing is allocated.

    >>> construct(preset("llama3-70b"), vocab_size=128256).num_parameters()
    70553706496
    """
    shape = config.model.shape(vocab_size, config.data.length)
    dtype = getattr(torch, config.precision.weights)
    recipe = config.precision.make_recipe()
    with ottava.quantized_model_init(
        enabled=config.precision.fp8_weights, recipe=recipe, preserve_high_precision_init_val=True
    ):
        kind = Llama if isinstance(shape, LlamaConfig) else GPT
        model: CausalLM = kind(shape, device=device, params_dtype=dtype, fp8_head=config.precision.fp8_head)  # type: ignore[arg-type]
    for layer in model.layers[shape.layers - config.precision.unquantized(shape.layers) :]:
        ottava.leave_unquantized(layer)
    return model


class DistributedModel:
    """The model on all ranks.

    >>> spread = DistributedModel(config, vocab_size=257, device=world.device)
    >>> with spread.precision():
    ...     loss = spread.module(tokens, targets)
    """

    def __init__(self, config: Config, vocab_size: int, device: torch.device) -> None:
        self.recipe = config.precision.make_recipe()
        self.shape = config.model.shape(vocab_size, config.data.length)
        whole = construct(config, vocab_size)
        self.decaying, self.parameters = decaying(whole), whole.num_parameters()
        self.flops = self.shape.flops_per_token(config.data.length)
        plan = config.plan(device.type)
        self.module: nn.Module = parallelize(
            whole, plan, recipe=self.recipe, seed=config.train.seed, config=_shared(config), device_type=device.type
        )
        if config.precision.gradients != "float32":
            self._keep_gradients_in(getattr(torch, config.precision.gradients))
            if config.train.global_batch > config.train.micro_batch:
                warn_once(
                    "ottava: precision.gradients 'bfloat16' adds the gradients of a step's microbatches up in bfloat16, which loses small "
                    "ones: a larger train.micro_batch, or 'float32', does not."
                )
        self.meshes = meshes_of(self.module)
        self.seed = config.train.seed
        wraps = config.parallel.strategy in ("ddp", "none") and config.precision.dtype(device.type) != torch.float32
        # FSDP casts what it gathers; nobody does for the others.
        self._cast = (device.type, config.precision.dtype(device.type)) if wraps else None
        if config.train.compile:
            for layer in whole.layers:
                hand_weights(layer)
                layer.compile()
        # One gather a step instead of one a microbatch, where weights stay gathered and serve both directions.
        self.keep_gathered = not config.parallel.reshard_after_forward and (
            self.recipe is None or Scheme.of(self.recipe, "weight").transposable
        )

    @contextmanager
    def precision(self) -> Iterator[None]:
        """What a forward pass runs under."""
        kind, dtype = self._cast or ("cpu", torch.bfloat16)
        with (
            torch.autocast(kind, dtype, enabled=self._cast is not None),
            ottava.autocast(enabled=self.recipe is not None, recipe=self.recipe),
        ):
            yield

    @contextmanager
    def eval_scope(self) -> Iterator[None]:
        """A forward pass that leaves no trace: no gradients, no dropout, and delayed scales as they were."""
        training = self.module.training
        self.module.eval()
        try:
            with self.unchanged(), torch.no_grad():
                yield
        finally:
            self.module.train(training)
            self.reshard()

    def reshard(self) -> None:
        """After a forward pass without a backward one: where forward leaves weights gathered, backward would have freed them."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Passes that leave delayed scales as they were."""
        kept = self.delayed_buffers()
        try:
            yield
        finally:
            self.set_delayed_buffers(kept)

    def forget_infinite_amax(self) -> None:
        """What a bad step has recorded for delayed scaling: an infinity would keep scales as they are until it leaves the history."""
        for state in self._delayed():
            if state.used:
                for history in (state.fwd_amax_history, state.bwd_amax_history):
                    history.nan_to_num_(0.0, 0.0, 0.0)

    def delayed_buffers(self) -> DelayedBuffers:
        """Copies of the scales and histories of all modules; None for one that has not used its own yet."""
        return [
            (state, {name: getattr(state, name).clone() for name in BUFFERS} if state.used else None)
            for state in self._delayed()
        ]

    def set_delayed_buffers(self, kept: DelayedBuffers) -> None:
        """To what `delayed_buffers` gave."""
        for state, buffers in kept:
            if buffers is None and state.used:
                state.reset()  # what it used meanwhile began as new
            for name, value in (buffers or {}).items():
                getattr(state, name).copy_(value)

    def seed_step(self, step: int) -> None:
        """Random numbers of a step are a function of (seed, step, rank): a checkpoint has none to keep."""
        seed = (self.seed << 64) + step
        seed_default(seed, self.meshes.dp_rank)
        seed_tracker(tracker_of(self.module), seed, self.meshes.tp.get_local_rank(), self.meshes.dp_rank)

    def renew_copies_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Every step of the optimizer renews the FP8 copies of the weights: while a GPU is still busy with that step, and not when
        the next one has to begin."""
        if self.recipe is not None and keeps_copies(self.module):
            attach(optimizer, self.module)

    def _keep_gradients_in(self, dtype: torch.dtype) -> None:
        if isinstance(self.module, FSDPModule | FullyShardedDataParallel | DistributedDataParallel):
            raise ValueError(
                f"precision.gradients {str(dtype).removeprefix('torch.')!r} is for one rank that has the whole model: several ranks keep "
                "reduced gradients in the type of the weights (precision.weights)."
            )
        for parameter in self.module.parameters():
            parameter.grad_dtype = dtype

    def _delayed(self) -> list[DelayedState]:
        return [m for m in self.module.modules() if isinstance(m, DelayedState)]


def _shared(config: Config) -> dict[str, Any]:
    """What all ranks must agree on."""
    return asdict(config)
