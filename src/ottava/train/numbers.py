"""`NumberGuard`: whether the numbers of a run can be trusted, step by step, over all ranks. `ottava.guard` has how each thing is found.

every step     what was not finite when it was quantized, and a part of the state that is not plausible: counted on the device, read with
               the loss
a bad step     is run again, watched: the first tensor that is not finite is named
replay_every   a microbatch is computed twice and compared bit for bit; the state is what it was after the step before; ranks that must
               hold the same do
a save         the whole state is plausible, and the same where it must be
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ottava.guard.finding import Finding, first
from ottava.guard.replay import Record
from ottava.guard.replicas import Dispute, Evidence, Sealed, compare, evidence, key_of
from ottava.guard.state import Limits, StateWatch
from ottava.guard.witness import LOSS, Slots, Witness
from ottava.kernels import tally
from ottava.notices import warn_once
from ottava.train.config import Config
from ottava.train.events import Events
from ottava.train.model import DelayedBuffers, DistributedModel
from ottava.train.optimizer import named
from ottava.train.world import World

MOST = 8
"""Findings of a rank that are told of one event."""
Run = Callable[[bool], Tensor]
"""Computes something again, from the state as it is; its loss. Argument: whether backward too."""


class NumberGuard:
    """Every rank calls every method at the same time. Steps are counted from 0 here, and told from 1.

    >>> guard.begin()
    >>> with guard.recording(step, microbatch=0):
    ...     loss.backward()
    >>> reading = guard.reading()             # to be read with the loss
    >>> wrong = guard.replay(step, again)     # [], or what is wrong
    """

    def __init__(self, config: Config, model: DistributedModel, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.model, self.world, self.device = model, world, world.device
        self.slots = Slots(model.module)
        self.state = StateWatch(model.module, optimizer)
        self.events = Events(config.run_folder, world.leads)
        self._every = config.health.replay_every
        # Some backward kernels of a GPU add in no fixed order.
        self._backward = self.device.type == "cpu" or config.train.deterministic
        if self._every and not self._backward:
            warn_once(
                "ottava train: health.replay_every compares forward passes alone; with train.deterministic also backward ones."
            )
        # Gradients that are not compared need not be made. But DDP and FSDP1 count on a backward after each forward, a graph has both, and
        # what backward recomputes is compared too.
        reduced = isinstance(model.module, DistributedDataParallel | FullyShardedDataParallel)
        whole = self._backward or reduced or config.train.cuda_graph or config.parallel.recompute != "none"
        self._forward_alone = not whole
        self._record: Record | None = None
        self._before: DelayedBuffers = []
        self._sealed: Sealed | None = None
        self._disputed: tuple[int, dict[int, Evidence]] | None = None
        self._counts: Tensor | None = (
            None  # float64: 0 for numbers of a step that may be anything finite, 1 for those that must be 0
        )
        tally.reset(self.device)

    # every step

    def begin(self) -> None:
        """Of a step: what an evaluation has counted is not this step's."""
        tally.reset(self.device, weights=False)
        self.state.begin()

    def reading(self) -> Tensor:
        """float64 [1 + slots]: tensors of the state that are wrong, and what was not finite, by slot. 0 everywhere is fine.

        Of the passes since `begin`, and of the weights that were quantized since the last reading. Nobody waits.
        """
        counts = tally.counts(self.device, self.slots.count).double()
        tally.reset(self.device)
        return torch.cat([self.state.glance(self.device).reshape(1), counts])

    def sound(self, numbers: Tensor) -> Tensor:
        """bool []: whether the first two of `numbers` (loss, norm of gradients) are finite and the others, a `reading`, are 0. Nobody
        waits."""
        if self._counts is None:
            self._counts = torch.cat([numbers.new_zeros(2), numbers.new_ones(numbers.numel() - 2)])
        return (numbers * self._counts).sum() == 0  # 0 times what is not finite is NaN

    def forget(self) -> None:
        """The state is another: that of a checkpoint."""
        tally.reset(self.device)
        self.state.forget()
        self._sealed = self._record = None

    # bad steps

    def investigate(self, step: int, loss: float, counts: list[float], again: Callable[[], Any]) -> list[Finding]:
        """What is wrong with a step that is bad, the cause first; [] if nothing was found. The same in every rank.

        loss: this rank's own. counts: the slots of `reading`. again: runs forward and backward of the whole step.
        """
        everywhere = self._gathered(self._of_state(step))
        if everywhere:
            return everywhere
        once = self._once(step, loss, counts)
        witness = Witness(self.model.module, self.slots, self.device)
        with self.model.unchanged(), witness.watching():
            again()
        seen = self._gathered([] if witness.found is None else [witness.found.at(step + 1, self.world.rank)])
        if seen:
            return [f for f in [first(seen)] if f is not None]
        chosen = first(self._gathered(once))
        transient = "transient: not seen when the step was run again"
        return [] if chosen is None else [replace(chosen, detail=transient)]

    def _once(self, step: int, loss: float, counts: list[float]) -> list[Finding]:
        """What is left to see of the step as it ran: of this rank, unless a gradient is all that there is."""
        mine = [self.slots.first([int(count) for count in counts])]
        if not math.isfinite(loss):
            mine.append(Finding("non-finite", "the model", "loss", direction="forward", value=f"{loss:g}", order=LOSS))
        found = [f.at(step + 1, self.world.rank) for f in mine if f is not None]
        if any(self.world.gather_values(bool(found))):
            return found
        gradient = self._bad_gradient() if self.world.leads else None
        return [] if gradient is None else [replace(gradient, step=step + 1)]

    def _of_state(self, step: int) -> list[Finding]:
        return [f.at(step + 1, self.world.rank) for f in self.state.findings()]

    def _bad_gradient(self) -> Finding | None:
        """The last parameter whose summed gradient is not finite: backward came to it first. Which rank's it was is not known."""
        for name, parameter in reversed(list(named(self.model.module))):
            gradient = parameter.grad
            if gradient is not None and not bool(_local(gradient).isfinite().all()):
                layer, _, attribute = name.rpartition(".")
                return Finding("non-finite", layer, f"gradient of {attribute}", direction="backward")
        return None

    def _gathered(self, mine: list[Finding]) -> list[Finding]:
        """Of all ranks, in order of rank."""
        parts = self.world.gather_values([finding.as_json() for finding in mine[:MOST]])
        return [Finding.from_json(values) for part in parts for values in part]

    # silent corruption

    def due(self, step: int) -> bool:
        """Whether `step` is replayed and compared."""
        disputed = self._disputed is not None and self._disputed[0] == step
        return disputed or (self._every > 0 and (step + 1) % self._every == 0)

    @contextmanager
    def recording(self, step: int, microbatch: int) -> Iterator[None]:
        """Around each microbatch of a step."""
        if microbatch or not self.due(step):
            yield
            return
        self._before = self.model.delayed_buffers()
        record = Record(self.model.module, self._backward)
        with record.watching():
            yield
        self._record = record

    def seal(self, done: int) -> None:
        """After a step of the optimizer: nothing but the next one may change the state, if that is looked at."""
        self._sealed = Sealed(self.state.all()) if self.due(done) else None

    def replay(self, step: int, again: Run) -> list[Finding]:
        """Before a step of the optimizer that is due: what is wrong. again: computes the first microbatch again."""
        if not self.due(step) or self._record is None:
            return []
        once, self._record = self._record, None
        with self.model.unchanged(), self._without_gradients():
            twice = self._again(again)
            odd = once.difference(twice)
            if any(self.world.gather_values(odd is not None)):
                odd = _judged(odd, once, twice, self._again(again))
        now = Sealed(self.state.all())
        changed = [] if self._sealed is None else self._sealed.changes(now)
        memory = self._gathered([f.at(step + 1, self.world.rank) for f in changed])
        replayed = self._gathered([] if odd is None else [odd.at(step + 1, self.world.rank)])
        differing = self._differing(step, now, memory)
        if memory:  # the rest follows from it
            return [replace(f, detail="persistent: no step of the optimizer wrote it") for f in memory]
        return [f for f in [first(replayed)] if f is not None] + differing

    def _again(self, again: Run) -> Record:
        record = Record(self.model.module, self._backward)
        self.model.set_delayed_buffers(self._before)
        with record.watching():
            again(not self._forward_alone)
        if self._forward_alone:
            self.model.reshard()
        return record

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Gradients made inside are dropped; those from before are there again afterwards."""
        reused = isinstance(self.model.module, DistributedDataParallel | FullyShardedDataParallel)
        parameters = [p for p in self.model.module.parameters() if p.grad is not None]
        kept = [p.grad.clone() if reused else p.grad for p in parameters]  # type: ignore[union-attr]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter in self.model.module.parameters():
                parameter.grad = None
            for parameter, gradient in zip(parameters, kept):
                parameter.grad = gradient

    def _differing(self, step: int, now: Sealed, memory: list[Finding]) -> list[Finding]:
        """Tensors of which ranks hold different bits."""
        if self.world.size == 1:
            return []
        disputes = compare(now, self.world.gather_tensor)
        if self._disputed is not None and self._disputed[0] == step and not disputes:
            self._attribute(step, now)
        blamed = {f.rank for f in memory}
        mine = [_as_finding(dispute, step, blamed) for dispute in disputes.values() if dispute.entry is not None]
        if any(not dispute.wrong for dispute in disputes.values()) and not memory:
            self._disputed = (step, evidence(disputes, self.world.gather_tensor))
        found = self._gathered([f for f in mine if f is not None])
        return list({(f.layer, f.operand, f.rank): f for f in found}.values())

    def _attribute(self, step: int, now: Sealed) -> None:
        """The run has come to the step of a dispute again, from a checkpoint: whose numbers were farther from those of now was wrong."""
        assert self._disputed is not None
        disputes, self._disputed = self._disputed[1], None
        mine: list[Finding] = []
        for entry in now.entries:
            held = disputes.get(key_of(entry))
            rank = None if held is None else held.farthest(entry.tensor)
            if rank is not None:
                detail = "the steps were done again from the checkpoint, and its numbers had been farthest from those"
                mine.append(Finding("replicas", entry.layer, entry.operand, detail=detail).at(step + 1, rank))
        findings = list({(f.layer, f.operand, f.rank): f for f in self._gathered(mine)}.values())
        if findings:
            ranks = sorted({str(f.rank) for f in findings})
            text = f"Done again from the checkpoint: it was rank {', '.join(ranks)} that had other numbers."
            self.events.tell(step + 1, "attributed", text, findings)

    # saves

    def holds(self, done: int) -> list[Finding]:
        """Before a save: what is wrong with the state as a whole."""
        entries = self.state.all()
        bad = float(Limits(entries).out_of_bounds())
        if sum(self.world.gather_values(bad)):
            return self._gathered(self._of_state(done - 1))
        return self._differing(done - 1, Sealed(entries), []) if self._every and self.world.size > 1 else []


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _judged(odd: Finding | None, once: Record, twice: Record, thrice: Record) -> Finding | None:
    """`odd`, transient or persistent by a third run."""
    if odd is None:
        odd = once.difference(thrice)
        return None if odd is None else replace(odd, detail="transient: a third run alone was different")
    if once.difference(thrice) is None:
        return replace(odd, detail="transient: the second of three runs alone was different")
    if twice.difference(thrice) is None:
        return replace(odd, detail="transient: the first of three runs alone was different")
    return replace(odd, detail="persistent: three runs gave three results")


def _as_finding(dispute: Dispute, step: int, blamed: set[int | None]) -> Finding | None:
    entry, held = dispute.entry, sorted(dispute.digests)
    assert entry is not None
    wrong: list[int | None] = [*dispute.wrong] or [r for r in held if r in blamed] or [None]
    detail = f"of ranks {', '.join(map(str, held))}"
    return Finding("replicas", entry.layer, entry.operand, wrong[0], step + 1, detail=detail)
