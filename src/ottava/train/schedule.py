"""The learning rate: up linearly in the warm-up, then down. A function of the step alone, so a restart needs no state."""

from __future__ import annotations

import math

from ottava.train.config import ScheduleSection


def lr_fraction(schedule: ScheduleSection, step: int, steps: int) -> float:
    """The learning rate of `step` (from 0) as a fraction of the highest; the last of `steps` has `final_fraction`.

        cosine    half a wave from 1 down to final_fraction
        linear    a straight line
        wsd       warm-up, stable, decay: 1, and a straight line down in the last decay_fraction of the steps
        constant  1 after the warm-up; final_fraction has no say

    >>> [round(lr_fraction(ScheduleSection(kind="linear", warmup_steps=2, final_fraction=0.0), s, steps=6), 2) for s in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = schedule.warmup(steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    top = max(warmup - 1, 0)  # the last step at 1
    if schedule.kind == "wsd":
        top = max(top, steps - 1 - schedule.decay(steps))
    way = min(max((step - top) / max(steps - 1 - top, 1), 0.0), 1.0)  # 0 at the top, 1 at the last step
    height = (1 + math.cos(math.pi * way)) / 2 if schedule.kind == "cosine" else 1 - way
    return schedule.final_fraction + (1 - schedule.final_fraction) * height
