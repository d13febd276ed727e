"""How a run can end: exit codes, and the exceptions that stand for them."""

from __future__ import annotations

DONE = 0
FAILED = 1
"""Something unforeseen, with a traceback."""
WRONG_USAGE = 2
GATE_FAILED = 3
NO_CHECKPOINT = 4
NON_FINITE = 5
STOPPED = 143
"""By SIGTERM, after saving."""

OUTCOMES = {
    DONE: "done",
    GATE_FAILED: "gate failed",
    NON_FINITE: "non-finite loss",
    STOPPED: "stopped by SIGTERM",
}
"""What summary.json calls them."""


class NonFinite(RuntimeError):
    """Loss or gradients stayed non-finite after the skips and rollbacks that the configuration allows."""
