"""What to do about numbers that are not finite, and which losses are spikes.

A step whose loss or gradient norm is not finite changes no weight: it is skipped. If more than `retries` steps in a row were, the
weights themselves are suspect and the run goes back to its last checkpoint. A run that has gone back `retries` times without a
good step at the place where it failed is over: exit code 5.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

from ottava.train.config import HealthSection
from ottava.train.exits import NonFinite

Verdict = Literal["fine", "skip", "roll back"]


class Health:
    """Judges each step. All ranks judge the same numbers, so they agree.

    >>> health = Health(HealthSection(retries=1))
    >>> [health.judge(step, loss, 1.0) for step, loss in ((1, 2.0), (2, math.nan), (3, math.nan))]
    ['fine', 'skip', 'roll back']
    """

    def __init__(self, section: HealthSection) -> None:
        self.section = section
        self.rollbacks = 0
        self._in_a_row = 0
        self._failed_at = 0  # the last step that was not finite
        self._recent: deque[float] = deque(maxlen=section.spike_window)

    def judge(self, step: int, loss: float, grad_norm: float, bad: float = 0.0) -> Verdict:
        """What to do after the backward pass of `step`. Raises NonFinite where it is over.

        bad: numbers that are wrong though loss and norm are finite; FP8 saturates what is infinite.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm) and not bad:
            self._in_a_row = 0
            if step >= self._failed_at:  # past the place where it failed
                self.rollbacks = 0
            return "fine"
        self._failed_at = max(self._failed_at, step)
        self._in_a_row += 1
        if self._in_a_row <= self.section.retries:
            return "skip"
        self.check_rollbacks(
            step,
            f"Step {step}: loss {loss}, gradient norm {grad_norm}"
            + (f", {bad:.0f} numbers that are not finite or not plausible" if bad else "")
            + f", after {self._in_a_row - 1} skipped steps in a row and",
        )
        return "roll back"

    def check_rollbacks(self, step: int, why: str) -> None:
        """`step` is a reason to go back. Raises NonFinite, with it, if that was tried often enough."""
        self._failed_at = max(self._failed_at, step)
        if self.rollbacks >= self.section.retries:
            raise NonFinite(f"{why} {self.rollbacks} rollbacks (health.retries = {self.section.retries}).")

    @property
    def trusted(self) -> bool:
        """Whether the last step was finite: weights that are suspect are no checkpoint to go back to."""
        return self._in_a_row == 0

    def rolled_back(self) -> None:
        """The weights are those of the last checkpoint again."""
        self.rollbacks += 1
        self._in_a_row = 0
        self._recent.clear()

    def spike(self, loss: float) -> bool:
        """Whether a finite loss is far above those before it; remembers it."""
        full = len(self._recent) >= max(self.section.spike_window // 10, 2)
        factor = self.section.spike_factor
        found = bool(factor) and full and loss > factor * statistics.median(self._recent)
        self._recent.append(loss)
        return found
