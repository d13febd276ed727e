"""Random-state trackers in modules: whose stream dropout draws from, and recomputation that draws the same numbers again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def replayed(tracker: Any) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Contexts for `checkpoint`: the recomputation draws from the random streams as they were the first time."""
    before = copy.deepcopy(tracker.get_states())

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = copy.deepcopy(tracker.get_states())
        tracker.set_states(before)
        try:
            yield
        finally:
            tracker.set_states(now)

    return contextlib.nullcontext(), again()


def perhaps_again(core: Callable[..., Tensor], recompute: bool, *args: Tensor | None, tracker: Any = None) -> Tensor:
    """core(*args), which backward does again instead of keeping what it made, where that is asked for.

    tracker: whose random streams `core` draws from, if it does.
    """
    if not recompute or not torch.is_grad_enabled():
        return core(*args)
    if tracker is None:
        return checkpoint(core, *args, use_reentrant=False)
    return checkpoint(core, *args, use_reentrant=False, context_fn=lambda: replayed(tracker))


def drawing_own_masks(get_tracker: Callable[[], Any] | None, spread_tokens: bool) -> contextlib.AbstractContextManager:
    """A context for dropout of hidden states: with `spread_tokens` every tensor-parallel rank draws masks of its own.

    Without, ranks hold the same tokens, and the default stream, equal on all of them, gives each token one mask.

        >>> with drawing_own_masks(self.get_rng_state_tracker, self.sequence_parallel):
        ...     x = F.dropout(x, p)
    """
    tracker = own_stream(get_tracker(), spread_tokens=True) if get_tracker is not None and spread_tokens else None
    return contextlib.nullcontext() if tracker is None else tracker.fork()


def own_stream(tracker: Any, spread_tokens: bool) -> Any:
    """`tracker` if dropout of what ranks hold different parts of has to fork it; None if a caller has done so already.

    Ottava's tracker says whether it is forked. Of another library's it is not known: with sequence parallelism such callers fork
    around the whole layer, without it they leave it to attention.
    """
    return None if getattr(tracker, "forked", spread_tokens) else tracker
