"""A run's checkpoints: everything that makes the run is saved and restored here.

Weights, optimizer, delayed scales and random streams are `ottava.checkpoint.model_state`'s business. The learning rate, the order of
data and the random numbers of a step are functions of the step, so the step is all that is added.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ottava.checkpoint import Checkpoints, Loaded, Relaxed, load_model_state, model_state
from ottava.train.config import Config
from ottava.train.model import SpreadModel

RELAXED = Relaxed(extra=["delayed.*"])
"""A run may change its recipe when it is resumed: delayed scales that nobody asks for are left."""


class RunState:
    """What is saved and restored. Every rank calls every method.

    >>> state = RunState(config, model, optimizer)
    >>> loaded = state.load()          # None in a new run
    >>> state.save(step)
    """

    def __init__(self, config: Config, model: SpreadModel, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.background = config.checkpoint.background
        folder = config.run_folder / "checkpoints"
        self.checkpoints = Checkpoints(folder, keep_last=config.checkpoint.keep, config=asdict(config))

    def save(self, step: int, wait: bool = False) -> None:
        """After `step` steps. wait: it is committed when this returns."""
        state = model_state(self.model.module, self.optimizer) | {"step": step}
        if self.background and not wait:
            self.checkpoints.save_async(step, state)
        else:
            self.checkpoints.finish(step, state)

    def load(self) -> Loaded | None:
        """Restores the newest checkpoint that verifies; None if there is none at all."""
        settings = [_settings(group) for group in self.optimizer.param_groups]
        extra = {"step": 0}
        loaded = load_model_state(self.checkpoints, self.model.module, self.optimizer, extra=extra, relaxed=RELAXED)
        for group, now in zip(self.optimizer.param_groups, settings):
            group.update(now)  # betas and decay are what the configuration says today
        return loaded


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
