"""How a run is doing, from its folder alone: `ottava status RUN`. Works while it runs, from any machine that sees the folder."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ottava.detect.exposed import SHARE
from ottava.doctor.run_logs import LONGEST, first_error
from ottava.train.communication import GATHER_EVERY
from ottava.train.metrics import FILE, is_number, read_metrics
from ottava.train.report_input import plain_config, plain_steps, readable
from ottava.train.run_folder import CONFIG_FILE, SUMMARY_FILE
from ottava.train.summary import table
from ottava.untrusted.files import read_json, read_tail, read_toml

RECENT = 50
"""Steps over which rates are taken."""
LONG = 10.0
"""Times the usual step: without a step for this long, a run is not running, or stalls."""
LEAST_PAUSE_S = 60.0
AHEAD_S = 5.0
"""A file that is younger than now by more than this was stamped by another clock."""


@dataclass(frozen=True)
class RunStatus:
    """What is known of a run. None: not known (yet)."""

    run: str
    state: str
    """What summary.json says of a run that has ended; else "running", "failed" (an error came after the last step), "silent" or
    "starting"."""
    step: int = 0
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    """And what follows: medians of the last steps."""
    step_s: float | None = None
    mfu: float | None = None
    communication: float | None = None
    """Share of a step that communication takes and nothing hides."""
    reserved_gib: float | None = None
    silent_s: float | None = None
    """Since the last step was written."""
    eta_s: float | None = None
    checkpoint: str | None = None
    checkpoint_age_s: float | None = None
    restarts: int = 0
    events: tuple[str, ...] = ()
    """The last few."""
    stragglers: tuple[str, ...] = ()
    """Ranks whose own work has taken far longer than the others', most times that it was looked at."""
    stalls: tuple[str, ...] = ()
    """What the watchdog of a rank said, once each."""
    error: str | None = None
    """The last line of the first error of any rank."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def as_text(self) -> str:
        """As people read it. What is not known is left out."""
        rows = [
            ("run", f"{self.run}: {self.state}"),
            ("steps", f"{self.step:,}" + (f" of {self.steps:,}" if self.steps else "")),
            ("tokens", _shown(self.tokens, ",")),
            ("loss", _shown(self.loss, ".4f")),
            ("tokens/s", _shown(self.tokens_per_s, ",.0f")),
            ("MFU", _shown(self.mfu, ".1%")),
            ("communication", _shown(self.communication, ".1%")),
            ("memory", _shown(self.reserved_gib, ",.2f", " GiB reserved")),
            ("last step", _ago(self.silent_s)),
            ("left", "" if self.eta_s is None else spelled(self.eta_s)),
            ("checkpoint", f"{self.checkpoint or ''} {_ago(self.checkpoint_age_s)}"),
            ("restarts", str(self.restarts) if self.restarts else ""),
            *(("event", event) for event in self.events),
            *(("straggler", straggler) for straggler in self.stragglers),
            *(("stall", stall) for stall in self.stalls),
            ("error", self.error or ""),
        ]  # fmt: skip
        lines = [table([row for row in rows if row[1].strip()])]
        if self.communication is not None and self.communication > SHARE:
            lines.append(
                f"{self.communication:.0%} of a step is communication that nothing hides: if `ottava doctor` finds the links sound, take "
                "shards inside the NVLink domain, more tokens a rank, or parallel.prefetch 2 (`ottava plan` compares)."
            )
        return "\n\n".join(lines)


def run_status(folder: Path, now: float | None = None) -> RunStatus:
    """Reads a run's folder.

    >>> print(run_status(Path("runs/debug")).as_text())
    """
    now = time.time() if now is None else now
    if not (folder / CONFIG_FILE).is_file() and not (folder / FILE).is_file():
        raise ValueError(f"{folder} is not a run: it has neither {CONFIG_FILE} nor {FILE}.")
    config = plain_config(readable(read_toml, folder / CONFIG_FILE))
    steps = config.get("train", {}).get("steps")
    steps = steps if type(steps) is int and is_number(steps) else None
    lines = plain_steps(read_metrics(folder / FILE)) if (folder / FILE).is_file() else []
    summary = readable(read_json, folder / SUMMARY_FILE)
    outcome = str(summary.get("outcome", "ended"))
    common: dict[str, Any] = {"run": str(folder), "steps": steps, "stalls": _stalls(folder)}
    found = first_error(folder)
    common["error"] = None if found is None else found.last_line
    common |= _checkpoint(folder, now)
    if not lines:
        return RunStatus(state=outcome if summary else "starting" if found is None else "failed", **common)
    recent, last = lines[-RECENT:], lines[-1]
    usual = _median(recent, "step_s")
    since = now - (folder / FILE).stat().st_mtime
    silent = max(since, 0.0)
    ended = outcome if summary.get("step") == last["step"] else None
    running = silent < max(LONG * (usual or 0.0), LEAST_PAUSE_S)
    waits = _median(recent, "communication_s")
    events = [f"step {line['step']}: {line['event']}" for line in lines if line.get("event")]
    if since < -AHEAD_S:  # whether it runs cannot be told by a clock then
        ahead = spelled(-since)
        events.append(
            f"the last step is {ahead} ahead of this machine's clock, and the times here are wrong: set the clocks"
        )
    failed = found is not None and found.time >= now - silent  # since the last step
    quiet = "failed" if failed else f"silent for {spelled(silent)}: killed, or it stands still"
    return RunStatus(
        state=ended or ("running" if running and not failed else quiet),
        step=last["step"],
        tokens=_finite(last.get("tokens")),
        loss=next((line["loss"] for line in reversed(lines) if _finite(line.get("loss")) is not None), None),
        tokens_per_s=_median(recent, "tokens_per_s"),
        step_s=usual,
        mfu=_median(recent, "mfu"),
        communication=waits / usual if waits is not None and usual else None,
        reserved_gib=_finite(last.get("peak_reserved_gib")),
        silent_s=None if ended else silent,
        eta_s=(steps - last["step"]) * usual if steps and usual and running and not (ended or failed) else None,
        restarts=int(_finite(last.get("attempt")) or 0),
        events=tuple(events[-3:]),
        stragglers=_stragglers(recent),
        **common,
    )


def _stragglers(lines: list[dict[str, Any]]) -> tuple[str, ...]:
    """Told by name if they were slow in most of the looks that the last steps had, and in two at least."""
    looks = sum(line["step"] % GATHER_EVERY == 0 for line in lines)
    slow: dict[int, list[float]] = {}
    for line in lines:
        times = _finite(line.get("slow_rank_times"))
        if line.get("slow_rank") is not None and times is not None:
            slow.setdefault(line["slow_rank"], []).append(times)
    return tuple(
        f"rank {rank}: {statistics.median(times):.2g} times the others' work"
        for rank, times in sorted(slow.items())
        if len(times) >= max(looks / 2, 2)
    )


def _median(lines: list[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if _finite(line.get(key)) is not None]
    return statistics.median(values) if values else None


def _finite(value: Any) -> Any:
    return value if value is not None and math.isfinite(value) else None


def _checkpoint(folder: Path, now: float) -> dict[str, Any]:
    """The newest that is committed: it has a manifest."""
    manifests = sorted((folder / "checkpoints").glob("step-*/manifest.json"))
    if not manifests:
        return {}
    newest = manifests[-1]
    return {"checkpoint": newest.parent.name, "checkpoint_age_s": max(now - newest.stat().st_mtime, 0.0)}


def _stalls(folder: Path) -> tuple[str, ...]:
    """First lines of what watchdogs wrote, each once."""
    texts = [read_tail(path) for path in sorted((folder / "stalls").glob("rank-*.txt")) if path.is_file()]
    return tuple(dict.fromkeys(text.splitlines()[0][:LONGEST] for text in texts if text.strip()))


def _shown(value: Any, form: str, after: str = "") -> str:
    return "" if value is None else format(value, form) + after


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f"{spelled(seconds)} ago"


def spelled(seconds: float) -> str:
    """A time as people say it.

    >>> spelled(59), spelled(3700), spelled(90000)
    ('59 s', '1 h 1 min', '1 d 1 h')
    """
    whole = round(seconds)
    for size, unit, below in ((86400, "d", "h"), (3600, "h", "min"), (60, "min", "s")):
        if whole >= size:
            smaller = {"h": 3600, "min": 60, "s": 1}[below]
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
