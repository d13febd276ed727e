"""`MicrobatchGraphs`: forward, loss and backward of a microbatch as one launch (`train.cuda_graph`).

[Note: two graphs] The first microbatch of a step sets the gradients, those after it add to them; so there are two graphs, and the tensors
that the first one writes are the parameters' `grad` from then on. Everything that differs between two microbatches enters through tensors
that stay: tokens, targets, documents, and the weight of the loss. What happens once a step (FP8 copies of the weights, the optimizer)
happens outside. The update of delayed scaling is a part of the graph, since the whole `autocast` is.

The first steps run as they are: they compile and warm up what is recorded then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ottava.distributed.fsdp import before_forward
from ottava.graphs import CudaRecorder, Recorder
from ottava.graphs.addresses import Addresses, weight_copies
from ottava.graphs.recorder import Replay
from ottava.notices import warn_once
from ottava.train.config import Config
from ottava.train.data import Batch
from ottava.train.model import DistributedModel
from ottava.train.world import World

WARM_UP = 2
"""Steps before anything is recorded."""
Run = Callable[[Tensor, Tensor, Tensor | None, Tensor, bool | None], Tensor]
"""(tokens, targets, documents, weight of the loss, is_first_microbatch) -> the loss, after its backward."""


def recorder_for(device: torch.device) -> Recorder:
    """What records on `device`."""
    if device.type != "cuda":
        raise ValueError(
            f"train.cuda_graph records CUDA graphs, but this run is on the {device.type}: leave it off, or run on a GPU."
        )
    return CudaRecorder()


def microbatch_graphs(config: Config, model: DistributedModel, world: World) -> MicrobatchGraphs | None:
    """None if the configuration does not ask for graphs. Says why, where they are not possible."""
    if not config.train.cuda_graph:
        return None
    if world.size > 1:
        raise ValueError(
            f"train.cuda_graph records a model that lies whole on one rank; this run has {world.size}: leave it off, or use one rank."
        )
    if config.data.document_mask and world.device.type == "cuda":
        warn_once(
            "ottava: with train.cuda_graph packed documents go through the attention kernel that does not need their lengths on the host; "
            "without it a faster one may run, whose sums are rounded in another order."
        )
    train = config.train

    def run(tokens: Tensor, targets: Tensor, documents: Tensor | None, weight: Tensor, first: bool | None) -> Tensor:
        with model.precision():
            loss = model.module(
                tokens,
                targets,
                documents,
                is_first_microbatch=first,
                reduction="sum",
                z_loss=train.z_loss,
                max_logits=train.max_logits,
            )
        (loss * weight).backward()
        return loss.detach()

    return MicrobatchGraphs(model, run, recorder_for(world.device), world.device)


class MicrobatchGraphs:
    """See above.

    >>> graphs.begin(parts, weight)
    >>> for i, part in enumerate(parts):
    ...     total += graphs.run(part, first=i == 0)
    """

    def __init__(self, model: DistributedModel, run: Run, recorder: Recorder, device: torch.device) -> None:
        self._model, self._work, self._recorder = model, run, recorder
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._weight = torch.zeros((), dtype=torch.float32, device=device)
        self._static: Batch | None = None
        self._steps = 0
        self._graphed = self._adds = False
        self.forget()

    def forget(self) -> None:
        """Drops what was recorded, after parameters may have moved."""
        self._replays: dict[tuple[bool, bool | None], Replay] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._lies_at: Addresses | None = None
        self._copies: list[object] = []

    def begin(self, parts: list[Batch], weight: float, eager: bool = False) -> None:
        """A step of these microbatches, whose summed losses count `weight` times. eager: somebody looks at it as it runs."""
        self._weight.fill_(weight)
        self._adds = False
        if self._static is None:
            self._static = _room_for(parts[0], self._weight.device)
        fits = all(_shapes(part) == _shapes(self._static) for part in parts)
        if not fits:
            warn_once(
                f"ottava: train.cuda_graph records microbatches of {_shapes(self._static)[0]} tokens; steps with others, such as "
                f"{_shapes(parts[-1])[0]}, run without a graph."
            )
        self._graphed = fits and not eager and self._steps >= WARM_UP
        self._steps += 1
        self._renew()

    def _renew(self) -> None:
        """What the forward would do once a step, and a replay does not: FP8 copies of the weights."""
        module = self._model.module
        with self._model.precision():
            before_forward(module, ())
        if self._lies_at is not None and not self._lies_at.hold():
            warn_once("ottava: train.cuda_graph records anew: parameters, FP8 copies or buffers have been moved.")
            self.forget()
        elif self._lies_at is None:
            Addresses(module)  # makes FP8 operands before something is recorded that reads them

    def run(self, part: Batch, first: bool | None) -> Tensor:
        """Adds the gradients of one microbatch; returns its loss, which the next one overwrites."""
        adds, self._adds = self._adds, True
        if not self._graphed:
            return self._recorder.warm_up(lambda: self._eager(part, first))
        assert self._static is not None
        _copy(self._static, part)
        replay = self._replays.get((adds, first))
        if replay is None:
            replay = self._replays[adds, first] = self._recorder.record(lambda: self._recorded(adds, first))
            self._lies_at, self._copies = (
                Addresses(self._model.module),
                [self._copies, weight_copies(self._model.module)],
            )
            # To add out of place would leave the sums in tensors that nobody looks at.
            assert all(parameter.grad is gradient for parameter, gradient in self._gradients if adds)
        loss, *gradients = replay()
        if not adds:
            if not self._gradients:
                self._gradients = [(p, g) for p, g in zip(self._parameters, gradients, strict=True) if g is not None]
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
        assert loss is not None
        return loss

    def _eager(self, part: Batch, first: bool | None) -> Tensor:
        static = self._static
        if static is None or _shapes(part) != _shapes(static):
            static = _room_for(part, self._weight.device)
        _copy(static, part)
        return self._work(static.tokens, static.targets, static.documents, self._weight, first)

    def _recorded(self, adds: bool, first: bool | None) -> list[Tensor | None]:
        """The work of a graph: the loss, and of a first microbatch the gradients."""
        assert self._static is not None
        if not adds:
            for parameter in self._parameters:
                parameter.grad = None
        static = self._static
        loss = self._work(static.tokens, static.targets, static.documents, self._weight, first)
        return [loss] if adds else [loss, *(parameter.grad for parameter in self._parameters)]


def _shapes(batch: Batch) -> list[Any]:
    return [None if t is None else tuple(t.shape) for t in (batch.tokens, batch.targets, batch.documents)]


def _room_for(batch: Batch, device: torch.device) -> Batch:
    tensors = (batch.tokens, batch.targets, batch.documents)
    return Batch(*[None if t is None else torch.zeros_like(t, device=device) for t in tensors])  # type: ignore[arg-type]


def _copy(static: Batch, part: Batch) -> None:
    static.tokens.copy_(part.tokens)
    static.targets.copy_(part.targets)
    if static.documents is not None and part.documents is not None:
        static.documents.copy_(part.documents, non_blocking=True)  # from pinned memory
