"""What follows from an exit code of `ottava train`, in one place: the agent, sbatch scripts, manifests and Ray all ask here."""

from __future__ import annotations

from collections.abc import Iterable

from ottava.train import exits

FINAL = (
    exits.WRONG_USAGE,
    exits.GATE_FAILED,
    exits.NO_CHECKPOINT,
    exits.NON_FINITE,
    exits.NOT_SAVED,
    exits.ABANDONED,
)
"""Another start would end the same way, or somebody wants the end."""
SAVED = exits.STOPPED
"""Stopped by a signal, after saving: preempted, drained, or out of time. Another start goes on, however often it happens."""
REFUSED = 69
"""Of `ottava launch`: the scheduler could not be reached, or refused; nothing was submitted (EX_UNAVAILABLE of sysexits.h)."""


def is_final(codes: Iterable[int]) -> bool:
    """Whether ranks that ended so make another start pointless.

    >>> is_final([1, 2]), is_final([137, 1])
    (True, False)
    """
    return any(code in FINAL for code in codes)


def as_shell(code: int) -> int:
    """A process's return code as a shell has it: 128 + n for signal n.

    >>> as_shell(-9)
    137
    """
    return 128 - code if code < 0 else code


def exit_code(codes: Iterable[int]) -> int:
    """The one that says most about ranks that ended with `codes`: a final one, a signal, a stall; 1 often follows from another's end.

    >>> exit_code([1, 137]), exit_code([143, 2]), exit_code([143, 143]), exit_code([143, 1])
    (137, 2, 143, 1)
    """
    failed = [code for code in codes if code]
    final = [code for code in failed if code in FINAL]
    signals = [code for code in failed if code > 128 and code != SAVED]
    others = [code for code in failed if code not in (exits.FAILED, SAVED)]
    unforeseen = [
        code for code in failed if code == exits.FAILED
    ]  # torchrun has then stopped the rest, which end as if saved
    for group in (final, signals, others, unforeseen, failed):
        if group:
            return group[0]
    return exits.DONE
