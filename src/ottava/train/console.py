"""What people read, where nobody may be reading any more: a closed pipe or a lost terminal is no reason to stop training."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from ottava.notices import warn_once
from ottava.untrusted.files import shown


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line and flushes it; control characters, which a sample of a model may have, as escapes. A stream that cannot be written
    to is given up, with one warning.

    >>> say("step 1")
    step 1
    """
    stream = stream or sys.stdout
    try:
        print(shown(text), file=stream, flush=True)
    except (OSError, ValueError) as error:  # ValueError: closed
        give_up(stream, error)


def give_up(stream: TextIO, error: Exception) -> None:
    """Turns what is still written to `stream`, also at the process's end, into nothing."""
    with suppress(OSError, ValueError):  # it may have no file: closed already, or a test's
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    warn_once(f"ottava train: the console is gone ({error}). Training goes on; metrics.jsonl has every step.")


def settle() -> None:
    """Before the process ends: what is left in the streams is written or given up, so that Python's own exit cannot fail by it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            give_up(stream, error)


def tell(text: str) -> None:
    """A line to stderr from where `print` may not be used: a signal handler, or a thread of a process that hangs."""
    with suppress(OSError):  # nobody is there to be told
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
