"""What `make_graphed_callables` was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ottava.quant.state import autocast
from ottava.recipe import Recipe


@dataclass(frozen=True)
class Options:
    """What `make_graphed_callables` was asked for. See there."""

    enabled: Any = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    caching: bool = False
    warm_ups: int = 3
    allow_unused_input: bool = False
    retain_graph: bool = False
    clone_gradients: bool = True
    before_warm_up: Callable[[], Any] | None = None
    after_warm_up: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if self.warm_ups < 1:
            raise ValueError(
                f"make_graphed_callables: num_warmup_iters must be at least 1, got {self.warm_ups}: kernels are compiled then."
            )

    def context(self, index: int, count: int) -> autocast:
        """What module `index` of `count` runs under."""
        enabled = self.enabled if isinstance(self.enabled, tuple) else (self.enabled,) * count
        if len(enabled) != count or not all(isinstance(on, bool) for on in enabled):
            raise ValueError(
                f"make_graphed_callables: enabled must be a bool, or one a module ({count}); got {self.enabled!r}."
            )
        return autocast(enabled[index], self.calibrating, self.recipe, self.group)
