"""Standard streams of a command that may be closed, and errors as people read them."""

from __future__ import annotations

import os
import signal
import sys

from ottava.untrusted.files import shown

NOT_READ = 128 + signal.SIGPIPE
"""Exit code where nobody reads any more, as with `| head`: what a shell says of a program that SIGPIPE has ended."""


def complete() -> None:
    """Puts /dev/null where a stream is closed (`>&-`). A checkpoint or a socket would get its number, and be written to as if it were a
    console."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def refuse(command: str, error: Exception, code: int = 2) -> int:
    """Says why a command was refused; returns the exit code.

    >>> refuse("ottava report", ValueError("there is no run."))
    2
    """
    if isinstance(error, BrokenPipeError):
        raise error
    print(f"{command}: {shown(str(error))}", file=sys.stderr)
    return code


def settle() -> None:
    """Before the end of a command whose exit code says more than that nobody reads it (`ottava train | head -2`)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        give_up()


def give_up() -> int:
    """After BrokenPipeError: what is left for stdout goes nowhere, so that Python's own exit cannot fail by it. The exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return NOT_READ
