"""Who makes a training step in `ottava bench step`: Ottava's trainer as it is, and the same model with torch, torchao or TransformerEngine.

All start from the same weights and see the same tokens. A contender is built, makes its steps, and is closed before the next one comes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ottava.bench.peers import best_attention, compile_blocks, convert_to_float8
from ottava.bench.plain_llama import PlainLlama, copy_weights
from ottava.bench.shapes import Workload
from ottava.models import Llama
from ottava.nn.initialize import materialize_
from ottava.quant.quantization import Quantization
from ottava.train.config import Config
from ottava.train.data import Batch
from ottava.train.flops import quantized_precision
from ottava.train.inputs import open_data
from ottava.train.loop import Loop
from ottava.train.model import construct
from ottava.train.override import override
from ottava.train.world import World

OURS = {
    "bf16": "precision.recipe=none",
    "current": "precision.recipe=Float8CurrentScaling",
    "delayed": "precision.recipe=DelayedScaling",
    "block": "precision.recipe=Float8BlockScaling",
}
"""Ottava's variants by name: keys of `ottava train` that differ from its defaults."""
PEERS = {
    "torch": "FSDP2, bf16, compiled blocks and loss, fused AdamW",
    "torch-eager": "the same without torch.compile",
    "torchao": "as torch, with torchao's tensorwise float8 linear layers",
    "torchao-gather": "as torchao, with weights gathered in float8",
    "te": "as torch-eager, with TransformerEngine's TransformerLayer under DelayedScaling",
}
"""Others by name."""


class Outcome(Protocol):
    """Of one step: mean loss and norm of gradients, read when the timing is over, so that nothing waits."""

    @property
    def loss(self) -> Tensor | float: ...

    @property
    def grad_norm(self) -> Tensor | float: ...


class Numbers(NamedTuple):
    """An `Outcome` that is there, or on the device."""

    loss: Tensor | float
    grad_norm: Tensor | float


@dataclass
class Contender:
    """Something that makes training steps."""

    name: str
    quantized: str | None
    """Precision of the layers' products ("fp8"); None: not quantized."""
    parameters: int
    step: Callable[[], Outcome]
    delayed: bool = False
    """Whether scales come from earlier steps: the first one has none, and small gradients vanish in it."""


@dataclass(frozen=True)
class Setting:
    """What all contenders share."""

    workload: Workload
    config: Config
    """Of `ottava train`, for a variant without overrides."""
    folder: Path
    """For what runs write."""
    world: World


@contextmanager
def open_contender(name: str, overrides: str | None, setting: Setting) -> Iterator[Contender]:
    """Ottava with `overrides`, or the peer called `name` if there are none."""
    if overrides is not None:
        with _ours(name, overrides, setting) as found:
            yield found
    else:
        yield _peer(name, setting)


# ------------------------------------------------------------------------------------------------------------------- ours


@contextmanager
def _ours(name: str, overrides: str, setting: Setting) -> Iterator[Contender]:
    """The trainer's own loop, step by step."""
    config = override(setting.config, overrides)
    run = mkdtemp(prefix="run-", dir=setting.folder)
    config = replace(config, train=replace(config.train, run=run))
    with ExitStack() as resources:
        loop = Loop(config, setting.world, resources)

        def step() -> Outcome:
            loop.clock.restart()
            found = loop._step()
            if found is None:
                raise RuntimeError(f"{name}: a step was not finite and there is no checkpoint to go back to.")
            return found

        recipe = config.precision.make_recipe()
        if recipe is not None and Quantization.of(recipe).delayed:
            _find_scales(loop)
        yield Contender(name, quantized_precision(recipe), loop.model.parameters, step)


def _find_scales(loop: Loop) -> None:
    """Forward and backward passes without an update. Delayed scaling begins with scales of 1, in which small gradients vanish: each pass
    makes scales of one more layer, from the last one down."""
    for _ in range(loop.config.model.layers + 2):
        batch = loop.data.batch(0, loop.config.train.global_batch).to(loop.world.device)
        parts, weight = batch.split(loop.config.train.micro_batch), 1.0 / batch.tokens.numel()
        if loop.graphs is not None:
            loop.graphs.begin(parts, weight)
        for part in parts:
            loop._microbatch(0, part, weight, None)
        loop.optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------------------------ peers


def plain_model(setting: Setting, recompute: bool = False) -> PlainLlama:
    """The model from torch's operations, float32, with the weights that Ottava's model starts with."""
    config, device = setting.config, setting.world.device
    first = construct(override(config, "precision.recipe=none"), vocab_size=0)
    materialize_(first, config.train.seed, device)
    assert isinstance(first, Llama)
    plain = PlainLlama(first.config, device, recompute)
    copy_weights(first, plain)
    del first
    gc.collect()  # the 8B one is 30 GiB
    return plain


def batches(setting: Setting) -> Iterator[Batch]:
    """The tokens of each step, as the trainer reads them."""
    data, _ = open_data(setting.config)
    step = 0
    while True:
        yield data.batch(step, setting.config.train.global_batch).to(setting.world.device)
        step += 1


def shard(model: PlainLlama, device: torch.device) -> None:
    """FSDP2 over one rank: float32 parameters, bf16 products (float32 on a CPU), gradients reduced in float32."""
    mesh = init_device_mesh(device.type, (1,))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )  # cos and sin stay float32
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _peer(name: str, setting: Setting) -> Contender:
    device = setting.world.device
    if name == "te":
        from ottava.bench.te_peer import te_model

        model: Any = te_model(plain_model(setting), device)
    else:
        model = plain_model(setting)
    parameters = sum(p.numel() for p in model.parameters())
    after: Callable[[], Any] = lambda: None  # noqa: E731
    if name.startswith("torchao"):
        after = convert_to_float8(model, device, gather=name.endswith("gather"))
    if name in ("torch", "torchao", "torchao-gather"):
        compile_blocks(model.layers)
        model.loss = torch.compile(model.loss)
    if name != "te":
        shard(model, device)
    quantized = "fp8" if name.startswith("torchao") or name == "te" else None
    return Contender(name, quantized, parameters, plain_step(model, setting, after), delayed=name == "te")


def plain_step(
    model: nn.Module, setting: Setting, after: Callable[[], Any], update: bool = True
) -> Callable[[], Outcome]:
    """A training step with torch's AdamW and clipping. update=False: gradients alone, without an optimizer's memory."""
    section, device = setting.config.optimizer, setting.world.device
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay,
        fused=device.type == "cuda",
    )  # fmt: skip
    tokens = batches(setting)

    def step() -> Outcome:
        batch = next(tokens)
        if batch.documents is None:
            with best_attention(device):  # backward too, where layers are recomputed
                loss = model(batch.tokens, batch.targets)
                loss.backward()
        else:
            loss = model(batch.tokens, batch.targets, batch.documents.to(device))
            loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(parameters, section.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if update:
            optimizer.step()
            after()
        optimizer.zero_grad()
        return Numbers(loss.detach(), norm)

    return step


def reference(setting: Setting, steps: int) -> list[Outcome]:
    """What the plain model does in `steps` steps, its layers recomputed so that it fits. One step: no optimizer."""
    model = plain_model(setting, recompute=True)
    shard(model, setting.world.device)
    assert isinstance(model, FSDPModule)
    step = plain_step(model, setting, lambda: None, update=steps > 1)
    return [Numbers(float(found.loss), float(found.grad_norm)) for found in (step() for _ in range(steps))]
