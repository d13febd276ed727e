"""`Step`: a step of training that was launched, and what is known of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ottava.guard.finding import Finding
from ottava.train.clock import Span
from ottava.train.optimizer import Numbers


@dataclass
class Step:
    """A step that was launched. On a GPU it may still be under way; what is not known yet is waited for when it is asked."""

    number: int
    """From 1."""
    numbers: Numbers
    """The sum of this rank's losses, the norm of the gradients, and `NumberGuard.reading`."""
    known: tuple[float, float] | None = None
    """(mean loss over all ranks, norm), where the ranks have agreed on them already."""
    tokens: float = 1.0
    """What the sum is divided by for the mean."""
    clipped: dict[str, Any] | None = None
    """What `optimizer.step` is told. None: the step was made, if loss and norm are finite and nothing is bad."""
    stop: bool = False
    """Whether any rank was asked to stop."""
    again: Callable[[], Any] = lambda: None
    """Forward and backward of the whole step once more."""
    wrong: list[Finding] = field(default_factory=list)
    """What a replay has found."""
    all_bad: float | None = None
    """`bad` over all ranks, where they have agreed on it already."""
    event: str | None = None
    lr: float = 0.0
    span: Span | None = None
    validation: float | None = None

    @property
    def loss(self) -> float:
        """The mean over the tokens of the global batch."""
        return self.known[0] if self.known else self.numbers.read()[0] / self.tokens

    @property
    def grad_norm(self) -> float:
        """Over all ranks, before it was clipped."""
        return self.known[1] if self.known else self.numbers.read()[1]

    @property
    def bad(self) -> float:
        """Numbers that are wrong though loss and norm may be finite: operands that are not finite, state that is not plausible."""
        return sum(self.numbers.read()[2:]) if self.all_bad is None else self.all_bad

    @property
    def trouble(self) -> str:
        """What is wrong with a bad one, as a noun with its article, if it has one."""
        if not math.isfinite(self.loss):
            return "a non-finite loss"
        if not math.isfinite(self.grad_norm):
            return "a non-finite gradient"
        return "non-finite numbers that FP8 hides"
