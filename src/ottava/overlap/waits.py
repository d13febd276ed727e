"""Where computing waits for communication, so that someone can measure it.

    with comm_wait_hook(clock_of_the_trainer):       # FSDP2's waits for weights and gradients, and those of tensor parallelism
        loss = model(tokens, targets)

On a GPU a wait is a mark in the stream: what is measured between events before and after it is the time that nothing hid. DDP and
FSDP1 wait inside torch, where nobody can look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ottava import torch_private

Around = Callable[[], AbstractContextManager[Any]]

_around: Around = nullcontext


def waiting() -> AbstractContextManager[Any]:
    """Goes around every wait for communication."""
    return _around()


@contextmanager
def comm_wait_hook(around: Around) -> Iterator[None]:
    """`around()` is entered for every wait in here, in all threads (autograd has its own)."""
    global _around
    before, _around = _around, around
    try:
        with torch_private.around_fsdp_waits(around):
            yield
    finally:
        _around = before
