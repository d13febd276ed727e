"""Where computing waits for communication, so that someone can measure it.

    with comm_wait_hook(clock_of_the_trainer):       # FSDP2's waits for weights and gradients, and those of tensor parallelism
        loss = model(tokens, targets)

What is waited for has a kind, which the clock is told: `TENSOR` or `SHARDS`.

On a GPU a wait is a mark in the stream: what is measured between events before and after it is the time that nothing hid. DDP and
FSDP1 wait inside torch, where nobody can look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ottava import torch_private

Around = Callable[[str], AbstractContextManager[Any]]

TENSOR, SHARDS = "tensor", "shards"
"""Between the ranks that hold parts of one layer; between those that hold shards of a weight."""


def _nobody(kind: str) -> AbstractContextManager[Any]:
    return nullcontext()


_around: Around = _nobody


def waiting(kind: str = TENSOR) -> AbstractContextManager[Any]:
    """Goes around every wait for communication."""
    return _around(kind)


@contextmanager
def comm_wait_hook(around: Around) -> Iterator[None]:
    """`around(kind)` is entered for every wait in here, in all threads (autograd has its own)."""
    global _around
    before, _around = _around, around
    try:
        with torch_private.around_fsdp_waits(lambda: around(SHARDS)):
            yield
    finally:
        _around = before
