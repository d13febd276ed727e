"""`Witness`: watches a step that is run again, and names the first tensor that is not finite.

Every tensor that passes a module is looked at, and so are the operands that are quantized inside of modules, through the tally. Each look
waits for the device: for steps that have failed already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ottava.checkpoint.placement import modules_of
from ottava.distributed.vocabulary import VocabParallelHead
from ottava.guard.finding import Finding
from ottava.guard.passing import Passing, watch_modules
from ottava.kernels import tally
from ottava.nn.base import QuantizedModule

LOSS = 10**6
"""Order of the loss: forward operands come before it, gradients after."""


class Slots:
    """Which counter of the tally belongs to which operand of a model, in the order in which a step quantizes them.

    >>> slots = Slots(model)
    >>> slots.first(tally.counts(device, slots.count).tolist())
    Finding(kind='non-finite', layer='layers.0.layernorm_mlp', operand='fc2.input', ...)
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = tally.FIRST
        self._names: dict[int, tuple[str, str, str, int]] = {}
        modules = [(name, m) for name, m in modules_of(model) if isinstance(m, QuantizedModule)]
        for position, (name, module) in enumerate(modules):
            start = self.count
            after = start + len(tally.OPERANDS) * module.delayed.stages
            if after > tally.AGAIN:  # what has no slot counts elsewhere: seen, and not named
                break
            self.count = module.count_from(start)
            for stage in range(module.delayed.stages):
                prefix = module.stage_names[stage] if stage < len(module.stage_names) else f"{stage}."
                for i, operand in enumerate(tally.OPERANDS):
                    backward = operand == "gradient"
                    order = 3 * position + stage + 1
                    order = LOSS + 3 * (len(modules) - position) - stage if backward else order
                    direction = "backward" if backward else "forward"
                    self._names[start + 3 * stage + i] = (name, f"{prefix}{operand}", direction, order)

    def first(self, counts: list[int]) -> Finding | None:
        """What was quantized first of what was not finite; None if everything was."""
        found = [
            Finding("non-finite", layer, operand, direction=direction, value=_numbers(counts[slot]), order=order)
            for slot, (layer, operand, direction, order) in self._names.items()
            if slot < len(counts) and counts[slot]
        ]
        if not found and counts[tally.ELSEWHERE]:
            value = _numbers(counts[tally.ELSEWHERE])
            found = [
                Finding(
                    "non-finite",
                    "the head, or what is compiled",
                    "an operand",
                    direction="forward",
                    value=value,
                    order=LOSS - 1,
                )
            ]
        return min(found, key=lambda f: f.order, default=None)


def _numbers(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


class Witness:
    """The first tensor that is not finite, of what runs inside of `watching`.

    >>> with witness.watching():
    ...     loss.backward()
    >>> witness.found
    """

    def __init__(self, model: nn.Module, slots: Slots, device: torch.device) -> None:
        self._model, self._slots, self._device = model, slots, device
        self.found: Finding | None = None
        self._seen = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around forward and backward."""
        tally.reset(self._device)
        with watch_modules(self._model, self._look):
            yield
        if self.found is None:
            self._look_at_the_tally()
        tally.reset(self._device)

    def _look(self, passing: Passing) -> None:
        self._seen += 1
        if self.found is not None:
            return
        self._look_at_the_tally()
        if self.found is not None or not bool(_bad(passing).any()):
            return
        operand = passing.operand
        if operand == "output":
            operand = _bad_weight(passing.module) or operand
        self.found = Finding(
            "non-finite",
            passing.layer,
            operand,
            direction=passing.direction,
            value=_told(passing),
            order=self._seen,
        )

    def _look_at_the_tally(self) -> None:
        found = self._slots.first(tally.counts(self._device, self._slots.count).tolist())
        if found is not None:
            self.found = Finding(
                "non-finite", found.layer, found.operand, direction=found.direction, value=found.value, order=self._seen
            )


def _bad_weight(module: nn.Module) -> str | None:
    """The parameter to which a module that makes no numbers of numbers owes it."""
    for name, parameter in module.named_parameters(recurse=False):
        values: Any = getattr(parameter, "dequantize", lambda p=parameter: p)()
        if isinstance(values, Tensor) and not bool(values.detach().isfinite().all()):
            return f"weight ({name})"
    return None


def _bad(passing: Passing) -> Tensor:
    """Which numbers are not finite and should be. (Logits of the padding of a vocabulary are -inf.)"""
    bad = ~passing.tensor.isfinite()
    if isinstance(passing.module, VocabParallelHead) and passing.operand == "output":
        bad &= ~passing.tensor.isneginf()
    return bad


def _told(passing: Passing) -> str:
    flat, bad = passing.tensor.reshape(-1), _bad(passing).reshape(-1)
    at = int(bad.to(torch.uint8).argmax())
    return f"{float(flat[at]):g} at {at}" + ("" if int(bad.sum()) == 1 else f", {int(bad.sum())} numbers")
