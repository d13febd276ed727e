"""What the library tells its user: through `logging`, under the name "ottava"; and what may have been meant."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("ottava")


@functools.cache
def warn_once(message: str) -> None:
    """Logs `message` as a WARNING, which Python shows unless told otherwise, the first time that it is given.

    Every process says it once; what would be the same line in a thousand ranks is for `warn_once_on_rank0`.

        >>> warn_once("ottava: attention_mask has no effect.")
    """
    log.warning(message)


def did_you_mean(given: Any, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The name that `given` may stand for, as a question with a space before it; empty if none is near.

    >>> did_you_mean("fsdp", ["ddp", "fsdp2"])
    " Did you mean 'fsdp2'?"
    """
    near = difflib.get_close_matches(str(given)[:80], list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def leads() -> bool:
    """Whether this process is rank 0, or alone.

    >>> leads()
    True
    """
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def warn_once_on_rank0(message: str) -> None:
    """`warn_once` for what is the same in all ranks: rank 0 says it.

    >>> warn_once_on_rank0("ottava: overlap: no symmetric memory.")
    """
    if leads():
        warn_once(message)
