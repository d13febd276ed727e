"""Recomputation with a random-state tracker: the second forward draws the numbers of the first."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any


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
