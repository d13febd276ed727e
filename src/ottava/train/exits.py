"""How a run can end: exit codes, and the exceptions that stand for them."""

from __future__ import annotations

DONE = 0
FAILED = 1
"""Something unforeseen, with a traceback."""
WRONG_USAGE = 2
GATE_FAILED = 3
NO_CHECKPOINT = 4
NON_FINITE = 5
STALLED = 6
"""No rank moved for too long: the watchdog has named the one that the others waited for."""
NOT_SAVED = 7
"""Checkpoints could not be written, `checkpoint.max_failed` times in a row or at the end."""
ABANDONED = 130
"""Ctrl-C was pressed again while the run was saving."""
STOPPED = 143
"""By a signal, after saving."""

TOLD = (DONE, GATE_FAILED, NON_FINITE, NOT_SAVED, STALLED, ABANDONED, STOPPED)
"""Those that the ranks have explained already."""

OUTCOMES = {
    DONE: "done",
    GATE_FAILED: "gate failed",
    NON_FINITE: "non-finite loss",
    NOT_SAVED: "checkpoints could not be saved",
    STOPPED: "stopped",
}
"""What summary.json calls them."""


class NonFinite(RuntimeError):
    """Loss or gradients stayed non-finite after the skips and rollbacks that the configuration allows."""


class NotSaved(RuntimeError):
    """Checkpoints could not be written, too often in a row or when it mattered."""
