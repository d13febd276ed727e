"""What a detector says: a `Finding`, of one of the failure modes or of another kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from ottava.notices import leads, warn_once

Mode = Literal[
    "only the root wrapped",
    "FSDP1 and FSDP2 mixed",
    "1-D FSDP across nodes",
    "shards beyond NVLink",
    "ACS or wrong card",
    "bf16 gradient sum",
    "no overlap",
]
"""The seven ways in which a run is slow or wrong and says nothing."""
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Finding:
    """One thing to say about a model, a plan, a machine or a run.

    >>> Finding("warning", "gradients are reduced in bfloat16")
    Finding(level='warning', message='gradients are reduced in bfloat16')
    """

    level: Literal["error", "warning"]
    """ "error": it cannot run, or not as meant. "warning": it runs, and something else is mostly better."""

    message: str
    """What was found, with its numbers, and what to do."""

    mode: Mode | None = field(default=None, repr=False)
    """Which of the failure modes it is; None: something else."""


def enforce(findings: Iterable[Finding]) -> None:
    """Raises one ValueError with all errors; logs each warning once, in rank 0.

    >>> enforce(check_topology(plan, config) + check_model(model))
    """
    findings = list(findings)
    if leads():
        for finding in findings:
            if finding.level == "warning":
                warn_once(finding.message)
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        raise ValueError("The plan cannot run here: " + "\n  ".join(errors if len(errors) == 1 else ["", *errors]))
