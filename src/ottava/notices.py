"""What the library tells its user through `logging`, under the name "ottava"."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("ottava")


@functools.cache
def warn_once(message: str) -> None:
    """Logs `message` as a WARNING, which Python shows unless told otherwise, the first time that it is given.

    Every process says it once. What would be the same line in a thousand ranks asks `leads` first.

        >>> warn_once("ottava: attention_mask has no effect.")
    """
    log.warning(message)


def leads() -> bool:
    """Whether this process is rank 0, or alone.

    >>> leads()
    True
    """
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
