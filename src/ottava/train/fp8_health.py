"""FP8 health: how well the numbers of every layer fit the format they are multiplied in.

On a step that is looked at, the operands of every quantized product are seen on their way in: inputs and weights in the forward
pass, gradients in the backward pass. Three counts an operand, made on the device and read when the step is over. On all other steps
nothing is installed, so they cost nothing.

    amax        largest magnitude (for blocks: an upper bound, from the scales)
    scale       smallest of the factors that values were multiplied by
    underflow   share of values that are 0 in the format (those that were 0 before are among them)
    saturated   share of values at the format's largest magnitude (the one that a current scale is made from is among them)
    non_finite  numbers that were NaN or infinite when they were quantized, of all microbatches; of weights with an FP8 copy, NaNs

A figure that is not finite itself is null.
Shares of large operands are those of every n-th row, about a million values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.checkpoint.placement import modules_of
from ottava.kernels import tally
from ottava.nn.base import QuantizedModule
from ottava.nn.operand import Operand
from ottava.nn.product import watching
from ottava.notices import warn_once
from ottava.train.config import Config
from ottava.train.metrics import finite
from ottava.train.model import DistributedModel
from ottava.train.optimizer import Numbers
from ottava.train.report import HEALTH_FILE
from ottava.train.world import World
from ottava.untrusted.files import open_to_append

SAMPLE = 2**20
"""Values (bytes) that are counted of an operand, more or less."""


FIGURES = ("amax", "scale", "underflow", "saturated", "non_finite")


def figures(operand: Operand, counted: Tensor | None = None) -> Tensor:
    """FIGURES of a quantized operand, float32 [5] on the device. counted: what the tally has of it."""
    scheme = operand.scheme
    assert scheme is not None and operand.scale_inv is not None and operand.amax is not None
    element, codes = scheme.element, operand.data.view(torch.uint8)
    magnitude = element.magnitude_codes(codes[:: max(codes.numel() // SAMPLE, 1)])
    size = max(magnitude.numel(), 1)
    inverse = scheme.scales_as_float(operand.scale_inv).amax()
    amax = operand.amax.amax() if operand.amax.numel() else inverse * element.max
    zero, top = (magnitude == 0).sum() / size, (magnitude == element.largest_code).sum() / size
    # FP8 keeps a NaN as one; an infinity it does not.
    bad = (magnitude > element.largest_code).sum() + ~amax.isfinite()
    bad = bad if counted is None else torch.maximum(bad, counted.reshape(()))
    return torch.stack([amax.float(), 1.0 / inverse, zero, top, bad.float()])


class _Passing:
    """One module on its way forward or back: which of its products comes next."""

    def __init__(self, name: str, module: QuantizedModule) -> None:
        self.tally = module.tally
        self._names = [f"{name}.{stage}" for stage in module.stage_names]
        self._groups = module.groups
        self._again = torch_private.inside_backward()
        self._made = 0

    @property
    def done(self) -> bool:
        """Whether all products of the forward pass were made. A recomputation stops then, before the module's forward ends."""
        return self._made == len(self._names)

    def slot(self, stage: str, operand: int) -> int:
        """Of the tally: where what is not finite of this operand is counted; 0: nowhere."""
        return self.tally + 3 * self._names.index(stage) + operand if self.tally else 0

    def next_forward(self) -> str | None:
        """The name of the stage that multiplies; None for a forward that runs again in backward."""
        self._made += 1
        return None if self._again else self._names[self._made - 1]

    def next_backward(self) -> str | None:
        """The same; None for the second of the two products that a gradient is in, rowwise and columnwise."""
        turn, group = divmod(self._made, self._groups)
        self._made += 1
        steps = len(self._names) // self._groups
        return None if turn % 2 else self._names[(steps - 1 - turn // 2) * self._groups + group]


class Fp8Health:
    """Looks at every `metrics.fp8_every`-th step in the leading rank and writes RUN/fp8.jsonl.

    Under torch.compile nobody looks: a compiled layer has no products to watch.

        >>> with fp8.sample_operands(step):
        ...     loss.backward()
    """

    def __init__(self, config: Config, model: DistributedModel, world: World) -> None:
        every = config.metrics.fp8_every
        self._every = every if world.leads and model.recipe is not None and not config.train.compile else 0
        self._model = model.module
        self._path = config.run_folder / HEALTH_FILE
        self._figures: dict[str, Tensor] = {}
        self._kept: tuple[int, list[str], Numbers] | None = None  # (step, names, figures) that are on their way
        self._forward: _Passing | None = None  # the module whose forward pass runs now
        self._backward: _Passing | None = None

    def looks_at(self, step: int) -> bool:
        """Whether operands of `step`, from 0, are sampled."""
        return self._every > 0 and (step + 1) % self._every == 0

    @contextmanager
    def sample_operands(self, step: int) -> Iterator[None]:
        """Around forward and backward of `step`, from 0."""
        if not self.looks_at(step):
            yield
            return
        hooks = [hook for name, module in _quantized(self._model) for hook in self._hooks(name, module)]
        try:
            with watching(self._look):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self.write()  # what is left of a look before
        if self._figures:
            figured = torch.stack(list(self._figures.values()))
            self._kept = step + 1, list(self._figures), Numbers(figured)
            self._figures.clear()

    def _hooks(self, name: str, module: QuantizedModule) -> list[Any]:
        def begin(*_: Any) -> None:
            self._forward = _Passing(name, module)

        def end(_: Any, __: Any, output: Any) -> None:
            self._forward = None
            first = output[0] if isinstance(output, tuple) else output
            if first.requires_grad:
                first.register_hook(going_back)

        def going_back(_: Tensor) -> None:
            self._forward, self._backward = None, _Passing(name, module)

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _look(self, a: Operand, b: Operand) -> None:
        if self._forward is not None:
            passing, stage = self._forward, self._forward.next_forward()
            self._forward = None if self._forward.done else self._forward
            if stage is None:
                return
            self._note(f"{stage}input", a, passing.slot(stage, 0))
            self._note(f"{stage}weight", b, passing.slot(stage, 1))
        elif self._backward is not None:
            back = self._backward.next_backward()
            if back is not None:
                self._note(f"{back}grad", a, self._backward.slot(back, 2))

    def _note(self, name: str, operand: Operand, slot: int) -> None:
        """The last microbatch stands for all."""
        counted = tally.counts(operand.data.device)[slot] if slot else None
        self._figures[name] = figures(operand, counted)

    def write(self) -> None:
        """The line of the last look, if it is not written yet. Waits for the device, so call it when that has more to do."""
        if self._kept is None:
            return
        (step, names, numbers), self._kept = self._kept, None
        values, wide = numbers.read(), len(FIGURES)
        rows = [values[i : i + wide] for i in range(0, len(values), wide)]
        tensors = {name: dict(zip(FIGURES, map(finite, row))) for name, row in zip(names, rows)}
        try:
            with open_to_append(self._path) as file:
                file.write(json.dumps({"step": step, "tensors": tensors}, allow_nan=False) + "\n")
        except OSError as error:  # a full disk is no reason to stop
            warn_once(f"{self._path} cannot be written: {error.strerror}. Looks at FP8 health are left out.")


def _quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedModule]]:
    """By the names of one process."""
    for name, module in modules_of(model):
        if isinstance(module, QuantizedModule) and not module.unquantized:
            yield name, module
