"""`checkpoint`: run a function now, keep only its inputs, and run it again in backward.

The second run is bit for bit the first: torch's random stream and every tracked one are put back, modules use the delayed scales they
used the first time, and nothing is recorded twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ottava.nn.random_replay import replayed
from ottava.quant.recompute import RECOMPUTE
from ottava.quant.state import CURRENT


def checkpoint(
    function: Callable,
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable | None = None,
    tp_group: Any = None,
    use_reentrant: bool = False,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, whose intermediate tensors are computed again in backward instead of kept.

    get_rng_state_tracker: a function that returns the tracker whose streams the recomputation replays. use_reentrant is accepted
    from scripts that pass it; torch's non-reentrant form, which is exact and needs no input with a gradient, serves both.
    distribute_saved_activations over a `tp_group` of one rank has nothing to distribute.

        >>> y = ottava.checkpoint(layer, x)
    """
    if distribute_saved_activations and tp_group is not None and tp_group.size() > 1:
        raise ValueError(
            "distribute_saved_activations needs tensor-parallel modules, which run in one process here: leave it False."
        )
    if use_reentrant not in (True, False):
        raise ValueError(f"use_reentrant must be True or False, got {use_reentrant!r}.")
    tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None

    recipe_now = (CURRENT.recipe, CURRENT.calibrating, CURRENT.group)

    def contexts() -> tuple[Any, Any]:
        streams = replayed(tracker) if tracker is not None else (contextlib.nullcontext(), contextlib.nullcontext())
        scales: list[Tensor] = []
        return _both(_stashing(scales), streams[0]), _both(_replaying(scales, recipe_now), streams[1])

    return torch_checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        determinism_check=determinism_check,
        debug=debug,
        **kwargs,
    )


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


@contextlib.contextmanager
def _stashing(scales: list[Tensor]) -> Iterator[None]:
    """First pass: modules with delayed scaling append the scales they use."""
    outer, RECOMPUTE.stash = RECOMPUTE.stash, scales if torch.is_grad_enabled() else None
    try:
        yield
    finally:
        if outer is not None and RECOMPUTE.stash is not None:
            outer.extend(
                RECOMPUTE.stash
            )  # a checkpoint inside another: the outer recomputation meets these modules too
        RECOMPUTE.stash = outer


@contextlib.contextmanager
def _replaying(scales: list[Tensor], recipe_then: tuple[Any, bool, Any]) -> Iterator[None]:
    """Recomputation: modules run by the recipe of the first pass and take its scales back in the same order."""
    outer = (RECOMPUTE.replay, RECOMPUTE.stash)
    recipe_now = (CURRENT.recipe, CURRENT.calibrating, CURRENT.group)
    RECOMPUTE.replay, RECOMPUTE.stash = iter(scales), None
    CURRENT.recipe, CURRENT.calibrating, CURRENT.group = recipe_then
    CURRENT.depth += 1
    try:
        yield
    finally:
        CURRENT.depth -= 1
        CURRENT.recipe, CURRENT.calibrating, CURRENT.group = recipe_now
        RECOMPUTE.replay, RECOMPUTE.stash = outer
