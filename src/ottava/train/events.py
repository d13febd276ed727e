"""RUN/events.jsonl: what went wrong with the numbers of a run, a line of JSON an event. `ottava explain RUN` tells it in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ottava.guard.finding import Finding
from ottava.notices import warn_once
from ottava.train.metrics import finite
from ottava.untrusted.files import open_to_append, read_lines

FILE = "events.jsonl"
KINDS = {"step": int, "what": str, "text": str, "findings": list}
"""What every line has."""


class Events:
    """Appends; the leading rank writes. An event that cannot be written does not stop a run.

    >>> events = Events(Path("runs/debug"), writes=True)
    >>> events.tell(40, "skipped", "Step 40 changed no weight.", [finding])
    """

    def __init__(self, run: Path, writes: bool) -> None:
        self.path, self._writes = run / FILE, writes

    def tell(self, step: int, what: str, text: str, findings: list[Finding] | None = None, **more: Any) -> None:
        """step: from 1. what: found, skipped, rolled back, attributed. text: sentences for people."""
        if not self._writes:
            return
        line = {"step": step, "what": what, "text": text, "findings": [f.as_json() for f in findings or []]}
        line |= {key: finite(value) for key, value in more.items()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self.path) as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            warn_once(f"{self.path} cannot be written: {error.strerror}. Events are in metrics.jsonl alone.")


def read_events(run: Path) -> Iterator[dict[str, Any]]:
    """The lines; what is not one (a killed process leaves half of a line, a stranger anything) is passed over."""
    path = run / FILE
    if not path.is_file():
        return
    for line in read_lines(path):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and all(type(found.get(key)) is kind for key, kind in KINDS.items()):
            yield found
